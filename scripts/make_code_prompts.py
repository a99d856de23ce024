"""Write `data/code-prompts.jsonl`: prompts about code to train drafters on, from docstrings and from task templates.

    python scripts/make_code_prompts.py --packages FOLDER

Reads the sources of Python's standard library and of the packages in FOLDER (`pip install --target`; default: those of
this environment) whose licences are permissive, and the templates of `data/code-tasks.toml`. The same sources give the
same file, and `code-sources.txt` with the versions, licences and numbers of prompts.
"""

import argparse
import ast
import itertools
import json
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from code_phrases import ASKED, PLUMBING, in_words
from code_sources import Function, functions_in, packages

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "data" / "code-tasks.toml"
SHARES = {"complete": 0.35, "implement": 0.30, "explain": 0.12, "tests": 0.11, "bug": 0.12}
FROM_DOCSTRINGS = 2200
PER_TEMPLATE = 16
LONGEST_PROMPT = 1200
LONGEST_CODE = 1000  # of code to explain, test or mend
ENDING = (  # of a name made from words
    r"(_(in|of|the|from|with|that|an?|to|and|if|as|by|is|for|at|be|are|its|their|any|all|no|so|or|each|which|when|those"
    r"|whose))+$"
)
ALIKE = 0.6  # two prompts with this share of their runs of four words in common are the same


def order(*parts: object) -> int:
    """A number that looks random and is always the same for the same parts."""
    return int.from_bytes(sha256("\0".join(map(str, parts)).encode()).digest()[:8], "big")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", help="folder of installed packages; default: this environment")
    parser.add_argument("--output", type=Path, default=ROOT / "data" / "code-prompts.jsonl")
    options = parser.parse_args()
    documented, versions = from_packages(options.packages)
    templated, other = from_templates(tomllib.loads(TASKS.read_text(encoding="utf-8")))
    shown = Shown()
    rows = with_kinds(templated, shown, SHARES, len(templated)) + other
    used = Counter(row["id"].split("-")[1] for row in rows)
    total = len(rows) + FROM_DOCSTRINGS
    missing = {kind: max(share * total - used[kind], 1) for kind, share in SHARES.items()}
    rows += with_kinds(best(documented), shown, missing, FROM_DOCSTRINGS)
    rows.sort(key=lambda row: order(row["id"]))
    lines = [json.dumps({"id": row["id"], "dataset": "code", "turns": [row["prompt"]]}) for row in rows]
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    counts = Counter(row["source"].partition(":")[0] for row in rows)
    sources = [f"{name} {about}: {counts[name]}" for name, about in versions.items() if counts[name]]
    (options.output.parent / "code-sources.txt").write_text("\n".join(sources) + "\n", encoding="utf-8")
    print(f"templates {counts['task']}, all {len(rows)}", Counter(row["id"].split("-")[1] for row in rows))


def from_packages(folder: str | None) -> tuple[list[Function], dict[str, str]]:
    found, versions = [], {}
    for name, version, licence, files in packages(folder):
        versions[name] = f"{version}, {licence}"
        for path in files:
            module = ".".join(part for part in path.with_suffix("").parts[-2:] if part != "__init__")
            try:
                found += functions_in(f"{name}:{module}", path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, SyntaxError):
                continue
    return found, versions


def best(functions: list[Function]) -> list[Function]:
    """The functions that say most clearly what they do to which plain data, best first."""
    clear = {function.source: function for function in functions if quality(function) >= 0}
    return sorted(clear.values(), key=lambda each: (-quality(each), order(each.source)))


def quality(function: Function) -> float:
    first = function.doc.split("\n\n")[0]
    words = re.findall(r"[a-z]+", f"{function.header} {function.doc} {function.source}".lower())
    plain = {"int", "str", "list", "string", "strings", "number", "numbers", "integer", "sequence", "dict", "iterable"}
    points = 2.0 * bool(function.calls) + 1.5 * bool(in_words(function.doc)) + 0.5 * min(len(plain & set(words)), 3)
    points += ">>>" in function.doc
    points -= 1.5 * len(PLUMBING & set(words)) + (len(first) > 350) + (len(first) < 40) + 0.5 * function.helpers
    return points - (function.body.count("\n") < 1) - function.name.startswith("_") - 0.5 * bool(function.opening)


# --- templates --------------------------------------------------------------------------------------------------------


