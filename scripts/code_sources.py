"""Functions with docstrings from the standard library and packages, for `make_code_prompts.py`."""

import ast
import builtins
import doctest
import importlib.metadata
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

LICENCE = re.compile(r"(PSF|Python Software Foundation|MIT|BSD|Apache)\b", re.IGNORECASE)
LONGEST_DOC = 650
SKIPPED = re.compile(  # folders and modules of the standard library and packages that are not about data
    r"(^|/|_)(tests?|testing|conftest|_vendor|bin|idlelib|lib2to3|distutils|turtledemo|ensurepip|asyncio|tkinter|ctypes"
    r"|pydoc|pickletools|inspect|site|pdb|cgi|msilib|unittest|multiprocessing|curses|_aix|gettext|logging|import(lib)?"
    r"|demo|app|pathsec|picklesec|lazy_imports|drawing|abstract_bots|abstract_gui|abstract_webs)(/|_|\.py)"
)
DROPPED = {"See Also", "References", "Notes", "Note", "Warnings", "Raises", "Attributes", "Warning", "Explanation"}


@dataclass
class Function:
    """A function that a prompt can show: all names in its signature are built in or from the standard library."""

    source: str  # the package, and where in it
    name: str
    imports: str
    header: str  # `def name(...):`, with decorators
    doc: str
    body: str = ""  # without the docstring
    opening: str = ""  # of its class: `class X:` and `__init__`
    helpers: bool = False  # it uses names of its module
    calls: list[tuple[str, str]] = field(default_factory=list)  # examples: expression, its value

    @property
    def signature(self) -> str:
        node = ast.parse(f"{self.header}\n    pass").body[0]
        assert isinstance(node, ast.FunctionDef)
        return f"{self.name}({ast.unparse(node.args)})"

    def code(self, doc: str | None = None, body: str | None = None) -> str:
        """The function with its imports, and with the docstring and body given."""
        lines = [self.header]
        if doc:
            quotes = "'''" if '"""' in doc else '"""'
            prefix = "r" if "\\" in doc else ""
            ending = "\n" if "\n" in doc else ""
            lines.append(textwrap.indent(f"{prefix}{quotes}{doc}{ending}{quotes}", "    "))
        if body:
            lines.append(textwrap.indent(body, "    "))
        text = "\n".join(lines)
        if self.opening:
            text = f"{self.opening}\n\n{textwrap.indent(text, '    ')}"
        return f"{self.imports}\n\n\n{text}" if self.imports else text


def licence_of(package: importlib.metadata.Distribution) -> str | None:
    """The licence that a package's metadata names, or None where it is not PSF, MIT, BSD or Apache throughout."""
    facts = package.metadata
    classes = [entry for entry in facts.get_all("Classifier") or [] if entry.startswith("License ::")]
    named = facts.get("License-Expression") or " / ".join(
        entry.rpartition("::")[2].strip() for entry in classes if entry.count("::") > 1
    )
    named = named or (facts.get("License") or "").partition("\n")[0]
    parts = re.split(r" AND | OR | WITH | / ", named)
    return named if all(LICENCE.match(part.strip("() ")) for part in parts) else None


def packages(folder: str | None) -> Iterator[tuple[str, str, str, list[Path]]]:
    """Name, version, licence and source files of the standard library and of each package allowed."""
    library = Path(sysconfig.get_path("stdlib"))
    inside = [path for path in library.rglob("*.py") if "-packages" not in str(path.relative_to(library))]
    yield "python", sys.version.split()[0], "PSF-2.0", wanted(inside, library)
    found = importlib.metadata.distributions(path=[folder]) if folder else importlib.metadata.distributions()
    for package in sorted(found, key=lambda each: each.metadata["Name"].lower()):
        name = package.metadata["Name"]
        if (licence := licence_of(package)) is None:
            print(f"{name}: left out, its licence is not among PSF, MIT, BSD and Apache", file=sys.stderr)
            continue
        base = Path(str(package.locate_file("")))
        paths = [base / str(path) for path in package.files or [] if path.suffix == ".py"]
        yield name, package.version, licence, wanted(paths, base)


def wanted(paths: Iterable[Path], base: Path) -> list[Path]:
    return sorted(path for path in paths if not SKIPPED.search(str(path.relative_to(base))))


