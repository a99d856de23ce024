"""Tables of methods, shapes, options and commands, rendered from the code when MkDocs builds the site.

A line such as `<!-- outpace: options domino -->` in a page becomes a table. The kinds of tables:

    methods             all methods, with links to their pages
    options NAME        a method's own options, and the settings of its default shape
    shared              the options of every method that drafts with a model
    shapes              all shapes
    settings SHAPE      the settings of one
    fields CLASS        the fields of LoadSettings, SamplingParams or ServeSettings
    command NAME        the options of a command, as in "command bench" or "command train capture"
    arrows              which package may import which, from tests/architecture/test_arrows.py
    figures METHOD...   the rows of these methods in the table "All methods" of docs/results.md

The build fails where a page names something that does not exist, and where a method has no page.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from outpace.cli import app
from outpace.core.params import SamplingParams
from outpace.core.settings import LoadSettings, default_of, settings_of
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.options import described, written
from outpace.methods.catalog import BUILT_IN, method, presets_of
from outpace.serve.settings import ServeSettings
from outpace.trees.shapes.table import BUILT_IN as SHAPES

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "results.md"
MARK = re.compile(r"^<!-- outpace: (.+?) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its tables."""

    def render(mark: re.Match[str]) -> str:
        verb, *names = mark[1].split()
        try:
            return TABLES[verb](*names, **({"pages": _pages(config)} if verb == "methods" else {}))
        except (KeyError, IndexError, TypeError, OSError) as error:
            raise PluginError(f"{page.file.src_uri}: {mark[0]}: {error!r}") from error

    return MARK.sub(render, markdown)


def _pages(config: MkDocsConfig) -> dict[str, str]:
    """The page, in docs/methods, of each method."""
    pages = {}
    for path in sorted(Path(config.docs_dir, "methods").glob("*.md")):
        for mark in MARK.findall(path.read_text()):
            verb, *names = mark.split()
            if verb == "options":
                pages |= dict.fromkeys(names, path.name)
    if missing := BUILT_IN.keys() - pages.keys():
        raise PluginError(f"methods without a page in docs/methods: {', '.join(sorted(missing))}")
    return pages


def _methods(pages: dict[str, str]) -> str:
    rows = [(f"[`{name}`]({pages[name]})", method.summary, method.needs) for name, method in BUILT_IN.items()]
    return _table(("method", "what it drafts", "needs"), rows)


def _options(name: str) -> str:
    kind = BUILT_IN[name].options
    own = described(kind)
    text = ""
    if issubclass(kind, ModelOptions):
        shared = {row[0]: row for row in described(ModelOptions)}
        own = [row for row in own if row[0] not in shared or row[2] != shared[row[0]][2]]
        shape = kind.model_fields["shape"].default
        settings = kind.settings_kind(shape)
        if shape not in kind.shape_names():
            raise KeyError(shape)
        takes = ", ".join(f"`{one}`" for one in kind.shape_names())
        text = f"Shapes: {takes}; by default `{shape}`. It also takes the [shared options](shared-options.md).\n"
        if settings is not None:
            text = f"Settings of its shape `{shape}`:\n\n{_table(OPTION, _cells(settings))}\n\n{text}"
    for preset, row in presets_of(name).items():
        text += f"\nPreset `as={preset}`: `{method(name, **row)}`.\n"
    table = _table(OPTION, _rows(own)) if own else ""
    return f"{table}\n\n{text}"


def _shared() -> str:
    return _table(OPTION, _cells(ModelOptions))


def _shapes() -> str:
    rows = [(f"`{name}`", shape.summary) for name, shape in SHAPES.items()]
    return _table(("shape", "its tree"), rows)


def _settings(name: str) -> str:
    kind = SHAPES[name].settings
    return "It has no settings." if kind is None else _table(OPTION, _cells(kind))


def _fields(name: str) -> str:
    kind = FIELDS[name]
    rows = []
    for field, about in settings_of(kind).items():
        default = default_of(kind, field)
        values = about.unit or (" or ".join(about.choices) if about.choices else "")
        given = "required" if default is ... else "not set" if default in (None, ()) else f"`{default}`"
        rows.append((f"`{field}`", values, given, about.description))
    return _table(OPTION, rows)


def _command(*names: str) -> str:
    command: Any = typer.main.get_command(app)
    for name in names:
        command = command.get_command(typer.Context(command), name)
        if command is None:
            raise KeyError(name)
    rows = []
    for parameter in command.params:
        if "--help" in parameter.opts:
            continue
        is_option = parameter.param_type_name == "option"
        flags = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.name.upper()]
        shown = ", ".join(f"`{flag}`" for flag in flags)
        is_plain = parameter.required or parameter.default is None or isinstance(parameter.default, bool)
        rows.append((shown, "" if is_plain else f"`{parameter.default}`", getattr(parameter, "help", None) or ""))
    return _table(("option", "default", "meaning"), rows)


def _figures(*methods: str) -> str:
    lines = FIGURES.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| method | K = 15"))
    head, rows = _split(lines[start]), {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows[_split(line)[0].strip("`")] = _split(line)
    about = "Tokens per step, and draft passes per round. Conditions: [all methods](../results.md#all-methods)."
    return f"{_table(head, [rows[name] for name in methods])}\n\n{about}"


def _split(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|"))


def _arrows() -> str:
    tree = ast.parse((ROOT / "tests" / "architecture" / "test_arrows.py").read_text())
    named = [node for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ARROWS"]
    rules: Any = named[0].value
    rows = []
    for package, others in zip(rules.keys, rules.values, strict=True):
        names = sorted(str(one.value) for one in ast.walk(others) if isinstance(one, ast.Constant))
        rows.append((f"`{package.value}`", ", ".join(names) or "nothing"))
    return _table(("package", "may import"), rows)


FIELDS: dict[str, Any] = {one.__name__: one for one in (LoadSettings, SamplingParams, ServeSettings)}
OPTION = ("option", "values", "default", "meaning")
TABLES: dict[str, Any] = {
    "methods": _methods,
    "options": _options,
    "shared": _shared,
    "shapes": _shapes,
    "settings": _settings,
    "fields": _fields,
    "command": _command,
    "arrows": _arrows,
    "figures": _figures,
}


def _cells(kind: Any) -> Iterable[tuple[str, ...]]:
    return _rows(described(kind))


def _rows(options: Iterable[tuple[str, str, Any, str]]) -> Iterable[tuple[str, ...]]:
    for name, kind, default, meaning in options:
        yield f"`{name}`", kind, "not set" if default is None else f"`{written(default)}`", meaning


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
