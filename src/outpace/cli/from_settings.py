"""Command-line options made from settings classes, and shell completion of their values."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

import typer

from outpace.core.settings import default_of, settings_of


@dataclass(frozen=True)
class SettingsOptions:
    """Fields of a settings class that are options of a command. `defaults`: the command's defaults that differ from the
    class's."""

    kind: type
    names: Sequence[str]
    defaults: dict[str, Any]
    panel: str | None = None

    def parameters(self) -> dict[str, Any]:
        """Annotation and default of each option."""
        types = {one.name: one.type for one in fields(self.kind)}
        made = {}
        for name in self.names:
            default = self.defaults[name] if name in self.defaults else default_of(self.kind, name)
            kind: Any = types[name]
            if default == ():
                kind, default = list[str] | None, None
            elif kind is Any or (default is None and name in self.defaults):
                kind = str | None
            elif name in self.defaults:  # never None here
                kind = next((one for one in get_args(kind) if one is not type(None)), kind)
            made[name] = Annotated[kind, option(self.kind, name, self.panel)], default
        return made

    def make(self, given: dict[str, Any]) -> Any:
        """The settings object, from the values of the options, which are removed from `given`."""
        values = {name: given.pop(name) for name in self.names}
        empty = [name for name, value in values.items() if value is None and default_of(self.kind, name) == ()]
        return self.kind(**values | dict.fromkeys(empty, ()))


def options(kind: type, *names: str, **defaults: Any) -> SettingsOptions:
    """Options for the named fields of a settings class, and for fields with a default of this command."""
    return SettingsOptions(kind, (*names, *(name for name in defaults if name not in names)), defaults)


def option(kind: type, name: str, panel: str | None = None) -> Any:
    """The option for a field of a settings class. Items of a list are given one by one, by the singular: --bad-word."""
    about, default = settings_of(kind)[name], default_of(kind, name)
    complete = completion(name, about.choices)
    if name == "model":  # also given by --model, see `Command`
        return typer.Argument(
            help=f"{about.description} --model NAME does the same.", metavar=about.unit, autocompletion=complete
        )
    if default is False:
        return typer.Option(f"--{name.replace('_', '-')}", help=about.description)
    singular = f"--{name.removesuffix('s').replace('_', '-')}" if isinstance(default, tuple) else None
    flags = [flag for flag in (about.flag or singular,) if flag]
    several = " May be given several times." if isinstance(default, tuple) else ""
    return typer.Option(
        *flags,
        help=about.description + several,
        metavar=None if default is True else about.unit,
        envvar=about.variable,
        rich_help_panel=panel,
        autocompletion=complete,
    )


def from_settings(**groups: SettingsOptions) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace parameters of a command by the options of settings classes; the command gets settings objects."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        made: dict[str, tuple[Any, Any]] = {}
        for name, parameter in inspect.signature(command).parameters.items():
            made |= groups[name].parameters() if name in groups else {name: (hints[name], parameter.default)}

        @wraps(command)
        def run(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = group.make(given)
            command(**given)

        return with_parameters(run, made)

    return decorate


def with_parameters(command: Callable[..., None], made: dict[str, tuple[Any, Any]]) -> Callable[..., None]:
    """Add parameters to a command, which typer turns into options. `made`: annotation and default of each."""
    command.__annotations__ = {name: annotation for name, (annotation, _) in made.items()}
    kind = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind, annotation=one, default=default) for name, (one, default) in made.items()]
    )
    return command


def completion(name: str, choices: Sequence[str] = ()) -> Callable[[str], list[str]] | None:
    """A function that completes a value from names of methods, models and drafters, or from `choices`; None for other
    options."""
    known = {"method": _methods, "methods": _methods, "model": _models, "target": _models, "drafter": _drafters}
    words = known.get(name) or ((lambda: list(choices)) if choices else None)
    if words is None:
        return None

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{word}" for word in words() if word.startswith(last)]

    return complete


def _methods() -> list[str]:
    from outpace.methods.catalog import methods

    return list(methods())


def _models() -> list[str]:
    from outpace.models.loading.registry import BUILT_IN, pulled

    return sorted({*BUILT_IN, *pulled()})


def _drafters() -> list[str]:
    from outpace.models.loading.shipped import shipped

    return list(shipped())
