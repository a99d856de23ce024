"""What the commands share: their options, loading a model, progress."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.text import Text

from outpace.core.params import Grammar
from outpace.lib.checks import shown
from outpace.lib.errors import InvalidRequest
from outpace.lib.stages import loading, stage

if TYPE_CHECKING:
    from outpace.api import Model

# Names of files and errors have brackets, which are no markup.
console, notes = Console(markup=False), Console(stderr=True, markup=False)

ModelName = Annotated[str, typer.Option("--model", "-m", help="Folder, GGUF file, pulled name or hub id.")]
OptionalModelName = Annotated[
    str | None, typer.Option("--model", "-m", help="Folder, GGUF file, pulled name or hub id; or a server's name.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="OUTPACE_API_KEY", show_default=False, help="Of the server, where it wants one."),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="A name of `outpace methods`, with options as in recycle:budget=8. By default what `outpace tune` found "
        "here, else outpace, with the drafter that is named, or without any."
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub id of a trained drafter, a name such as smollm2-135m/domino, or a draft model for linear, "
        "fixed, dynatree and svip. By default what ships for the model; else, for these, the target's first layers."
    ),
]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help="vLLM's option, instead of method, drafter and budget.",
    ),
]
Budget = Annotated[int | None, typer.Option(help="Drafted nodes per round; by default the method's own.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate per turn.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the smallest set with this probability; 1 keeps all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this fraction of the likeliest one; 0 keeps all.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 discourages tokens of prompt and answer; 1 is none.")]
PresencePenalty = Annotated[float, typer.Option(help="Subtracted from logits of tokens said before, -2 to 2.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Subtracted from logits once per occurrence, -2 to 2.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on to the token limit, whatever is said.")]
Seed = Annotated[int | None, typer.Option(help="Key of the sampling noise.")]
JsonSchema = Annotated[
    str | None, typer.Option("--json-schema", metavar="FILE", help="Answer with JSON that this schema validates.")
]
Regex = Annotated[str | None, typer.Option(help="Answer with text that this regular expression matches as a whole.")]
LarkFile = Annotated[
    str | None, typer.Option("--grammar", metavar="FILE", help="Answer with text of this grammar, in Lark's notation.")
]
Quantize = Annotated[str, typer.Option(help="none; or int8: products of 8-bit integers, on a CPU.")]
Dtype = Annotated[str, typer.Option(help="Number format of the weights: auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")]
Exact = Annotated[
    bool, typer.Option("--exact", help="On a GPU: passes of fixed shapes, so that no answer depends on its company.")
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Tokens per request, prompt and answer together; by default what the model allows, at most 4096."
    ),
]
Workload = Annotated[
    list[str], typer.Option("--workload", "-w", help="JSON-lines FILE or FILE:LIMIT; 'builtin' or 'builtin:LIMIT'.")
]
MaxTurns = Annotated[int | None, typer.Option(help="Turns per conversation; by default all.")]
Target = Annotated[str, typer.Option(help="Folder, GGUF file, pulled name or hub id.")]
Prompts = Annotated[list[str], typer.Option(help="JSON-lines FILE or FILE:LIMIT; 'builtin' or 'builtin:LIMIT'.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]


@dataclass(frozen=True)
class Loading:
    """How a command loads its model: the options that commands share. All are those of `outpace.load`, but for
    `speculative_config`, which is JSON here."""

    model: str
    drafter: str | None
    budget: int | None
    dtype: str
    quantize: str
    device: str
    max_model_len: int | None
    speculative_config: str | None = None
    exact: bool = False

    def load(self, method: str | None, slots: int) -> "Model":
        """The model with a method, None for its default, or the config's.

        Raises:
            InvalidRequest: a bad option, or a drafter that this method does not use.
            ModelError: as `outpace.load`.
        """
        return self._load(method, None if method is None else (method,), slots)

    def load_for(self, methods: Sequence[str] | None, slots: int) -> "Model":
        """The model for methods that its requests name, with the drafter but no budget: that comes with each request.
        None for methods that are chosen by the drafter.

        Raises:
            InvalidRequest: a bad option, or a drafter that none of these methods uses.
            ModelError: as `outpace.load`.
        """
        return replace(self, budget=None)._load("plain", methods, slots)

    def _load(self, method: str | None, methods: Sequence[str] | None, slots: int) -> "Model":
        """`outpace.load`, with the stages of loading on standard error."""
        config = _config(self.speculative_config)
        with loading(self.model, True):
            with stage("importing libraries"):
                quieten_transformers()
                from outpace.api import load

            if methods is not None and config is None:
                self._check_drafter(methods)
            loaded = load(
                self.model,
                method,
                drafter=self.drafter,
                budget=self.budget,
                speculative_config=config,
                dtype=self.dtype,
                quantize=self.quantize,
                device=self.device,
                max_model_len=self.max_model_len,
                max_num_seqs=slots,
                exact=self.exact,
            )
        if "profile" in loaded.method_from:
            aside(f"method {loaded.method_name}, {loaded.method_from}")
        return loaded

    def _check_drafter(self, methods: Sequence[str]) -> None:
        """Refuse a drafter that was asked for where nothing that is named would draft with it."""
        from outpace.methods.catalog import parse_method

        if self.drafter is not None and all(parse_method(method).drafter is None for method in methods):
            raise InvalidRequest(
                f"drafter={self.drafter!r}: it would not be used, for {', '.join(methods) or 'stock generate'} needs "
                "none; leave it out, or choose a method that drafts with one (`outpace methods` says what each needs)"
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


def grammar_of(json_schema: str | None, regex: str | None, lark: str | None) -> Grammar | None:
    """The grammar that options name, at most one of them.

    Raises:
        InvalidRequest: several were given, a file cannot be read, or what it holds is no grammar.
    """
    given = {"json-schema": json_schema, "regex": regex, "grammar": lark}
    named = [f"--{name}" for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidRequest(f"{' and '.join(named)}: give one of them")
    if regex is not None:
        return Grammar.regex(regex)
    file = json_schema or lark
    if file is None:
        return None
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{named[0]} {file}: cannot be read as text: {error}") from error
    return Grammar.lark(text) if json_schema is None else Grammar.json_schema(text)


def tokenized_turns(model: str, workload: list[str]) -> tuple[Iterator[list[int]], int, tuple[int, ...]]:
    """The turns of workloads as a model's ids, one by one, with the size of its vocabulary and its EOS ids."""
    from outpace.data.workload import read_workloads

    items = read_workloads(workload)
    quieten_transformers()
    from outpace.models.loading.load import load_vocabulary_facts

    codec, vocab_size, eos = load_vocabulary_facts(model)
    return (codec.encode(turn) for item in items for turn in item.turns), vocab_size, eos


