"""Common beginnings of prompts: computed once, whoever has them, and no token changes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from outpace.cache.slots import SlotKV
from outpace.core.params import SamplingParams
from outpace.core.protocols import Chunk, ChunkOutput, NodeOutputs
from outpace.engine import admission
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.sampling.noise import noise_key, uniform
from outpace.testing import ToyTarget, decode
from outpace.trees.proposer import EmptyDraft
from tests.interrupted.world import METHODS, World
from tests.unit.engine.doubles import failing, named, run_all
from tests.unit.models.tiny import random_ids, tiny_config, tiny_target

VOCAB = 23
CHUNK = 16
SYSTEM, REST = random_ids(40, 1, VOCAB), (5, 6, 7)
TOYS = ("plain", "lookup:budget=3", "recycle:budget=8", "samd:budget=8,min_match=1", "lookahead:budget=15")
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "top_p": 0.9, "seed": 3}}
UNION, PRIVATE = "outpace:draft=none,budget=9", "recycle:budget=8,matrix=private"


class Mindful(ToyTarget):
    """A toy whose distribution depends on all ids before, so that no row of a slot can be wrong unnoticed.

    Attributes:
        written: prompt tokens that were computed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"vocab_size": VOCAB, "max_length": 192} | options))
        self.written = 0

    def logits(self, ids: Sequence[int], position: int) -> Tensor:
        assert len(ids) == position
        key = noise_key(hash(tuple(ids)) % 2**31, 5, position)
        return uniform([key], torch.arange(self.vocab_size))[0] * 6

    def run_pass(self, chunks: Sequence[Chunk], *trees: Any) -> tuple[list[ChunkOutput], list[NodeOutputs]]:
        self.written += sum(len(chunk.tokens) for chunk in chunks)
        return super().run_pass(chunks, *trees)


def mindful(**options: Any) -> Engine:
    return Engine(Mindful(**options), prefill_chunk=CHUNK)


def written(engine: Engine) -> int:
    assert isinstance(engine.target, Mindful)
    return engine.target.written


def ask(engine: Engine, prompt: Sequence[int], proposer: Any, **options: Any) -> Session:
    (session,) = engine.add(prompt, SamplingParams(**({"max_new_tokens": 12} | options)), proposer)
    return session


def assert_plain(session: Session) -> None:
    """A session says what plain decoding says, alone, in an engine that shares nothing."""
    engine = mindful()
    engine.shares_prefixes = False
    group = engine.add(session.prompt_ids, session.params, EmptyDraft())
    run_all(engine, group)
    want = group[session.sample_index].generated
    assert session.generated == want[: len(session.generated) if session.finish_reason == "cancelled" else None]


@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("method", METHODS)
def test_a_shared_beginning_changes_neither_tokens_nor_trees(method: str, options: dict[str, Any]) -> None:
    """Guards against rows that are wrong in the slot they are copied to, in the target or in a drafter, and against a
    drafter that does not know the beginning and drafts worse for it."""
    prompts = [SYSTEM + random_ids(9, 2, VOCAB), SYSTEM + random_ids(5, 3, VOCAB), SYSTEM + random_ids(5, 3, VOCAB)]
    params = SamplingParams(max_new_tokens=10, **options)
    fresh = [Engine(tiny_target(tiny_config("llama"))) for _ in prompts]
    answers = [decode(one, [prompt], [params], [EmptyDraft()])[0] for one, prompt in zip(fresh, prompts, strict=True)]

    def play(shares: bool) -> tuple[list[Session], list[list[list[int]]]]:
        world, trees = World(), list[list[list[int]]]()
        world._answers = [answer.ids for answer in answers]
        world.engine.shares_prefixes = shares
        run_pass = world.target.run_pass

        def recorded(chunks: Any, slots: Any, shown: Any, taps: Any = ()) -> Any:
            if shown:
                trees.append([tree.tokens.tolist() for tree in shown])
            return run_pass(chunks, slots, shown, taps)

        world.target.run_pass = recorded  # type: ignore[method-assign, assignment]
        proposer, sessions = world.proposer(method), list[Session]()
        for prompt in prompts:
            sessions += decode(world.engine, [prompt], [params], [proposer])
        return sessions, trees

    sessions, trees = play(shares=True)
    assert [session.generated for session in sessions] == [answer.generated for answer in answers]
    needs = sessions[0].proposer.needs
    if not needs.top_k:  # else rows of a shared matrix are what was last seen, the answer before included
        assert trees == play(shares=False)[1]
    reads_ahead = bool(needs.taps)
    expected = [0, 0, 0] if method == "private" else [0, 40 - reads_ahead, 44 - reads_ahead]
    assert [session.metrics.reused_tokens for session in sessions] == expected


