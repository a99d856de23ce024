"""Commands whose help names the values of options in words, and whose model may be given as --model."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

VALUES = {
    "out": "PATH",
    "stored": "DTYPE",
    **dict.fromkeys(("chat_template", "config"), "FILE"),
    **dict.fromkeys(("answers", "features"), "FOLDER"),
    "start": "DRAFTER",
    **dict.fromkeys(("method", "drafter", "shape", "endpoint_model"), "NAME"),
    "endpoint": "URL",
    **dict.fromkeys(("max_new_tokens", "max_length"), "TOKENS"),
    "seed": "SEED",
    "batch_size": "PROMPTS",
    "keep": "COUNT",
}
"""Words for the values of options, by option, where neither a settings class nor the option itself has one."""
ALIASES = ("--model", "-m")


def in_words(parameters: list[Any]) -> list[Any]:
    """Parameters of a command, each with the name of its value; flags have none."""
    for one in parameters:
        if one.param_type_name == "argument":
            one.metavar = one.metavar or one.name.upper()
            vars(one)["display_type_rich"] = lambda ctx: None  # typer has no parameter for it
        elif one.is_flag:
            one.metavar = ""
        elif one.metavar is None:
            one.metavar = VALUES.get(one.name)
    return parameters


class Command(TyperCommand):
    """A command whose help names values in words. Its first argument may also be given as `--model NAME`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return in_words(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(one.name == "model" and one.param_type_name == "argument" for one in self.params):
            if ctx.resilient_parsing and args and args[-1] in ALIASES:
                args = []  # the shell completes the value of --model as the first argument
            args = self._with_model_first(args)
        return super().parse_args(ctx, args)

    def _with_model_first(self, args: list[str]) -> list[str]:
        """The arguments with the value of `--model` moved to the front."""
        options = [one for one in self.params if one.param_type_name == "option"]
        valued = {flag for one in options if not one.is_flag for flag in one.opts}  # type: ignore[attr-defined]
        kept, model, rest = list[str](), None, iter(args)
        for one in rest:
            name, equals, value = one.partition("=")
            if one == "--":
                kept += [one, *rest]
            elif name in ALIASES or (one.startswith("-m") and not one.startswith("--")):
                given = value if equals else one[2:] if name not in ALIASES else next(rest, None)
                if given is None:
                    raise typer.BadParameter(f"{name} requires an argument.")
                model = given
            else:
                kept.append(one)
                if one in valued:
                    kept += [value for value in (next(rest, None),) if value is not None]
        return kept if model is None else [model, *kept]


class Group(TyperGroup):
    """A group of commands, whose help has words for values too."""

    def get_params(self, ctx: Any) -> list[Any]:
        return in_words(super().get_params(ctx))