def functions_in(source: str, text: str) -> Iterator[Function]:
    """The functions and methods of a module's text that a prompt can show; `source`: the package and module."""
    tree = ast.parse(text)
    imported = imports_of(tree)
    near = {name for node in tree.body if isinstance(node, ast.FunctionDef | ast.Assign) for name in bound(node)}
    foreign = {name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for name in bound(node)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found = [(node, "", set(), f"{source}.{node.name}")]
        elif isinstance(node, ast.ClassDef):
            opening, attributes = opening_of(node, text)
            inside = [
                each for each in node.body if isinstance(each, ast.FunctionDef) and (opening or each.decorator_list)
            ]
            found = [(each, opening, attributes, f"{source}.{node.name}.{each.name}") for each in inside]
        else:
            continue
        for each, opening, attributes, where in found:
            function = stand_alone(each, opening, attributes, text, imported, near, foreign)
            if function:
                function.source = where
                yield function


def imports_of(tree: ast.Module) -> dict[str, str]:
    """Names that a module imports from the standard library, and the statement for each."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            module = ""
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            module = node.module
        else:
            continue
        for alias in node.names:
            renamed = f" as {alias.asname}" if alias.asname else ""
            if (module or alias.name).partition(".")[0] in sys.stdlib_module_names - {"__future__"}:
                name = alias.asname or (alias.name if module else alias.name.partition(".")[0])
                found[name] = (f"from {module} " if module else "") + f"import {alias.name}{renamed}"
    return found


def bound(node: ast.AST) -> set[str]:
    """All names that a statement, or one inside it, gives a value."""
    names = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
            names.add(each.id)
        elif isinstance(each, ast.FunctionDef | ast.ExceptHandler) and each.name:
            names.add(each.name)
        elif isinstance(each, ast.arg):
            names.add(each.arg)
        elif isinstance(each, ast.alias):
            names.add((each.asname or each.name).partition(".")[0])
    return names


def opening_of(node: ast.ClassDef, text: str) -> tuple[str, set[str]]:
    """A class line with a short `__init__`, and the attributes that it sets; empty where there is none."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__" and not (node.bases or node.decorator_list):
            code = ast.get_source_segment(text, each) or ""
            attributes = {
                inner.attr
                for inner in ast.walk(each)
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
            }
            if len(code) < 350 and not {"super", "cls"} & {n.id for n in ast.walk(each) if isinstance(n, ast.Name)}:
                return f"class {node.name}:\n    {code}", attributes
    return "", set()


def stand_alone(
    node: ast.FunctionDef,
    opening: str,
    attributes: set[str],
    text: str,
    imported: dict[str, str],
    near: set[str],
    foreign: set[str],
) -> Function | None:
    """The function, if it is documented and its signature needs nothing of its module."""
    doc = ast.get_docstring(node) or ""
    decorators = [ast.unparse(each) for each in node.decorator_list]
    arguments = [each.arg for each in node.args.args]
    if len(doc) < 20 or len(node.body) < 2 or node.name.startswith("__") or len(arguments) > 6:
        return None
    if decorators == ["staticmethod"]:
        opening = re.split(r"\n", opening or "class Helpers:")[0]
    elif decorators or (arguments[:1] == ["self"]) != bool(opening):
        return None
    if opening and "self" in arguments:
        used = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and is_self(each.value)}
        if not used or used - attributes:
            return None
    read = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    free = read - bound(node) - set(dir(builtins)) - {node.name, "self"}
    helpers = free - imported.keys()
    stated = {each.id for each in ast.walk(node.args) if isinstance(each, ast.Name)}
    stated |= {each.id for each in ast.walk(node.returns) if isinstance(each, ast.Name)} if node.returns else set()
    calls = examples(doc, node.name)
    if (helpers - near and not (calls and helpers <= near | foreign)) or stated & helpers:
        return None
    lines = text.splitlines()
    body = textwrap.dedent("\n".join(lines[node.body[1].lineno - 1 : node.end_lineno])).strip("\n")
    start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    header = textwrap.dedent("\n".join(lines[start - 1 : node.body[0].lineno - 1])).strip()
    if not (header + doc + body + opening).isascii() or not header.endswith(":") or len(header) > 300:
        return None
    shown = clean(doc)
    names = free & imported.keys()
    imports = "\n".join(sorted(imported[name] for name in names))
    if helpers - near:
        body = ""  # not to be shown: it needs another package
    return Function("", node.name, imports, header, shown, body, opening, bool(helpers), calls) if shown else None


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def examples(doc: str, name: str) -> list[tuple[str, str]]:
    """The doctests that call only the function and builtins, and whose value is a literal."""
    found = []
    try:
        tests = doctest.DocTestParser().get_examples(doc)
    except ValueError:
        return []
    for test in tests:
        try:
            names = {each.id for each in ast.walk(ast.parse(test.source, mode="eval")) if isinstance(each, ast.Name)}
            ast.literal_eval(test.want.strip())
        except (SyntaxError, ValueError):
            continue
        call, value = test.source.strip(), re.sub(r",\s+", ", ", test.want.strip())
        if name in names and names <= {name, *dir(builtins)} and "\n" not in call + value and len(call + value) < 140:
            found.append((call, value))
    return found[:3]


def clean(doc: str) -> str:
    """A docstring without markup, cut to whole paragraphs."""
    doc = re.sub(r":[a-z:]+:`~?\.?([^`<]*?)(?: ?<[^`]*>)?`", r"`\1`", doc).replace("``", "`")
    kept: list[str] = []
    dropping = False
    for block in re.split(r"\n[ \t]*\n", doc.strip()):
        title = re.match(r"(\w[\w ]*)\n[-=~]{3,}\s*$|(\w[\w ]*)\n[-=~]{3,}\n", block)
        if title:
            dropping = (title[1] or title[2]).strip() in DROPPED
        if (
            dropping
            or block.lstrip().startswith(("..", "@"))
            or re.search(r"import |\.\. |http|sympy|Traceback", block)
        ):
            continue
        if len("\n\n".join([*kept, block])) > LONGEST_DOC and kept:
            continue
        kept.append(block.rstrip())
    while kept and re.fullmatch(r"\S+( \S+)?:?\n?[-=~:]*", kept[-1].strip()):  # a title with nothing under it
        kept.pop()
    return "\n\n".join(kept) if len("\n\n".join(kept)) <= LONGEST_DOC else ""