@pytest.mark.parametrize("method", [*TOYS, UNION, PRIVATE])
def test_requests_with_the_same_beginning_in_one_step_write_it_once(method: str) -> None:
    """Guards against a system prompt that is computed by every request of a burst, and against one that waits longer
    than it would have taken to write its own."""
    engine, proposer = mindful(), named(method, VOCAB)
    sessions = [ask(engine, [*SYSTEM, number, 7], proposer) for number in range(4)]
    shares = proposer.can_fork(own=True)
    for _ in range(4):
        engine.step()
    assert all(session.generated for session in sessions), "3 steps for 42 tokens, and one more for those that waited"
    run_all(engine, sessions)
    for session in sessions:
        assert_plain(session)
    assert written(engine) == (42 + 3 * 10 if shares else 4 * 42), "what is left after two steps is not worth a third"
    assert [session.metrics.reused_tokens for session in sessions] == [0, *[32 if shares else 0] * 3]


def test_prompts_are_not_compared_again_while_one_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against requests that wait for a prompt of 30,000 tokens and compare it with theirs in every step, a
    millisecond or two for each of them."""
    engine, plain, prompt, compared = mindful(), EmptyDraft(), random_ids(150, 7, VOCAB), list[int]()
    compare = admission._shared

    def counted(*given: Any) -> int:
        compared.append(len(given[1]))
        return compare(*given)

    monkeypatch.setattr(admission, "_shared", counted)
    sessions = [ask(engine, [*prompt, number], plain) for number in range(3)]
    run_all(engine, sessions)
    assert [session.metrics.reused_tokens for session in sessions] == [0, 144, 144]
    assert len(compared) <= 12, "a few at the beginning and at the end for each that waits"
    for session in sessions:
        assert_plain(session)


@pytest.mark.parametrize("method", [*TOYS, UNION])
def test_samples_of_one_prompt_compute_it_once(method: str) -> None:
    """Guards against n prompts computed for n samples, and against samples that say what others say."""
    engine, prompt = mindful(), [*SYSTEM, *SYSTEM[:25]]
    sessions = engine.add(prompt, SamplingParams(max_new_tokens=9, n=3, temperature=1.0, seed=2), named(method, VOCAB))
    run_all(engine, sessions)
    assert written(engine) == len(prompt) + 2
    assert len({tuple(session.generated) for session in sessions}) == 3
    for session in sessions:
        assert_plain(session)


def test_methods_share_what_they_can() -> None:
    """Guards against a state handed to a method that did not make it, and keys and values that are left unused."""
    engine, recycle = mindful(), named("recycle:budget=8", VOCAB)
    reused = list[int]()
    for proposer in (recycle, named("lookup", VOCAB), EmptyDraft(), named("outpace:draft=none", VOCAB), recycle):
        session = ask(engine, [*SYSTEM, len(reused), 1], proposer)
        run_all(engine, [session])
        assert_plain(session)
        reused.append(session.metrics.reused_tokens)
    assert reused == [0, 40, 40, 0, 40], "the union wants to see the prompt, and no other request of it was there"


def test_a_private_matrix_ends_with_its_request() -> None:
    """Guards against megabytes that a cached slot holds for a state that no request may be forked from."""
    engine = mindful()
    session = ask(engine, SYSTEM, named(PRIVATE, VOCAB))
    engine.step()
    matrix = ref(session.state.of_source)
    run_all(engine, [session])
    assert matrix() is None
    other = ask(engine, [*SYSTEM, 5], EmptyDraft())
    run_all(engine, [other])
    assert other.metrics.reused_tokens == 40, "its rows are shared as before"


def begun(engine: Engine, proposer: Any, steps: int, is_cancelled: bool = False, rest: Sequence[int] = REST) -> Session:
    """A request after some steps, of which its prompt takes three or more."""
    session = ask(engine, [*SYSTEM, *rest], proposer)
    for _ in range(steps):
        engine.step()
    assert bool(session.generated) == (steps > 3)
    if is_cancelled:
        engine.cancel(session)
    return session


DONORS: dict[str, Callable[[Engine, Any], Session]] = {
    "ended": partial(begun, steps=20),
    "running": partial(begun, steps=5),
    "in its prompt": partial(begun, steps=1),
    "cancelled in its prompt": partial(begun, steps=3, is_cancelled=True, rest=SYSTEM),
    "cancelled": partial(begun, steps=5, is_cancelled=True),
}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("method", ["plain", "recycle:budget=8", UNION])
@pytest.mark.parametrize("donor", DONORS)
def test_a_beginning_is_taken_from_the_slot_that_holds_it(donor: str, method: str, slots: int) -> None:
    """Guards against rows taken from a slot that holds them no more or not yet, and against one that loses its own."""
    engine, proposer = mindful(max_slots=slots), named(method, VOCAB)
    before = DONORS[donor](engine, proposer)
    sessions = [ask(engine, [*SYSTEM, 5, 6, 8, number], proposer) for number in range(2)]
    run_all(engine, sessions)
    behind = 40 if donor == "cancelled in its prompt" else 42
    behind = 32 if donor == "in its prompt" and slots == 3 else behind  # the rest is not worth another step
    assert [session.metrics.reused_tokens for session in sessions] == [behind, 43 if slots == 1 else behind]
    for session in [*sessions, before]:
        run_all(engine, [session])
        assert_plain(session)


@pytest.mark.parametrize("method", ["plain", "recycle:budget=8", "outpace:draft=none,budget=8"])
def test_rejection_neither_takes_nor_gives(method: str) -> None:
    """Guards against an answer under rejection that depends on who asked before: what a method learned of a shared
    beginning has a say in it, and a request's own matrix is nobody else's."""
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, verification="rejection")
    engine, proposer = mindful(), named(method, VOCAB)
    run_all(engine, [ask(engine, [*SYSTEM, 5], proposer)])
    sessions = [engine.add([*SYSTEM, 5, 6], params, proposer)[0] for _ in range(2)]
    run_all(engine, sessions)
    (fresh,) = decode(mindful(), [[*SYSTEM, 5, 6]], [params], [named(method, VOCAB)])
    for session in sessions:
        assert session.metrics.reused_tokens == 0
        assert session.generated == fresh.generated
    engine.forget_prefixes()
    other = ask(engine, [*SYSTEM, 5, 6], proposer)
    run_all(engine, [other])
    assert other.metrics.reused_tokens == 0


def test_who_waits_for_a_beginning_keeps_its_place() -> None:
    """Guards against a request that is overtaken by later ones while it waits for another's prompt."""
    engine, plain = mindful(max_slots=2), EmptyDraft()
    first, second = (ask(engine, [*SYSTEM, number], plain) for number in (1, 2))
    later = [ask(engine, [number, 3], plain, max_new_tokens=100) for number in (3, 4)]
    run_all(engine, [first])
    assert second.generated
    run_all(engine, [second, *later])
    for session in (first, second, *later):
        assert_plain(session)


