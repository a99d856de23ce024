"""`outpace train`: from prompts to a drafter, step by step."""

import inspect
import json
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from outpace.cli.command import Command, Group
from outpace.cli.from_settings import option, with_parameters
from outpace.cli.options import (
    ApiKey,
    Device,
    Dtype,
    MaxModelLen,
    Prompts,
    Target,
    load,
    note,
    progress_bar,
    quieten_transformers,
    refuse_key,
    refuse_options,
)
from outpace.core.params import SamplingParams
from outpace.core.settings import LoadSettings
from outpace.lib.checks import path_of
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.drafters.training.settings import RegenerateSettings

Answers = Annotated[str, typer.Option(help="Folder of regenerated answers.")]
Stored = Annotated[str, typer.Option(help="Format of features: bfloat16, float16 or float8_e4m3fn.")]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.FIELD=VALUE", help="Settings that override the recipe and --config."),
]
Config = Annotated[str | None, typer.Option(help="YAML file of settings.")]


class TrainGroup(Group):
    """The group `outpace train`. Some of its commands are made on use: `outpace --help` must not import pydantic, whose
    classes define their options, or drafters of other packages."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.made(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in (made := self.made()):
            return own
        app = typer.Typer(add_completion=False, rich_markup_mode=self.rich_markup_mode)
        app.command(cmd_name, cls=Command)(made[cmd_name])
        return typer.main.get_command(app)

    @staticmethod
    def made() -> dict[str, Callable[..., None]]:
        """A command for each kind of drafter, and `regenerate`."""
        from outpace.drafters.kinds import kinds
        from outpace.drafters.training.settings import RegenerateSettings

        trained = {name: kind.title for name, kind in kinds().items() if kind.training is not None}
        made = {name: train_command(name, title) for name, title in trained.items()}
        return made | {"regenerate": _with_options(regenerate, RegenerateSettings)}


train_app = typer.Typer(cls=TrainGroup, no_args_is_help=True, help=__doc__)


@train_app.callback()
def train() -> None:
    """From prompts to a drafter for your model, step by step."""
    # SIGTERM acts as Ctrl-C, so that finished work is stored; by default the process would end at once.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def train_command(method: str, title: str) -> Callable[..., None]:
    """The command that trains a kind of drafter."""

    def run(
        target: Target,
        prompts: Prompts,
        out: Annotated[Path, typer.Option(help="Folder of the run; an interrupted run resumes there.")],
        settings: Settings = None,
        config: Config = None,
        answers: Annotated[
            str | None, typer.Option(help="Folder of regenerated answers; by default they are made first.")
        ] = None,
        features: Annotated[
            str | None, typer.Option(help="Folder of captured features; by default training computes them.")
        ] = None,
        start: Annotated[str | None, typer.Option(help="A drafter to start from; by default weights are new.")] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Only estimate the cost.")] = False,
        dtype: Dtype = "auto",
        device: Device = "auto",
    ) -> None:
        quieten_transformers()
        from outpace.drafters.training.settings import merged_settings
        from outpace.train.run import Run

        chosen = merged_settings(method, config, settings or ())
        job = Run(
            method,
            target,
            tuple(prompts),
            answers=answers,
            out=path_of(out),
            device=device,
            dtype=dtype,
            settings=chosen,
            features=features,
            start=start,
        )
        if dry_run:
            from outpace.train.plan import plan

            note("timing the target and a few passes, which takes a minute")
            print(json.dumps(plan(job), indent=1))
            return
        from outpace.train.run import train

        with ExitStack() as bars:
            done = train(job, Shown(bars).step, progress_bar, note)
        print(json.dumps(done))  # not within: a bar on a terminal sends standard output to standard error

    run.__doc__ = title
    return run


class Shown:
    """The progress bar of a run's steps, and a line per measurement."""

    def __init__(self, bars: ExitStack) -> None:
        self._bars = bars
        self._advance: Callable[[], None] | None = None

    def step(self, shown: Mapping[str, Any]) -> None:
        if "stored" in shown:
            note(f"stopped after step {shown['step']}/{shown['steps']}; the same command goes on from there")
            return
        if "held_out" in shown:
            measured = shown["held_out"]
            positions = " ".join(f"{rate:.2f}" for rate in measured["by_position"])
            note(
                f"step {shown['step']}/{shown['steps']}: {measured['tokens_per_step']:.3f} tokens per step on held-out "
                f"answers (the drafter that is kept: {measured['best']:.3f}); accepted by position, where all before "
                f"were: {positions}"
            )
            return
        if self._advance is None:  # before the first step
            self._advance = self._bars.enter_context(progress_bar("steps", int(shown["steps"]), int(shown["step"])))
        else:
            self._advance()