def from_templates(tables: dict[str, Any]) -> tuple[list[Function], list[dict[str, str]]]:
    """The functions that the templates describe, and the finished prompts of those that are free text."""
    functions = []
    for number, table in enumerate(tables["function"]):
        for code, calls in filled(table, number):
            (function,) = functions_in(f"task:{number}", code)
            function.source = f"task:{function.name}.{order(code) % 10**6}"
            function.calls = [(call, evaluate(code, call)) for call in calls]
            functions.append(function)
    for number, line in enumerate(tables["described"]["lines"]):
        for text in few(alternatives(line), f"described {number}"):
            header, doc = re.split(r": (?=[A-Z])", text, maxsplit=1)
            name = header.partition("(")[0]
            functions.append(Function(f"task:{name}.{order(text) % 10**6}", name, "", f"def {header}:", doc))
    free = []
    for language, lines in tables["other"].items():
        for number, line in enumerate(lines):
            for text in few(alternatives(line), f"{language} {number}"):
                key = f"task:{language}.{order(text) % 10**6}"
                free.append({"id": f"code-implement-{key}", "source": key, "prompt": text})
    functions.sort(key=lambda each: order(each.source, each.doc))
    return functions, free


def filled(table: dict[str, Any], number: int) -> Iterator[tuple[str, list[str]]]:
    """A template's code and example calls with each combination of its columns filled in."""
    rows = [[dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)] for columns in table["each"]]
    for chosen in few([list(each) for each in itertools.product(*rows)], f"function {number}"):
        values = {key: value for part in chosen for key, value in part.items()}
        texts = [table["code"], *table["calls"]]
        for key, value in [*values.items()] * 2:  # values may hold names themselves
            texts = [text.replace(f"<{key}>", value) for text in texts]
        yield texts[0], texts[1:]


def alternatives(line: str) -> list[str]:
    """All the texts that a line with alternatives in braces, as {this|that}, stands for; @1 is the first one chosen."""
    parts = re.split(r"\{([^{}]*\|[^{}]*)\}", line)
    choices = [part.split("|") if at % 2 else [part] for at, part in enumerate(parts)]
    found = []
    for chosen in itertools.product(*choices):
        words = ["", *(re.sub(ENDING, "", "_".join(re.findall(r"\w+", part.lower())[:4])) for part in chosen[1::2])]
        found.append(re.sub(r"@(\d)", lambda match, words=words: words[int(match[1])], "".join(chosen)))
    return found


def few(choices: list[Any], key: str) -> list[Any]:
    return sorted(choices, key=lambda each: order(key, each))[:PER_TEMPLATE]


def evaluate(code: str, call: str) -> str:
    names: dict[str, Any] = {}
    exec(code, names)
    return repr(eval(call, names))


# --- prompts ----------------------------------------------------------------------------------------------------------


class Shown:
    """What earlier prompts showed, to leave out what resembles it."""

    def __init__(self) -> None:
        self.index: defaultdict[str, list[int]] = defaultdict(list)
        self.sizes: list[int] = []

    def new(self, text: str) -> bool:
        """Whether nothing shown before resembles a text, which counts as shown from now on if so."""
        words = re.findall(r"[a-z]+", text.lower().replace("_", " "))
        runs = {" ".join(words[at : at + 4]) for at in range(max(len(words) - 3, 1))}
        common = Counter(number for run in runs for number in self.index[run])
        if any(count / (len(runs) + self.sizes[number] - count) > ALIKE for number, count in common.items()):
            return False
        for run in runs:
            self.index[run].append(len(self.sizes))
        self.sizes.append(len(runs))
        return True


def with_kinds(functions: list[Function], shown: Shown, shares: dict[str, float], limit: int) -> list[dict[str, str]]:
    """At most one prompt for each function, of the kind that is furthest behind its share among those that fit."""
    rows: list[dict[str, str]] = []
    counts: Counter[str] = Counter()
    for function in functions:
        if len(rows) == limit:
            break
        for kind in sorted((kind for kind in shares if shares[kind]), key=lambda kind: counts[kind] / shares[kind]):
            name = f"code-{kind}-{function.source}"
            prompt = worded(kind, function, name)
            if prompt and len(prompt) <= LONGEST_PROMPT and prompt.isascii():
                if shown.new(f"{function.name} {first_paragraph(function)}"):
                    rows.append({"id": name, "source": function.source, "prompt": prompt})
                    counts[kind] += 1
                break
    return rows