def test_nobody_waits_for_a_request_that_fails() -> None:
    """Guards against a request that waits for ever for the prompt of another one, whose every step fails."""
    engine, fault = mindful(), failing(prefill=RuntimeError)
    assert fault.can_fork(own=False)
    broken, sound = ask(engine, [*SYSTEM, 1], fault), ask(engine, [*SYSTEM, 2], EmptyDraft())
    for _ in range(20):
        if sound.has_ended:
            break
        engine.run_until(lambda: bool(sound.has_ended), [sound])
    assert_plain(sound)
    engine.cancel(broken)


def test_what_was_left_longest_ago_gives_way_first() -> None:
    """Guards against the beginning that everybody uses lost to a few requests that nobody begins like again."""
    engine, plain = mindful(max_slots=3), EmptyDraft()
    for number in range(6):
        other = ask(engine, random_ids(40, 100 + number, VOCAB), plain)
        run_all(engine, [other])
        session = ask(engine, [*SYSTEM, number], plain)
        run_all(engine, [session])
        assert session.metrics.reused_tokens == (40 if number else 0)


def test_a_conversation_without_a_slot_of_its_own_goes_on_where_it_was() -> None:
    """Guards against turns of a conversation that are copied from slot to slot until nothing else is left."""
    engine, plain, ids = mindful(max_slots=3), EmptyDraft(), [*SYSTEM]
    other = ask(engine, random_ids(40, 9, VOCAB), plain)
    run_all(engine, [other])
    slots = set()
    for turn in range(4):
        session = ask(engine, ids, plain)
        engine.step()
        slots.add(session.slot)
        run_all(engine, [session])
        assert session.metrics.reused_tokens == (len(ids) - 2 if turn else 0)
        ids = [*session.ids, turn]
    again = ask(engine, other.prompt_ids, plain)
    run_all(engine, [again])
    assert len(slots) == 1
    assert again.metrics.reused_tokens == 39


