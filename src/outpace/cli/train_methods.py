"""`outpace train METHOD`: a drafter for a target, one command per kind."""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from outpace.cli.command import Command, Group
from outpace.cli.options import Device, Dtype, Prompts, Target, notes, progress_bar, quieten_transformers
from outpace.lib.paths import path_of


def train_command(method: str, title: str) -> Callable[..., None]:
    """The command that trains a kind of drafter."""

    def run(
        target: Target,
        prompts: Prompts,
        out: Annotated[Path, typer.Option(help="Folder of the run; an unfinished run goes on there.")],
        settings: Annotated[
            list[str] | None, typer.Argument(metavar="SECTION.FIELD=VALUE", help="Over the recipe and --config.")
        ] = None,
        config: Annotated[str | None, typer.Option(help="YAML file of settings.")] = None,
        answers: Annotated[str | None, typer.Option(help="Folder of regenerated answers; else they are made.")] = None,
        features: Annotated[str | None, typer.Option(help="Folder of captured features; else they are made.")] = None,
        start: Annotated[str | None, typer.Option(help="A drafter to begin with; else weights are new.")] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would cost, and do nothing.")] = False,
        dtype: Dtype = "auto",
        device: Device = "auto",
    ) -> None:
        quieten_transformers()
        from outpace.drafters.trainable import settings_of
        from outpace.train.run import Run

        chosen = settings_of(method, config, settings or ())
        job = Run(
            method,
            target,
            tuple(prompts),
            answers=answers,
            features=features,
            out=path_of(out),
            device=device,
            dtype=dtype,
            settings=chosen,
            start=start,
        )
        if dry_run:
            from outpace.train.plan import plan

            print(json.dumps(plan(job), indent=1))
            return
        print(json.dumps(_train(job)))

    run.__doc__ = title
    return run


class TrainGroup(Group):
    """`outpace train`: a command for each kind of drafter, looked up when the group is used and not before, as kinds
    of other packages are imported for it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self._kinds(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in self._kinds():
            return own
        app = typer.Typer(add_completion=False, rich_markup_mode=self.rich_markup_mode)
        app.command(cmd_name, cls=Command)(train_command(cmd_name, self._kinds()[cmd_name]))
        return typer.main.get_command(app)

    @staticmethod
    def _kinds() -> dict[str, str]:
        from outpace.drafters.kinds import kinds

        return {name: kind.title for name, kind in kinds().items() if kind.objective is not None}


def capture(
    method: Annotated[str, typer.Argument(help="Kind of drafter whose features are captured.")],
    target: Target,
    prompts: Prompts,
    answers: Annotated[str, typer.Option(help="Folder of regenerated answers.")],
    out: Annotated[Path, typer.Option(help="Folder for the features; an unfinished run goes on there.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="SECTION.FIELD=VALUE", help="As for training.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="YAML file of settings, as for training.")] = None,
    stored: Annotated[str, typer.Option(help="bfloat16, float16 or float8_e4m3fn.")] = "bfloat16",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Store the target's hidden states that a method reads, instead of running the target in every epoch."""
    quieten_transformers()
    from outpace.drafters.trainable import settings_of
    from outpace.train.run import Run, capture_features

    chosen = settings_of(method, config, settings or ())
    job = Run(
        method,
        target,
        tuple(prompts),
        answers=answers,
        features=None,
        out=path_of(out),
        device=device,
        dtype=dtype,
        settings=chosen,
    )
    total = 0

    def count() -> None:
        nonlocal total
        total += 1
        if total % 500 == 0:
            notes.print(f"captured: {total} sequences")

    said = capture_features(job, stored, _say, count)
    print(json.dumps({"out": str(job.out), **said}))


def _train(job: Any) -> dict[str, Any]:
    from outpace.data.workload import read_workloads
    from outpace.train.run import train

    shown = Shown(len({item.id for item in read_workloads(list(job.prompts))}))
    try:
        done: dict[str, Any] = train(job, shown.step, shown.answer, _say)
    finally:
        shown.close()
    return done


def _say(line: str) -> None:
    notes.print(line, highlight=False, markup=False)


class Shown:
    """Bars of a run, one at a time: of answers while they are made, then of steps; and a line for each measurement.

    Args:
        prompts: how many.
    """

    def __init__(self, prompts: int) -> None:
        self._prompts, self._bars, self._label = prompts, ExitStack(), ""
        self._advance: Callable[[], None] = lambda: None

    def answer(self, conversation: object) -> None:
        if conversation is None:
            self.close()  # before the bars of loading the target
            return
        self._bar("answers", self._prompts)
        self._advance()

    def step(self, shown: Mapping[str, Any]) -> None:
        if "held_out" in shown:
            measured = shown["held_out"]
            positions = " ".join(f"{rate:.2f}" for rate in measured["by_position"])
            _say(
                f"step {shown['step']}/{shown['steps']}: {measured['tokens_per_step']:.3f} tokens per step on held-out "
                f"answers (the drafter that is kept: {measured['best']:.3f}); accepted by position: {positions}"
            )
            return
        self._bar("steps", int(shown["steps"]) - int(shown["step"]) + 1)
        self._advance()

    def close(self) -> None:
        self._bars.close()

    def _bar(self, label: str, total: int) -> None:
        if self._label != label:
            self._bars.close()
            self._label, self._advance = label, self._bars.enter_context(progress_bar(label, total))
