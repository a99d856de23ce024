"""The command line as data: every command, what it takes, and values that nobody should get an answer to."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from outpace.cli.train import TrainGroup


@dataclass(frozen=True)
class Parameter:
    """An option or an argument.

    Attributes:
        name: of the function's parameter.
        flag: as it is given, with dashes; None for an argument.
        kind: int, float, bool, str or Path.
        is_required: whether the command does nothing without it.
    """

    name: str
    flag: str | None
    kind: type
    is_required: bool


def commands(app: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Parameter]]]:
    """Every command of an app: its words, and what it takes."""
    for info in app.registered_commands:
        assert info.callback is not None
        name = info.name or info.callback.__name__.replace("_", "-")
        yield (*path, name), list(_parameters(info.callback))
    for group in app.registered_groups:
        assert group.typer_instance is not None
        assert group.name is not None
        yield from commands(group.typer_instance, (*path, group.name))
    if path == ("train",):
        for name, callback in TrainGroup.made().items():
            yield (*path, name), list(_parameters(callback))


def _parameters(callback: Callable[..., Any]) -> Iterator[Parameter]:
    hints = get_type_hints(callback, include_extras=True)
    for name, parameter in signature(callback).parameters.items():
        hint = hints.get(name, parameter.annotation)  # options made from a settings class are in the signature alone
        if get_origin(hint) is not Annotated:
            continue  # the context
        kind, info = get_args(hint)[:2]
        assert isinstance(info, OptionInfo | ArgumentInfo)
        flags = [one for one in info.param_decls or () if one.startswith("--")] or [f"--{name.replace('_', '-')}"]
        flag = flags[0].partition("/")[0] if isinstance(info, OptionInfo) else None
        yield Parameter(name, flag, _innermost(kind), parameter.default is parameter.empty)


def _innermost(kind: Any) -> type:
    """str of `list[str] | None`."""
    parts = [part for part in get_args(kind) if part is not type(None)]
    if parts:
        return _innermost(parts[0])
    assert isinstance(kind, type)
    return kind


NUMBERS = ("x", "", " ", "²", "1,5", "0x", "nan(1)", "--", "[/]", "\udcff", "1_", "9" * 5000 + "e", "½")
"""What no number is."""
NOT_WHOLE = ("1.5", "1e3", "nan", "inf", "-inf")
NOT_FINITE = ("nan", "inf", "-inf", "1e999", "-5e400")
TEXTS = (
    "[/]", "[bold", "[red]x[/red] [/nothing]", "\udcff\udcfe", "~nobody-of-this-name/x", "x" * 5000, "/dev/null/x",
    "\x1b[31mred", "a\nb", " ", "²", "builtin:²", "builtin:0", "builtin:" + "9" * 30, "builtin:-1", ":",
    "recycle:budget=²", "recycle:budget=" + "9" * 5000, "early-exit:²", "{", "[" * 100_000, '{"a":' * 100_000,
    '{"method": "ngram", "num_speculative_tokens": ' + "9" * 5000 + "}",
    '{"method": [], "num_speculative_tokens": {}}', "http://[::1", "http://127.0.0.1:9/v1",
    "http://127.0.0.1:99999", "ftp://x", "data.x=[[[", "training.epochs=" + "[" * 3000, "data.seed=2024-99-99",
    "x=\udcff", "0=\udcff", "%s%n",
)  # fmt: skip
"""What names nothing, and means nothing."""
FREE = frozenset({"prompt", "system", "stop", "bad_word", "regex", "served_model_name", "api_key", "out", "target"})
"""Parameters that take any text; \udcff and its like aside, which are no text."""


def wrong(rng: random.Random, parameter: Parameter, files: "Files") -> tuple[str, bool]:
    """A value, and whether no command may succeed with it."""
    if parameter.kind is int:
        return rng.choice((*NUMBERS, *NOT_WHOLE)), True
    if parameter.kind is float:
        return rng.choice((*NUMBERS, *NOT_FINITE)), True
    value = rng.choice((*TEXTS, *files.hostile))
    is_free = parameter.name in FREE or parameter.kind is Path
    return value, not is_free or (parameter.name in ("prompt", "system", "stop", "bad_word") and "\udcff" in value)


class Files:
    """Files that a command may be pointed at.

    Args:
        folder: to write them to.
        model: a model's folder.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self._made = folder, model, 0
        contents = {
            "binary[red].jsonl": bytes(range(256)),
            "deep.jsonl": b'{"turns":' + b"[" * 100_000,
            "wrong.jsonl": b'{"turns": ["a\\ud800"], "raw": "no"}\n',
            "digits.json": b"9" * 5000,
            "empty.jsonl": b"",
            "list.yaml": b"- [red]\n",
            "model.gguf": b"GGUF" + b"\xff" * 60,
        }
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        (folder / "config").mkdir()
        (folder / "config" / "config.json").write_bytes(b'{"a":' * 100_000)
        (folder / "odd").mkdir()
        (folder / "odd" / "config.json").write_text('{"model_type": ["llama"], "architectures": 5}')
        (folder / "nothing [here]").mkdir()
        self.hostile = tuple(str(path) for path in sorted(folder.iterdir()))

    def new(self) -> str:
        """A path at which nothing is."""
        self._made += 1
        return str(self.folder.parent / f"new-{self._made}")

    def usual(self, parameter: Parameter) -> str:
        """A value that a command can work with."""
        values = dict.fromkeys(("model", "target", "source"), str(self.model))
        values |= {"workload": "builtin:1", "prompts": "builtin:1", "layout": "dart", "prompt": "Hi", "keep": "5"}
        values |= {"name": "smollm2-135m", "method": "recycle", "answers": self.new(), "out": self.new()}
        return values[parameter.name]


def line_of(rng: random.Random, words: tuple[str, ...], takes: list[Parameter], files: Files) -> tuple[list[str], bool]:
    """A command line with one or two wrong values, and whether it must fail."""
    valued = [one for one in takes if one.kind is not bool]
    chosen = rng.sample(valued, k=min(len(valued), rng.choice((1, 1, 1, 2))))
    line, must_fail = list(words), False
    for parameter in takes:
        if parameter in chosen:
            value, never = wrong(rng, parameter, files)
            must_fail |= never
        elif parameter.is_required:
            value = files.usual(parameter)
        else:
            continue
        line += [value] if parameter.flag is None else [f"{parameter.flag}={value}"]
    odd = rng.randrange(12)
    if odd == 0:
        line, must_fail = [*line, "--no-such-option[/]"], True
    elif odd == 1:
        line, must_fail = [*words, "--", *line[len(words) :], "[/]", "x"], True
    return line, must_fail