def test_sharing_can_be_switched_off_and_forgotten() -> None:
    """Guards against measurements of one method that find the prompts of another written, and against work between
    steps that is done in a slot whose content is shared afterwards."""

    def reused(engine: Engine, count: int = 1) -> list[int]:
        sessions = [ask(engine, [*SYSTEM, 3], EmptyDraft(), max_new_tokens=2) for _ in range(count)]
        run_all(engine, sessions)
        return [session.metrics.reused_tokens for session in sessions]

    engine = mindful(max_slots=2)
    assert reused(engine) == [0]
    assert reused(engine) == [40]
    engine.forget_prefixes()
    assert reused(engine) == [0]
    engine.shares_prefixes = False
    assert reused(engine, 2) == [0, 0]
    engine.shares_prefixes = True
    assert reused(engine) == [0], "nothing was remembered meanwhile"
    engine = mindful(max_slots=1)
    assert reused(engine) == [0]

    engine.with_spare_slot(lambda slot: engine.target.rewind_slot(slot, 0))
    assert reused(engine) == [0]


@pytest.mark.parametrize("length", [0, 3, 5, 9])
def test_a_slot_copies_committed_rows_and_no_others(length: int) -> None:
    """Guards against scratch rows taken for committed ones, and against a slot that loses rows to itself."""
    kv = SlotKV(2, 3, 2, 12, 4, torch.float32, torch.float64, torch.device("cpu"))
    for rows_of in (kv.keys, kv.values):
        rows_of.copy_(torch.randn(rows_of.shape, generator=torch.Generator().manual_seed(1)))
    keys, values = kv.keys.clone(), kv.values.clone()
    kv.lengths = [5, 7, 1]
    kv.copy(0, 1, length)
    held = min(length, 5)
    assert kv.lengths == [5, held, 1]
    for rows_of, before in ((kv.keys, keys), (kv.values, values)):
        assert torch.equal(rows_of[:, 1, :, :held], before[:, 0, :, :held])
        assert torch.equal(rows_of[:, [0, 2]], before[:, [0, 2]])
    kv.copy(0, 0, length)
    assert kv.lengths == [held, held, 1]
    assert torch.equal(kv.keys[:, 0], keys[:, 0])
