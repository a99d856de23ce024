"""The engine's promises to a request: its limits, its neighbours' independence, an end in every case."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.engine.engine import Engine
from outpace.lib.errors import InvalidRequest, NonFiniteLogits
from outpace.testing import AdversaryDrafter, OracleDrafter, ToyTarget, decode
from outpace.trees.proposer import EmptyDraft
from tests.unit.engine.doubles import (
    PROMPT,
    VOCAB,
    CharDetokenizer,
    PoisonedTarget,
    alone,
    distinct_answer,
    event_tokens,
    run,
    run_all,
    text_of,
    toy_engine,
)


class BoundedTarget(ToyTarget):
    """Refuses positions beyond its limit, as a model with a table of positions would."""

    def logits(self, ids: Any, position: int) -> Any:
        assert position < self.max_length, f"asked for a token at position {position} of {self.max_length}"
        return super().logits(ids, position)


def test_prompts_that_cannot_be_served_are_refused_by_name() -> None:
    """Guards against an index error deep in the model, or in another request's step, a prompt cut silently, and a
    remedy that is refused in its turn: the message must say how long it is, what the limit is, and what sets it."""
    engine, params = toy_engine(max_length=20), SamplingParams(max_new_tokens=5)
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        engine.add([], params, EmptyDraft())
    for token in (-1, VOCAB):
        with pytest.raises(InvalidRequest, match=f"token id {token} .* {VOCAB}"):
            engine.add([1, token], params, EmptyDraft())
    with pytest.raises(InvalidRequest, match="stop strings need a tokenizer"):
        engine.add([1], SamplingParams(stop=("x",)), EmptyDraft())
    with pytest.raises(InvalidRequest, match=r"has 20 tokens .* limit is 20.*max_model_len, or kv_cache_memory_"):
        engine.add([1] * 20, params, EmptyDraft())
    assert engine.is_idle
    (session,) = engine.add([1] * 20, SamplingParams(max_new_tokens=0), EmptyDraft())
    assert session.finish_reason == "length"


def test_a_request_may_bring_its_own_detokenizer() -> None:
    """Guards against stop strings refused for want of the engine's, and searched for in text of another one."""
    answer = distinct_answer(8)
    params = SamplingParams(max_new_tokens=8, stop=(text_of(answer[4:5]),))
    session = run(toy_engine(), PROMPT, params, EmptyDraft(), new_detokenizer=CharDetokenizer)
    assert (session.generated, session.stopper.text) == (answer[:5], text_of(answer[:4]))


@pytest.mark.parametrize("room", [1, 2, 5])
def test_an_answer_fills_the_context_to_the_last_token(room: int) -> None:
    """Guards against off-by-one at the limit: no token short, none too many, no draft where there is no position."""
    target = BoundedTarget(VOCAB, seed=13, max_length=20)
    prompt = [2] * (20 - room)
    params = SamplingParams(max_new_tokens=100)
    (plain,) = decode(Engine(target), [prompt], [params], [EmptyDraft()])
    assert (len(plain.generated), plain.finish_reason) == (room, "length")
    for proposer in (OracleDrafter([plain.ids]), AdversaryDrafter(VOCAB, [plain.ids])):
        (session,) = decode(Engine(target), [prompt], [params], [proposer])
        assert (session.ids, session.finish_reason) == (plain.ids, "length")


def test_no_token_and_one_token() -> None:
    """Guards against a model pass for a request that wants nothing, and a second pass for one that wants one token."""
    engine = toy_engine(text=True)
    (none,) = engine.add(PROMPT, SamplingParams(max_new_tokens=0), EmptyDraft())
    assert engine.is_idle
    assert [(event.tokens, event.finish_reason) for event in none.events] == [((), "length")]
    sample = engine.result(none)
    assert (sample.token_ids, sample.text, sample.metrics.new_tokens) == ((), "", 0)
    assert sample.metrics.tokens_per_step == 1.0
    (one,) = decode(engine, [PROMPT], [SamplingParams(max_new_tokens=1)], [OracleDrafter([])])
    assert one.generated == alone(PROMPT, SamplingParams(max_new_tokens=1))
    assert one.metrics.steps == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("delay", [0, 1, 4])
def test_non_finite_logits_end_only_the_request_they_hit(value: float, delay: int) -> None:
    """Guards against NaN drawn as a token, and against one broken request taking the batch down with it."""
    at = len(PROMPT) + delay
    target = PoisonedTarget(PROMPT[0], at, value, vocab_size=VOCAB, seed=13, max_slots=2)
    engine, params = Engine(target), SamplingParams(max_new_tokens=10)
    healthy_prompt = [9, 9]
    (poisoned,) = engine.add(PROMPT, params, EmptyDraft())
    (healthy,) = engine.add(healthy_prompt, params, EmptyDraft())
    run_all(engine, [poisoned, healthy])
    assert healthy.generated == alone(healthy_prompt, params)
    assert (poisoned.finish_reason, healthy.finish_reason) == ("error", "length")
    assert poisoned.generated == alone(PROMPT, params)[:delay], "what came before the fault stays"
    assert event_tokens(poisoned) == poisoned.generated
    assert [event.finish_reason for event in poisoned.events][-1] == "error"
    with pytest.raises(NonFiniteLogits, match=f"position {at} "):
        engine.result(poisoned)
    assert engine.free_slots == 2, "both slots must be free again"