@train_app.command(cls=Command)
def capture(
    method: Annotated[str, typer.Argument(help="Kind of drafter whose features are captured.")],
    target: Target,
    prompts: Prompts,
    answers: Answers,
    out: Annotated[Path, typer.Option(help="Folder for the features; an interrupted run resumes there.")],
    settings: Settings = None,
    config: Config = None,
    stored: Stored = "bfloat16",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Store the target's hidden states that a method reads, instead of running the target in every epoch."""
    quieten_transformers()
    from outpace.drafters.training.settings import merged_settings
    from outpace.train.run import Run, capture_features

    chosen, where = merged_settings(method, config, settings or ()), path_of(out)
    job = Run(method, target, tuple(prompts), answers, out=where, device=device, dtype=dtype, settings=chosen)
    print(json.dumps({"out": str(job.out), **capture_features(job, stored, note, progress_bar)}))


@train_app.command(cls=Command)
def transitions(
    target: Target,
    prompts: Prompts,
    answers: Answers,
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    features: Annotated[
        str | None, typer.Option(help="Folder of features captured for eagle3 or draft-lm; else the target is run.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; longer ones are cut. By default as in training.", min=8)
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Rank the tokens that the target expects after each token and each pair of tokens in prompts and answers, for the
    option warm=FILE. It needs no drafter and computes no gradients."""
    quieten_transformers()
    from outpace.data.answers import read_about
    from outpace.data.workload import read_workloads
    from outpace.drafters.training.settings import DataSettings
    from outpace.lib.stages import loading
    from outpace.lib.table_file import new_file
    from outpace.models.frozen import FrozenTarget
    from outpace.models.loading.load import load_target
    from outpace.train.data import by_id
    from outpace.train.features import expected, stored_features
    from outpace.train.records import prompts_hash
    from outpace.train.run import answers_hash, join
    from outpace.trees.retrieval.warm_file import TransitionRanks, save_matrix

    # Refuses the file before the target is loaded and run, which takes long.
    new_file(out)
    items, made = read_workloads(prompts), read_about(path_of(answers))
    by_id(items)
    with loading(target, True):
        model, codec = load_target(target, dtype, device, None, 1, longest=max_length or DataSettings().max_length)
    frozen = FrozenTarget(model)
    longest = frozen.max_length
    samples = join(items, path_of(answers), codec, frozen.vocab_size, longest)
    stored = None
    if features is not None:
        stored = stored_features(features, (frozen.layers,), frozen, samples, longest, made)
    ranks = TransitionRanks(frozen.vocab_size)
    with progress_bar("sequences", len(samples)) as advance:
        for ids, top_ids, probs in expected(samples, frozen, stored):
            ranks.add(ids, top_ids, probs)
            advance()
    matrix = ranks.matrix()
    assert matrix.pairs is not None
    about = {"sequences": len(samples), "tokens": int(samples.lengths.sum())}
    hashes = {"prompts_sha256": prompts_hash(items), "answers_sha256": answers_hash(path_of(answers))}
    origin = {"made_by": "outpace train transitions", "target": target, **hashes}
    rows = save_matrix(out, matrix, origin=origin | {name: str(value) for name, value in about.items()})
    pairs = len(matrix.pairs.known()[0])
    print(json.dumps({"file": str(out), **about, "rows": rows, "of": frozen.vocab_size, "pairs": pairs}))


def regenerate(
    context: typer.Context,
    target: Target,
    prompts: Prompts,
    out: Annotated[str, typer.Option(help="Folder for the answers; an interrupted run resumes there.")],
    method: Annotated[str, typer.Option(help="How to draft; large batches seldom gain from drafting.")] = "plain",
    drafter: Annotated[str | None, typer.Option(help="Drafter of the method, if it needs one.")] = None,
    max_model_len: MaxModelLen = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    endpoint: Annotated[
        str | None, typer.Option(help="Ask this OpenAI-compatible server, such as http://host/v1.")
    ] = None,
    endpoint_model: Annotated[
        str | None, typer.Option(help="The target's name there; by default the server's only model.")
    ] = None,
    api_key: ApiKey = None,
    **settings: Any,
) -> None:
    """Let the target answer prompts: token ids by prompt id, resumable."""
    from outpace.data.workload import read_workloads
    from outpace.drafters.training.settings import RegenerateSettings, validated

    if endpoint is not None and (method != "plain" or drafter is not None):
        raise InvalidRequest(
            f"method={method!r}, drafter={drafter!r}: the endpoint decides how it drafts; leave them out"
        )
    if endpoint is not None:
        refuse_options(context, ("max_model_len", "dtype", "device"), f"a server answers, endpoint={endpoint!r}")
    if endpoint is None:
        refuse_options(context, ("endpoint_model",), "no server is used; name one with --endpoint")
        refuse_key(context, "--endpoint")
    how = validated(RegenerateSettings, settings)
    items = read_workloads(prompts)
    quieten_transformers()
    from outpace.models.loading.load import load_vocabulary_facts
    from outpace.train.answers import EndpointAnswerer, EngineAnswerer, regenerate, sampling_of, store_for

    params, facts = sampling_of(how), load_vocabulary_facts(target)
    store = store_for(out, items, target, facts=facts, params=params, endpoint=endpoint, dtype=dtype)
    answerer: EngineAnswerer | EndpointAnswerer
    if endpoint is None:
        loaded = LoadSettings(
            model=target, method=method, drafter=drafter, dtype=dtype, device=device, max_model_len=max_model_len
        )
        answerer = EngineAnswerer(load(loaded, how.batch_size), params, method)
    else:
        from outpace.endpoint.client import Endpoint
        from outpace.endpoint.server import find_server

        with Endpoint(endpoint, api_key, patient=True) as asked:
            name = find_server(asked, endpoint_model).model
        answerer = EndpointAnswerer(endpoint, name, facts[0], facts[2], params, how.batch_size, api_key=api_key)
    before, made, tokens, started = len(store.done), 0, 0, perf_counter()
    with progress_bar("answers", len({item.id for item in items} - store.done.keys())) as advance:
        for conversation in regenerate(items, store, answerer):
            made += 1
            tokens += sum(map(len, conversation.answers))
            advance()
    seconds = perf_counter() - started
    for name, reason in answerer.cut.items():
        note(f"cut {name}: {reason}")
    record = {"out": out, "answered": made, "before": before, "cut": len(answerer.cut), "encoded": answerer.encoded}
    print(json.dumps(record | {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}))


def _with_options(command: Callable[..., None], settings: "type[RegenerateSettings]") -> Callable[..., None]:
    """A command whose `**settings` are options: the fields of a settings class, which checks their values."""

    @wraps(command)
    def run(**given: Any) -> None:
        command(**given)

    hints, own = get_type_hints(command, include_extras=True), inspect.signature(command).parameters.values()
    made = {one.name: (hints[one.name], one.default) for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD}
    for name, field in settings.model_fields.items():
        about = option(SamplingParams, name) if field.description is None else typer.Option(help=field.description)
        made[name] = Annotated[field.annotation, about], field.default
    return with_parameters(run, made)
