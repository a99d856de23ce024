"""The cost of a run before it starts."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem
from outpace.drafters.training.batch import TrainingSample
from outpace.drafters.training.settings import merged_settings
from outpace.train import plan
from outpace.train.data import SampleSet
from outpace.train.run import Run


class Clocked:
    """A model that takes 3 seconds to read a prompt and half a second for each token of an answer, and a minute more
    for the first answers."""

    now, start = 0.0, 60.0
    target = SimpleNamespace(max_length=512)

    def encode(self, prompt: Any) -> Any:
        return prompt

    def generate(self, prompts: Sequence[Any], params: SamplingParams) -> None:
        self.now += self.start + len(prompts) * (3 + params.max_new_tokens / 2)
        self.start = 0.0


def test_prompts_are_read_once_for_whole_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an estimate that spreads the time of reading prompts over the few tokens that are tried: answers
    seemed to take five times as long as they did. And against what only first answers take, counted for each."""
    model, options = Clocked(), dict[str, Any]()
    monkeypatch.setattr(plan, "load", lambda *_, **given: options.update(given) or model)
    monkeypatch.setattr(plan, "perf_counter", lambda: model.now)
    settings = SimpleNamespace(regenerate=SimpleNamespace(batch_size=4))
    run: Any = SimpleNamespace(target="x", dtype="auto", device="cpu", settings=settings)
    items = [WorkItem(str(at), "x", (f"Hello {at}",)) for at in range(6)]
    assert plan.answer_seconds(run, items, turns=10, tokens=1000) == pytest.approx(10 * 3.5 + 1000 * 0.5)
    assert options["enable_prefix_caching"] is False, "the second try would read no prompts"


def planned(monkeypatch: pytest.MonkeyPatch, items: Sequence[WorkItem], *settings: str, **stubs: Any) -> dict[str, Any]:
    """The plan of a run on prompts without answers; no model is there."""
    target = SimpleNamespace(device="cpu", max_length=64)
    objective: Any = SimpleNamespace(net=torch.nn.Linear(2, 1), to=lambda _: objective)
    sample = TrainingSample("0/0", torch.arange(9), torch.arange(9) >= 3)
    known: dict[str, Any] = {
        "read_workloads": lambda _: items,
        "frozen_target": lambda *_: (target, None),
        "longest_samples": lambda *_: SampleSet([sample]),
        "build": lambda *_: objective,
        "disk_needed": lambda *_: 0,
        "answer_seconds": lambda *_: 3600.0,
        "try_training": lambda *_: (1.0, 2e9),
    }
    for name, stub in (known | stubs).items():
        monkeypatch.setattr(plan, name, stub)
    return plan.plan(
        Run("dflash", "x", ("p",), None, Path("run"), "cpu", "auto", merged_settings("dflash", None, settings))
    )


def test_memory_is_measured_while_the_target_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a peak of memory that counts the copy of the target on which the speed of answers is tried."""
    order: list[str] = []

    def done(step: str, result: Any) -> Any:
        order.append(step)
        return result

    stubs: dict[str, Any] = {
        "answer_seconds": lambda *_: done("answers", 3600.0),
        "try_training": lambda *_: done("training", (1.0, 2e9)),
    }
    found = planned(monkeypatch, [WorkItem(str(at), "x", (f"Hello {at}",)) for at in range(10)], **stubs)
    assert order == ["training", "answers"]
    assert list(found["hours"]) == ["answers", "training"], "in the order of a run"
    assert found["memory_gb"] == 2.0


def test_all_turns_of_held_out_prompts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an estimate that holds out a turn for each prompt: of conversations a run holds out all turns."""
    items = [WorkItem(str(at), "x", (f"Hello {at}",) * (2 + at % 3)) for at in range(10)]
    ids, mask = torch.arange(9), torch.arange(9) >= 3
    made = SampleSet(TrainingSample(f"{one.id}/{turn}", ids, mask) for one in items for turn in range(len(one.turns)))
    each_step = ("training.epochs=1", "training.batch_size=1", "training.micro_batch_size=1", "data.held_out=4")
    found = planned(monkeypatch, items, *each_step)
    assert found["steps"] == len(made.without(made.held_out(4)))
    assert found["sequences"] == len(made)