@pytest.mark.parametrize(("end", "reason"), [("nothing", "error"), ("eos", "stop"), ("string", "stop")])
def test_a_fault_behind_accepted_drafts_takes_no_token_back(end: str, reason: str) -> None:
    """Guards against a request that fails for logits after its end, which plain decoding never computes."""
    answer = distinct_answer(8)
    ends: dict[str, dict[str, Any]] = {
        "nothing": {},
        "eos": {"eos_token_ids": answer[3]},
        "string": {"stop": text_of(answer[3:4])},
    }
    target = PoisonedTarget(PROMPT[0], len(PROMPT) + 4, float("nan"), vocab_size=VOCAB, seed=13)
    params = SamplingParams(max_new_tokens=8, **ends[end])
    (session,) = decode(Engine(target, CharDetokenizer), [PROMPT], [params], [OracleDrafter([PROMPT + answer])])
    assert (session.generated, session.finish_reason) == (answer[:4], reason)
    assert session.metrics.accepted > 0


def test_a_token_that_is_ruled_out_is_no_fault() -> None:
    """Guards against refusing minus infinity, the ordinary mark of an id that must not be drawn."""
    target = PoisonedTarget(PROMPT[0], len(PROMPT), -float("inf"), vocab_size=VOCAB, seed=13)
    (session,) = decode(Engine(target), [PROMPT], [SamplingParams(max_new_tokens=5)], [EmptyDraft()])
    assert session.finish_reason == "length"
    assert session.generated[0] != 2


def test_cancelling_frees_the_slot_and_leaves_the_others_alone() -> None:
    """Guards against a leaked slot, a waiting request that never starts, and neighbours shifted by the gap."""
    engine = toy_engine(max_slots=2)
    prompts = [[index + 1, 5] for index in range(4)]
    params = [SamplingParams(max_new_tokens=20, temperature=0.9, seed=index) for index in range(4)]
    sessions = [engine.add(p, wanted, EmptyDraft())[0] for p, wanted in zip(prompts, params, strict=True)]
    for _ in range(4):
        engine.step()
    engine.cancel(sessions[0])
    engine.cancel(sessions[3])  # still waiting: it must never start
    engine.cancel(sessions[0])
    run_all(engine, sessions)
    assert [session.finish_reason for session in sessions] == ["cancelled", "length", "length", "cancelled"]
    expected = [alone(p, wanted) for p, wanted in zip(prompts, params, strict=True)]
    assert sessions[0].generated == expected[0][: len(sessions[0].generated)] != []
    assert [sessions[1].generated, sessions[2].generated, sessions[3].generated] == [expected[1], expected[2], []]
    assert [event.finish_reason for event in sessions[0].events].count("cancelled") == 1
    assert engine.result(sessions[0]).finish_reason == "cancelled"
    engine.cancel(sessions[1])
    assert sessions[1].finish_reason == "length", "an ended request cannot be cancelled"
    assert engine.is_idle
    assert engine.free_slots == 2


def test_a_seed_chosen_by_the_engine_is_reported_and_reproduces_the_answer() -> None:
    """Guards against unseeded requests that all get the same noise, or whose answer cannot be had again.

    Two unseeded answers of 12 tokens agree by chance with odds far below 1 in a million.
    """
    engine, unseeded = toy_engine(), SamplingParams(max_new_tokens=12, temperature=1.5)
    first, second = decode(engine, [PROMPT] * 2, [unseeded] * 2, [EmptyDraft()] * 2)
    assert first.seed != second.seed
    assert first.generated != second.generated
    reported = engine.result(first).seed
    seeded = SamplingParams(max_new_tokens=12, temperature=1.5, seed=reported)
    assert alone(PROMPT, seeded) == first.generated


class SoundOnlyOn(ToyTarget):
    """Finite logits for the prefixes of one sequence, NaN after anything else."""

    def __init__(self, sequence: Sequence[int]) -> None:
        super().__init__(vocab_size=12, seed=4)
        self._sequence = list(sequence)

    def logits(self, ids: Sequence[int], position: int) -> Tensor:
        logits = super().logits(ids, position)
        is_known = self._sequence[: len(ids)] == list(ids)
        return logits if is_known else torch.full_like(logits, torch.nan)


@pytest.mark.parametrize(("temperature", "verification"), [(0.0, "match"), (0.9, "match"), (0.0, "rejection")])
def test_nan_in_a_branch_not_taken_changes_nothing(temperature: float, verification: str) -> None:
    """Guards against a request that fails only because a wrong draft was looked at: half precision overflows there."""
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=2, verification=verification)
    (plain,) = decode(Engine(ToyTarget(vocab_size=12, seed=4)), [[1, 2, 3]], [params], [EmptyDraft()])
    drafter = AdversaryDrafter(12, [plain.ids], budget=10, truth=0.6)
    (session,) = decode(Engine(SoundOnlyOn(plain.ids)), [[1, 2, 3]], [params], [drafter])
    assert session.error is None
    assert session.generated == plain.generated
    assert any(len(observation.tree) - 1 > observation.verdict.accepted_drafts for observation in drafter.observations)
