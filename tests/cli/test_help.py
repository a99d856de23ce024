"""What `--help` of every command and the lists of options of methods show: words, not types of Python."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from typer.testing import CliRunner

from outpace.cli import app
from outpace.drafters.kinds import KINDS
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.options import described, written
from outpace.methods.catalog import methods, option_kinds

PYTHON = re.compile(
    r"<[a-z]"  # <bool>, <list[str]>, <class 'int'>
    r"|\b(int|float|str|bool|bytes|list|tuple|dict|Path|Any)( *\||\[)"  # unions and generics
    r"|\|\s*(int|float|str|bool)\b"
    r"|\b(bool|str|INTEGER|BOOLEAN)\b"
    r"|\bNone\b"
    r"|\b(typing|pathlib|builtins|collections|annotated_types|outpace|torch|pydantic)\.\w"
    r"|\b[a-z_]+\.[A-Z]\w*"  # module.Class
    r"|\b[A-Z][a-z0-9]+[A-Z][a-z]\w*\("  # a repr
)


def commands() -> dict[str, Any]:
    """All commands and groups by what is typed for them."""

    def below(command: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        yield " ".join(names), command
        if hasattr(command, "list_commands"):
            context = typer.Context(command)
            for name in command.list_commands(context):
                yield from below(command.get_command(context, name), (*names, name))

    return dict(below(typer.main.get_command(app), ()))


@pytest.mark.parametrize("name", commands())
def test_help_has_no_types_of_python(name: str) -> None:
    """Guards against `<bool>`, `str | None`, names of classes and modules and `None` where people look for what an
    option takes, and against options without a word about them."""
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert shown.exit_code == 0
    text = re.sub(r"[│╭╰─╮╯]", " ", shown.output)
    assert "Usage:" in text
    assert (found := PYTHON.search(text)) is None, found
    command = commands()[name]
    with command.make_context(name, [], resilient_parsing=True) as context:
        parameters = command.get_params(context)
    assert "help" in [one.name for one in parameters]
    for one in parameters:
        assert one.help, f"{name}: {one.name} has no help"
        takes_value = one.param_type_name == "argument" or not one.is_flag
        assert bool(one.metavar) == takes_value, f"{name}: {one.name}: cli/command.py has no word for its value"


def test_help_has_the_defaults_that_hold() -> None:
    """Guards against the help of an option that two commands share, where one of them has another default."""
    for name, command in commands().items():
        for one in command.params:
            assert "by default all" not in (one.help or "") or one.default is None, f"{name}: {one.name}"


def test_help_names_every_layout_that_is_written() -> None:
    """Guards against a layout that only an error names, as the one of the EAGLE-3 drafters that ship."""
    (said,) = (one.help for one in commands()["convert"].params if one.name == "layout")
    for kind in KINDS.values():
        assert all(re.search(rf"{kind.name}: [^.]*\b{layout}\b", said) for layout in kind.layouts), kind.name


def option_lists() -> dict[str, type[BaseModel]]:
    """Everything that `outpace methods` lists options of, by name."""
    found: dict[str, type[BaseModel]] = {}
    for name, method in methods().items():
        names = method.options.shape_names() if issubclass(method.options, ModelOptions) else (None,)
        for shape in names:
            found |= {f"{name} {kind.__name__}": kind for kind in option_kinds(method.options, shape)}
    return found


def test_options_of_methods_are_described_in_words() -> None:
    """Guards against `int | None`, `None` as a value that nobody can write, and options without a meaning."""
    kinds = option_lists()
    assert len(kinds) > 30
    for name, kind in kinds.items():
        for option, values, default, meaning in described(kind):
            assert meaning, f"{name}: {option} has no meaning"
            line = f"{values} ({written(default)}): {meaning}"
            assert (found := PYTHON.search(line)) is None, f"{name}: {option}: {found}: {line}"


def test_values_in_words() -> None:
    """Guards against bounds, choices and lists that are lost on their way from a field to its description."""
    rows = {row[0]: (row[1], written(row[2])) for kind in option_lists().values() for row in described(kind)}
    assert rows["budget"] == ("whole number from 0 up to 511", "not set")
    assert rows["matrix"] == ("shared | private", "shared")
    assert rows["noise"] == ("true | false", "true")
    assert rows["warm"] == ("text", "not set")
    assert rows["kept"] == ("whole number; several as A/B/C", "8/24/40")
    assert rows["reserved"] == ("number from 0 below 1", "0.0")