def worded(kind: str, function: Function, key: str) -> str:
    """The prompt of a kind, or nothing where the kind does not fit the function."""
    words = in_words(function.doc)
    if (code := CODE[kind](function, words, key)) is None:
        return ""
    asserts = "\n".join(as_assert(call, value) for call, value in function.calls)
    introductions = ["\n\nIt should pass these tests:\n{}", "\n\n```python\n{}\n```", "\n\nFor example:\n{}"]
    tests = introductions[order(key, "tests") % 3].format(asserts) if asserts else ""
    asked = ASKED[kind][order(key) % len(ASKED[kind])]
    if asserts and "{asserts}" not in asked and "{tests}" not in asked and kind == "implement":
        asked += "{tests}"
    command, does, rest = words or ("", "", "")
    return asked.format(
        code=code,
        fenced=f"```python\n{code}\n```",
        name=function.name,
        noun="class" if function.opening else "function",
        signature=function.signature,
        order=command,
        does=does,
        rest=rest,
        asserts=asserts,
        tests=tests,
    ).strip()


def to_complete(function: Function, words: Any, key: str) -> str | None:
    doc = function.doc
    if function.calls and ">>>" not in doc:
        if order(key, "examples") % 3:
            doc += "".join(f"\n>>> {call}\n{value}" for call, value in function.calls)
        else:
            doc += "\n\nExamples:" + "".join(f"\n    {call} -> {value}" for call, value in function.calls)
    return function.code(doc)


def to_implement(function: Function, words: Any, key: str) -> str | None:
    clear = function.calls or function.source.startswith("task:") or (words and len(words[0] + words[2]) >= 70)
    return "" if words and clear and not function.opening else None


def to_explain(function: Function, words: Any, key: str) -> str | None:
    code = function.code(None if order(key, "doc") % 2 else first_paragraph(function), function.body)
    return code if function.body.count("\n") >= 1 and len(code) <= LONGEST_CODE else None


def to_test(function: Function, words: Any, key: str) -> str | None:
    if function.opening or not re.search(r"\b(return|yield) ", function.body):
        return None
    return short(function, function.code(first_paragraph(function), function.body))


def to_mend(function: Function, words: Any, key: str) -> str | None:
    if function.opening or not words or "return" not in function.body:
        return None
    changed = mutations(function.code(None, function.body))
    return short(function, changed[order(key, "bug") % len(changed)]) if changed else None


CODE: dict[str, Callable[[Function, Any, str], str | None]] = {
    "complete": to_complete,
    "implement": to_implement,
    "explain": to_explain,
    "tests": to_test,
    "bug": to_mend,
}


def short(function: Function, code: str) -> str | None:
    fits = function.body and not function.helpers and function.body.count("\n") >= 1 and len(code) <= LONGEST_CODE
    return code if fits else None


def first_paragraph(function: Function) -> str:
    return function.doc.split("\n\n")[0].partition("\n>>>")[0].strip()


def as_assert(call: str, value: str) -> str:
    return f"assert {call} is {value}" if value in ("True", "False", "None") else f"assert {call} == {value}"


def mutations(code: str) -> list[str]:
    """The code with one mistake, for each place where one can be made: a comparison, an `and` or `or`, a number, an
    operator, a `min` or a `return`."""
    lines = code.splitlines(keepends=True)
    starts = list(itertools.accumulate((len(line) for line in lines), initial=0))
    places: list[tuple[int, int, str, str]] = []

    def between(left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        places.append((starts[left.end_lineno - 1] + left.end_col_offset, position(right), old, new))

    def position(node: ast.AST) -> int:
        return starts[node.lineno - 1] + node.col_offset

    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and (pair := COMPARED.get(type(node.ops[0]))):
            between(node.left, node.comparators[0], *pair)
        elif isinstance(node, ast.BoolOp):
            pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            between(node.values[0], node.values[1], *pair)
        elif isinstance(node, ast.BinOp) and (pair := COUNTED.get(type(node.op))):
            between(node.left, node.right, *pair)
        elif isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1):
            places.append((position(node), position(node) + 1, str(node.value), str(node.value + 1)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            pair = ("min", "max") if node.func.id == "min" else ("max", "min")
            places.append((position(node), position(node) + 3, *pair))
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Name | ast.Call):
            places.append((position(node), position(node) + 7, "return ", ""))
    found = []
    for start, end, old, new in sorted(set(places)):
        if old in code[start:end]:
            found.append(code[:start] + code[start:end].replace(old, new, 1) + code[end:])
    return found


COMPARED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
COUNTED = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.FloorDiv: ("//", "/"), ast.Mod: ("%", "//")}

if __name__ == "__main__":
    main()
