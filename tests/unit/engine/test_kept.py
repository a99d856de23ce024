"""Slots kept from turn to turn: the answers of a fresh engine, nothing leaked, nobody kept waiting."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer, Target
from outpace.engine.engine import Engine
from outpace.engine.session import KeptSlot, Session
from outpace.lib.errors import InvalidRequest, NonFiniteLogits
from outpace.testing import AdversaryDrafter, OracleDrafter, ToyTarget, decode
from outpace.trees.proposer import EmptyDraft
from tests.unit.engine.doubles import PROMPT, VOCAB, PoisonedTarget, alone, named, run, run_all, toy_engine
from tests.unit.models.tiny import FAMILIES, tiny_config, tiny_target
from tests.unit.models.tiny import VOCAB as TINY_VOCAB

TOYS = ("plain", "lookup:budget=3", "recycle:budget=8", "samd:budget=8,min_match=1", "lookahead:budget=15")
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "top_p": 0.9, "seed": 3}}


def turn(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, proposer: Proposer, resume: KeptSlot | None = None
) -> Session:
    return run(engine, prompt, params, proposer, keep=True, resume=resume)


def assert_turns_equal_fresh(make_target: Callable[[], Target], proposer: Proposer, **options: Any) -> list[Session]:
    """Four turns over one slot: the history taken over, re-tokenised at its end, cut short, and asked once more."""
    engine, kept, ids, sessions = Engine(make_target(), prefill_chunk=7), None, list(PROMPT), []
    for number in range(4):
        params = SamplingParams(max_new_tokens=9 + number, **options)
        session = turn(engine, ids, params, proposer, kept)
        (fresh,) = decode(Engine(make_target(), prefill_chunk=7), [ids], [params], [EmptyDraft()])
        assert session.generated == fresh.generated, f"turn {number} with {session.metrics.reused_tokens} reused"
        sessions.append(session)
        kept = session.kept
        said = session.ids
        ids = ([*said, 7, number], [*said[:-3], 9, 9, 2], said[: len(PROMPT) + 4], [])[number]
    assert kept is not None
    engine.release(kept)
    engine.release(kept)  # nothing happens to a slot that is closed
    return sessions


@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("method", [*TOYS, "adversary"])
def test_answers_over_a_kept_slot_are_those_of_a_fresh_engine(method: str, options: dict[str, Any]) -> None:
    """Guards against rows of the old turn seen by the new one, and against a first token drawn without its KV."""
    targets: list[ToyTarget] = []

    def make() -> ToyTarget:
        targets.append(ToyTarget(VOCAB, seed=13))
        return targets[-1]

    proposer = AdversaryDrafter(VOCAB, seed=1) if method == "adversary" else named(method, VOCAB)
    sessions = assert_turns_equal_fresh(make, proposer, **options)
    lengths = [len(session.ids) for session in sessions]
    reused = [session.metrics.reused_tokens for session in sessions]
    assert reused == [0, lengths[0] - 1, lengths[1] - 3, len(PROMPT) + 3], "all but the pending token, then the prefix"


@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_real_model_answers_over_a_kept_slot_as_afresh(family: str, options: dict[str, Any]) -> None:
    """Guards against KV that the toy has not: positions, moved rows, layers, in float32."""
    for method in ("recycle:budget=12", "plain"):
        proposer = named(method, TINY_VOCAB)
        assert_turns_equal_fresh(lambda: tiny_target(tiny_config(family)), proposer, **options)


def test_an_end_inside_a_draft_keeps_what_was_said_and_no_more() -> None:
    """Guards against tokens that a round committed behind an EOS, which the next turn would take for history."""
    (whole,) = decode(toy_engine(), [PROMPT], [SamplingParams(max_new_tokens=30)], [EmptyDraft()])
    drafter = OracleDrafter([whole.ids], budget=8)
    for place in range(1, 12):
        engine = toy_engine()
        stop = whole.generated[place]
        session = turn(engine, PROMPT, SamplingParams(max_new_tokens=30, eos_token_ids=(stop,)), drafter)
        assert session.kept is not None
        assert session.kept.ids == session.ids[:-1]
        again = turn(engine, session.ids, SamplingParams(max_new_tokens=5), drafter, session.kept)
        assert again.metrics.reused_tokens == len(session.ids) - 1
        assert again.generated == whole.generated[place + 1 : place + 6]


def test_a_cancelled_request_keeps_its_slot() -> None:
    """Guards against an answer stopped by its reader, in the prompt or later, whose next turn starts from wrong KV."""
    prompt = [index % VOCAB for index in range(20)]
    for steps in range(6):
        engine = Engine(ToyTarget(VOCAB, seed=13), prefill_chunk=8)
        (session,) = engine.add(prompt, SamplingParams(max_new_tokens=20), EmptyDraft(), keep=True)
        for _ in range(steps):
            engine.step()
        engine.cancel(session)
        assert (session.kept is None) == (steps == 0), "without a step there was no slot yet"
        if session.kept is not None:
            assert session.kept.ids == (session.ids[: 8 * steps] if steps < 3 else session.ids[:-1])
        params = SamplingParams(max_new_tokens=5)
        again = turn(engine, [*session.ids, 4], params, session.proposer, session.kept)
        assert again.generated == alone([*session.ids, 4], params)


def test_kept_slots_give_way_to_requests() -> None:
    """Guards against a hang when every slot is kept, and against a turn that resumes a slot which is not its own."""
    engine = toy_engine(max_slots=2)
    params, plain = SamplingParams(max_new_tokens=4), EmptyDraft()
    first, second = (turn(engine, [index, 5], params, plain) for index in (1, 2))
    assert engine.is_idle
    others = [engine.add([index, 6], params, plain)[0] for index in (3, 4, 5)]
    run_all(engine, others)
    expected = [alone([index, 6], params) for index in (3, 4, 5)]
    assert [other.generated for other in others] == expected
    for session in (first, second):
        assert session.kept is not None
        assert not session.kept.is_open
        again = turn(engine, session.ids, params, plain, session.kept)
        assert again.metrics.reused_tokens == 0
        assert again.generated == alone(session.ids, params)
    assert engine.free_slots == 1, "a slot that nobody can resume any more is forgotten"


def test_the_oldest_kept_slot_gives_way_first() -> None:
    """Guards against the conversation just answered losing its slot to a single other request."""
    engine = toy_engine(max_slots=2)
    params, plain = SamplingParams(max_new_tokens=4), EmptyDraft()
    old, new = (turn(engine, [index, 5], params, plain).kept for index in (1, 2))
    turn(engine, PROMPT, params, plain)
    assert old is not None
    assert new is not None
    assert (old.is_open, new.is_open) == (False, True)


def test_another_method_starts_afresh() -> None:
    """Guards against a state handed to a proposer that did not make it."""
    engine, params = toy_engine(), SamplingParams(max_new_tokens=6)
    session = turn(engine, PROMPT, params, EmptyDraft())
    again = turn(engine, session.ids, params, named("lookup", VOCAB), session.kept)
    assert again.metrics.reused_tokens == 0
    assert again.generated == alone(session.ids, params)
    assert engine.free_slots == engine.target.max_slots - 1


@pytest.mark.parametrize("method", ["plain", "recycle:budget=8", "outpace:draft=none,budget=8"])
def test_turns_under_rejection_start_afresh(method: str) -> None:
    """Guards against turns before that have a say in what rejection says: what a method learned in them shapes the
    trees, and is there or not as the slot was kept or given up."""
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=3, verification="rejection")
    engine, proposer, ids = Engine(ToyTarget(VOCAB, seed=13)), named(method, VOCAB), list(PROMPT)
    kept = turn(engine, ids, SamplingParams(max_new_tokens=20), proposer).kept
    for _ in range(3):
        session = turn(engine, ids, params, proposer, kept)
        (fresh,) = decode(Engine(ToyTarget(VOCAB, seed=13)), [ids], [params], [named(method, VOCAB)])
        assert session.generated == fresh.generated
        assert (session.metrics.reused_tokens, session.kept) == (0, None)
        kept, ids = None, [*session.ids, 7]
    assert engine.free_slots == engine.target.max_slots


def test_a_refused_turn_leaves_the_kept_slot_alone() -> None:
    """Guards against a slot lost, or resumed by nobody, when the next prompt cannot be served."""
    engine, params, plain = toy_engine(max_length=20), SamplingParams(max_new_tokens=4), EmptyDraft()
    kept = turn(engine, PROMPT, params, plain).kept
    with pytest.raises(InvalidRequest, match="no room"):
        engine.add([1] * 20, params, plain, keep=True, resume=kept)
    with pytest.raises(InvalidRequest, match="n=2: a slot is kept for one sample"):
        engine.add(PROMPT, SamplingParams(n=2), plain, keep=True)
    assert kept is not None
    assert kept.is_open
    (empty,) = engine.add(PROMPT, SamplingParams(max_new_tokens=0), plain, keep=True, resume=kept)
    assert empty.kept is not None
    assert empty.kept.is_open
    assert engine.free_slots == engine.target.max_slots - 1


def test_a_failed_turn_keeps_nothing() -> None:
    """Guards against KV with infinities in it that poisons every later turn."""
    target = PoisonedTarget(PROMPT[0], len(PROMPT) + 2, float("nan"), vocab_size=VOCAB, seed=13)
    engine = Engine(target)
    session = turn(engine, PROMPT, SamplingParams(max_new_tokens=9), EmptyDraft())
    assert session.kept is None
    assert engine.free_slots == target.max_slots
    with pytest.raises(NonFiniteLogits):
        engine.result(session)
