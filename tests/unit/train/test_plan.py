"""The cost of a run before it starts."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem
from outpace.train import plan


class Clocked:
    """A model that takes 3 seconds to read a prompt and half a second for each token of an answer."""

    now = 0.0
    target = SimpleNamespace(max_length=512)

    def encode(self, prompt: Any) -> Any:
        return prompt

    def generate(self, prompts: Sequence[Any], params: SamplingParams) -> None:
        self.now += len(prompts) * (3 + params.max_new_tokens / 2)


def test_prompts_are_read_once_for_whole_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an estimate that spreads the time of reading prompts over the few tokens that are tried: answers
    seemed to take five times as long as they did."""
    model, options = Clocked(), dict[str, Any]()
    monkeypatch.setattr(plan, "load", lambda *_, **given: options.update(given) or model)
    monkeypatch.setattr(plan, "perf_counter", lambda: model.now)
    settings = SimpleNamespace(regenerate=SimpleNamespace(batch_size=4))
    run: Any = SimpleNamespace(target="x", dtype="auto", device="cpu", settings=settings)
    items = [WorkItem(str(at), "x", ("Hello",)) for at in range(6)]
    assert plan.answer_seconds(run, items, turns=10, tokens=1000) == pytest.approx(10 * 3.5 + 1000 * 0.5)
    assert options["enable_prefix_caching"] is False, "the second try would read no prompts"
