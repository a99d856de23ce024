"""What the commands share: options, loading a model, and output on the terminal."""

import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.text import Text

from outpace.cli.from_settings import SettingsOptions, completion, option, options
from outpace.core.settings import LoadSettings, settings_of
from outpace.lib.checks import counted, shown
from outpace.lib.errors import InvalidRequest
from outpace.lib.quick import read_ahead, without_collection
from outpace.lib.stages import loading as showing_stages
from outpace.lib.stages import stage

if TYPE_CHECKING:
    from outpace.api import Model
    from outpace.core.events import Sample

# Brackets in file names and errors are not markup.
console, notes = Console(markup=False), Console(stderr=True, markup=False)

SERVING = ("max_num_seqs", "prompt_slowdown", "enable_prefix_caching")
LOADING = tuple(name for name in settings_of(LoadSettings) if name not in (*SERVING, "profile", "progress"))
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p")
SECONDS_BETWEEN_LINES = 60  # between lines of progress in a log file
PENALTIES = ("repetition_penalty", "penalty_window", "presence_penalty", "frequency_penalty", "ignore_eos")


def loading_options(*left_out: str, **defaults: Any) -> SettingsOptions:
    """The options of loading a model, except `left_out`; with model=None the model is optional."""
    return options(LoadSettings, *(name for name in LOADING if name not in left_out), **defaults)


ModelName = Annotated[str, option(LoadSettings, "model")]
ApiKey = Annotated[
    str | None, typer.Option(metavar="KEY", envvar="OUTPACE_API_KEY", show_default=False, help="The server's API key.")
]


def methods_option(text: str) -> Any:
    """The option for one method or several, comma-separated."""
    return typer.Option(metavar="NAME", autocompletion=completion("methods"), help=text)