def model_for(name: str | None, other: str) -> str:
    """The model's name, without which nothing runs here.

    Raises:
        InvalidRequest: it is missing; `other` is the option that would do instead.
    """
    if name is None:
        raise InvalidRequest(f"model: name one with --model, or a server with {other}")
    return name


def refuse_options(context: typer.Context, names: Sequence[str], reason: str) -> None:
    """Options that a command does not take in this case.

    Raises:
        InvalidRequest: one of them was given.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InvalidRequest(f"{name}={context.params[name]!r}: not where {reason}; leave it out")


def quieten_transformers() -> None:
    """Its bars and advice would break the output of scripts and fight with our own bars."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # the GGUF reader's bar knows no other switch; read at import
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def complain(error: object) -> None:
    """What is wrong, in one line on standard error. What a terminal would obey is escaped."""
    line = "".join(one if one.isprintable() else repr(one)[1:-1] for one in " ".join(str(error).split()))
    notes.print(Text.assemble(("error:", "red"), f" {line}"), soft_wrap=True)


def aside(text: str) -> None:
    """A line on standard error that nobody has to read."""
    notes.print(text, style="dim", highlight=False, soft_wrap=True)


def working(text: str) -> Status:
    """A spinner on a terminal, beside what is being done."""
    return notes.status(Text(text))


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; in a log file, a line at every tenth of the way."""
    columns = (
        SpinnerColumn(),
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        task, done = progress.add_task(label, total=total), 0

        def advance() -> None:
            nonlocal done
            done += 1
            progress.advance(task)
            if not notes.is_terminal and done * 10 // total > (done - 1) * 10 // total:
                notes.print(f"{label}: {done}/{total}")

        yield advance
