"""Shared beginnings on the real model: a system prompt of some hundred tokens, all kinds of methods, one engine."""

from typing import Any

import pytest

import outpace
from outpace.core.params import SamplingParams
from outpace.data.workload import read_workload
from outpace.engine.session import Session
from outpace.models.loading.pull import pull

METHODS = ("plain", "lookup", "recycle", "samd", "linear:budget=3", "domino", "eagle3", "outpace")
OPTIONS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 4}}


@pytest.mark.thorough
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_shared_system_prompt_changes_no_token(options: dict[str, Any]) -> None:
    """Guards against loss where beginnings are shared on a real model: bursts, requests one after the other, samples,
    a donor that is cancelled, and methods that share with each other; in float32, every answer against plain decoding
    that shares nothing."""
    pull("smollm2-135m")
    model = outpace.load("smollm2-135m", "plain", dtype="float32", device="cpu", max_model_len=1024)
    items = read_workload("builtin")
    system = " ".join(item.turns[0] for item in items[:12])
    prompts = [
        model.encode([{"role": "system", "content": system}, {"role": "user", "content": item.turns[0]}])
        for item in items[:3]
    ]
    params = SamplingParams(max_new_tokens=16, n=2, **options)
    model.engine.shares_prefixes = False
    plain = [[list(sample.token_ids) for sample in model.generate(prompt, params).samples] for prompt in prompts]
    model.engine.shares_prefixes = True
    sessions = list[Session]()
    for number, method in enumerate((*METHODS, *METHODS)):
        if number % len(METHODS) == 0:
            with model.stream(prompts[0], method="outpace", **options) as doomed:
                next(doomed)
        sessions += model.engine.add(prompts[number % 3], params, model.proposer(method))
        if number % 3 == 0:
            own = list(sessions)
            model.engine.run_until(lambda own=own: all(one.has_ended for one in own), own)  # type: ignore[misc]
    model.engine.run_until(lambda: all(session.has_ended for session in sessions), sessions)
    for session in sessions:
        which = prompts.index(session.prompt_ids)
        assert session.generated == plain[which][session.sample_index], session.proposer
    shared = sum(session.metrics.reused_tokens for session in sessions)
    assert shared > 0.5 * sum(len(session.prompt_ids) for session in sessions)