Dtype = Annotated[str, option(LoadSettings, "dtype")]
Device = Annotated[str, option(LoadSettings, "device")]
MaxModelLen = Annotated[int | None, option(LoadSettings, "max_model_len")]
PROMPTS = "JSON-lines FILE or FILE:LIMIT; 'builtin' or 'builtin:LIMIT'."
Workload = Annotated[list[str], typer.Option("--workload", "-w", metavar="FILE[:LIMIT]", help=PROMPTS)]
Prompts = Annotated[list[str], typer.Option(metavar="FILE[:LIMIT]", help=PROMPTS)]
Target = Annotated[
    str, typer.Option(metavar="MODEL", autocompletion=completion("model"), help="The model to train a drafter for.")
]
MaxTurns = Annotated[int | None, typer.Option(metavar="TURNS", help="Turns per conversation; by default all.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]


def load(settings: LoadSettings, slots: int) -> "Model":
    """The model with the method of its settings, None for its default, or the config's."""
    return _load(settings, None if settings.method is None else (settings.method,), slots)


def load_for(settings: LoadSettings, methods: Sequence[str] | None, slots: int) -> "Model":
    """The model for methods that requests name, each with its own budget or that of the settings. None if the drafter
    decides the method."""
    if settings.budget is not None and methods is not None:
        _check_budget(settings.budget, methods)
    return _load(replace(settings, method="plain", budget=None), methods, slots)


def load_default(settings: LoadSettings, method: str | None, slots: int) -> "Model":
    """As `load`, for requests that give a budget: the model's default method keeps a budget that it names, such as a
    profile's. A config still refuses a budget."""
    budget = None if settings.speculative_config is None else settings.budget
    return load(replace(settings, method=method, budget=budget), slots)


def _load(settings: LoadSettings, methods: Sequence[str] | None, slots: int) -> "Model":
    """`outpace.load`, with the stages of loading on standard error."""
    config = _config(settings.speculative_config)
    with without_collection(), showing_stages(settings.model, True):
        with stage("importing libraries"):
            from outpace.models.loading.registry import local_gguf

            if (file := local_gguf(settings.model)) is not None:
                read_ahead(file)
            quieten_transformers()
            from outpace.api import load

        if methods is not None and config is None:
            _check_drafter(settings.drafter, methods)
        given = vars(settings) | {"speculative_config": config, "max_num_seqs": slots}
        loaded = load(**given)
        gc.freeze()  # what has been loaded stays; collections need not visit it
    if "profile" in loaded.method_from:
        aside(f"method {loaded.method_name}, {loaded.method_from}")
    return loaded


def _check_drafter(drafter: str | None, methods: Sequence[str]) -> None:
    """Refuse a drafter that none of the methods would use."""
    from outpace.methods.catalog import parse_method

    if drafter is not None and all(parse_method(method).drafter is None for method in methods):
        raise InvalidRequest(
            f"drafter={drafter!r}: it would not be used, because {', '.join(methods) or 'stock generate'} "
            "needs none; leave it out, or choose a method that drafts with one (`outpace methods` lists what each "
            "needs)"
        )


def _check_budget(budget: int, methods: Sequence[str]) -> None:
    """Refuse a budget that none of the methods would take."""
    from outpace.methods.catalog import parse_method

    if not any(parse_method(method).takes_budget for method in methods):
        named = ", ".join(methods) or "stock generate"
        raise InvalidRequest(
            f"budget={budget}: it would not be used, because {named} takes none, or names its own; leave it out"
        )


def _config(text: str | None) -> dict[str, Any] | None:
    """A speculative config from its JSON."""
    if text is None:
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"speculative_config={shown(text)}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidRequest(f"speculative_config={shown(text)}: must be a JSON object")
    return config


def model_of(settings: LoadSettings, other: str) -> str:
    """The model's name."""
    if settings.model is None:
        raise InvalidRequest(f"model: name one, as in `outpace chat smollm2-135m`, or a server with {other}")
    return settings.model


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def given_of(context: typer.Context, names: Iterable[str]) -> tuple[str, ...]:
    """Which options were given on the command line."""
    return tuple(name for name in names if is_given(context, name))


def refuse_options(context: typer.Context, names: Sequence[str], reason: str) -> None:
    """Refuse options that a command does not take in this case."""
    for name in names:
        if is_given(context, name):
            raise InvalidRequest(f"{name}={context.params[name]!r}: cannot be used when {reason}; leave it out")


def refuse_key(context: typer.Context, other: str) -> None:
    """Refuse an API key if no server is used; the message does not contain it."""
    if is_given(context, "api_key"):
        raise InvalidRequest(f"api_key: no server is used; name one with {other}, or leave it out")


def check_together(field: str, size: int, prompts: int) -> None:
    """Refuse a batch larger than the workload: results would name a batch size that was never decoded."""
    if size > prompts:
        raise InvalidRequest(
            f"{field}={size}: the workload has only {counted(prompts, 'prompt')}; give more, or a smaller {field}"
        )


def quieten_transformers() -> None:
    """Turn off transformers' progress bars and advice, which would disturb the output of scripts and our progress
    bars."""
    # Read at import; the only switch for the GGUF reader's bar.
    for variable, value in (
        ("TQDM_DISABLE", "1"),
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
    ):
        os.environ.setdefault(variable, value)
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


def complain(error: object) -> None:
    """Print an error in one line on standard error. Control characters are escaped."""
    line = "".join(one if one.isprintable() else repr(one)[1:-1] for one in " ".join(str(error).split()))
    notes.print(Text.assemble(("error:", "red"), f" {line}"), soft_wrap=True)


def speed_of(result: "Sample", *more: str) -> str:
    """A result's figures in one line."""
    metrics = result.metrics
    figures = [f"{metrics.new_tokens} tokens"]
    if metrics.tpot_ms:  # an answer of one token has no speed
        figures += [f"{1e3 / metrics.tpot_ms:.1f} tokens/s", f"{metrics.tokens_per_step:.2f} tokens per step"]
    return ", ".join([*figures, *more, f"ended by {result.finish_reason}"])


def note(text: str) -> None:
    """Print a line on standard error."""
    notes.print(text, highlight=False, soft_wrap=True)


def aside(text: str) -> None:
    """Print a dim line on standard error."""
    notes.print(text, style="dim", highlight=False, soft_wrap=True)


def working(text: str) -> Status:
    """A spinner with a text, on a terminal only."""
    return notes.status(Text(text))


class Advance(Protocol):
    """Report completed work. `is_new`: whether it was done in this run; other work does not count for the time left."""

    def __call__(self, count: int = 1, is_new: bool = True) -> None: ...


@contextmanager
def progress_bar(label: str, total: int, before: int = 0) -> Iterator[Advance]:
    """A bar on a terminal; in a log file, and where TERM=dumb draws none, a line after every tenth of the work and
    every minute, with the time left. `before`: work of the total done by an earlier run."""
    is_drawn = notes.is_terminal and not notes.is_dumb_terminal
    columns = (SpinnerColumn(), TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True, disable=not is_drawn) as progress:
        task, done = progress.add_task(label, total=total, completed=before), before
        started = printed = monotonic()

        def advance(count: int = 1, is_new: bool = True) -> None:
            nonlocal done, printed, before
            done += count
            before += 0 if is_new else count
            progress.advance(task, count)
            now = monotonic()
            is_tenth = done * 10 // total > (done - count) * 10 // total
            if is_new and not is_drawn and (is_tenth or now - printed >= SECONDS_BETWEEN_LINES):
                printed, left = now, (now - started) / (done - before) * (total - done)
                notes.print(f"{label}: {done}/{total}, {timedelta(seconds=round(left))} left", highlight=False)

        yield advance
