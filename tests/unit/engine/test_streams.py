"""Streams of one engine: every reader gets all of its own, and what nobody waits for ends and leaves nothing."""

import pytest

from outpace.core.params import MAX_SAMPLES, SamplingParams
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.engine.stream import TokenStream
from outpace.lib.errors import StateLost
from outpace.lib.quick import without_collection
from outpace.testing import AdversaryDrafter
from outpace.trees.proposer import EmptyDraft
from tests.interrupted.injector import Injector, Interrupt, Shot
from tests.unit.engine.doubles import PROMPT, VOCAB, failing, toy_engine

PLAIN = EmptyDraft()


def open_stream(engine: Engine, prompt: list[int], seed: int, count: int = 25) -> TokenStream:
    params = SamplingParams(max_new_tokens=count, temperature=0.9, seed=seed)
    (session,) = engine.add(prompt, params, AdversaryDrafter(VOCAB, seed=seed))
    return TokenStream(engine, session)


def read(stream: TokenStream) -> tuple[list[int], str]:
    tokens: list[int] = []
    text = ""
    for event in stream:
        tokens += event.tokens
        text += event.text
    return tokens, text


def test_two_interleaved_streams_lose_no_events() -> None:
    """Guards against a stream that steps the engine and throws away what the others gained in that step, and against
    events bound to the moment: the slower reader reads its last ones when both answers have ended."""
    expected = [read(open_stream(toy_engine(text=True), [seed, 2], seed)) for seed in (1, 2)]
    engine = toy_engine(text=True)
    streams = [open_stream(engine, [seed, 2], seed) for seed in (1, 2)]
    tokens: list[list[int]] = [[], []]
    texts = ["", ""]
    for turn in range(200):
        place = 0 if turn % 3 else 1  # one reader is twice as fast
        for event in streams[place]:
            tokens[place] += event.tokens
            texts[place] += event.text
            break
    assert [(tokens[place], texts[place]) for place in (0, 1)] == expected
    for stream, (ids, text) in zip(streams, expected, strict=True):
        assert stream.result is not None
        assert (stream.result.token_ids, stream.result.text) == (tuple(ids), text)


def test_closing_a_stream_cancels_its_request_only() -> None:
    """Guards against a reader that leaves and takes its slot, or its neighbour, with it."""
    engine = toy_engine(text=True, max_slots=2)
    leaving, staying = open_stream(engine, [1, 2], 1), open_stream(engine, [2, 2], 2)
    with leaving:
        first = next(leaving)
    assert leaving.result is not None
    assert leaving.result.finish_reason == "cancelled"
    assert leaving.result.token_ids[: len(first.tokens)] == first.tokens
    assert read(staying) == read(open_stream(toy_engine(text=True), [2, 2], 2))
    assert engine.is_idle
    leaving.close()
    assert leaving.result.finish_reason == "cancelled"


def opened(engine: Engine, n: int = 1, tokens: int = 50) -> list[Session]:
    return engine.add(PROMPT, SamplingParams(max_new_tokens=tokens, n=n), PLAIN)


def noted(engine: Engine) -> int:
    """Requests that the engine has taken note of, those that have ended and those that are gone included."""
    return len(engine._roster._sessions)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_stream_that_is_dropped_frees_its_slot(steps: int) -> None:
    """Guards against streams that run on although nobody can read them, also those that nobody has begun to read."""
    engine = toy_engine(text=True, max_slots=2)
    (session,) = opened(engine)
    stream = TokenStream(engine, session)
    del session
    for _ in range(steps):
        next(stream)
    del stream
    assert engine.is_idle
    assert engine.free_slots == 2
    engine.step()
    assert noted(engine) == 0


def test_who_comes_and_goes_without_a_step_is_forgotten() -> None:
    """Guards against a list of requests that grows as long as no step is made."""
    engine = toy_engine()
    for _ in range(2000):
        opened(engine)
    assert noted(engine) < 200


def test_samples_that_wait_are_light() -> None:
    """Guards against a copy of the prompt for each of thousands of samples, of which few run at a time."""
    engine = toy_engine(text=True, max_slots=3)
    sessions = opened(engine, n=MAX_SAMPLES, tokens=4)
    for _ in range(3):
        engine.step()
    made = [session for session in sessions if {"ids", "stopper"} & vars(session).keys()]
    assert len(made) == 3
    assert [session.length for session in sessions[:4]] == [len(PROMPT) + 3] * 3 + [len(PROMPT)]
    assert sessions[-1].ids == PROMPT
    del sessions, made
    assert engine.is_idle


def test_an_interrupt_while_samples_are_made_leaves_none() -> None:
    """Guards against orphans: samples that run on because the traceback of Ctrl-C holds them, as in a terminal, which
    keeps the last one."""
    dry, engine = Injector(), toy_engine()
    with dry:
        opened(engine, n=40)
    cut = [Shot(line, count, Interrupt) for line, count in sorted(dry.seen.items()) if "engine" in line[0]]
    assert len(cut) > 25
    for shot in cut:
        engine, injector = toy_engine(), Injector()
        injector.arm(shot)
        held: BaseException | None = None
        try:
            with injector:
                opened(engine, n=40)
        except Interrupt as error:
            held = error
        assert held is not None, shot
        engine.step()
        assert engine.is_idle, shot
        assert engine.free_slots == engine.target.max_slots


def test_a_lost_request_keeps_no_other_alive() -> None:
    """Guards against a request that keeps others running after they were dropped: by the frames in the traceback of
    what cut its step short, and in those of whoever asked for its answer."""
    with without_collection():
        engine = toy_engine(max_slots=2)
        broken = failing(observe=KeyboardInterrupt, rewind=RuntimeError)  # in a step, and in rolling it back
        (lost,) = engine.add(PROMPT, SamplingParams(max_new_tokens=9), broken)
        (other,) = opened(engine)
        stream = TokenStream(engine, other)
        engine.step()
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.step()

        def asks(neighbour: TokenStream) -> None:
            with pytest.raises(StateLost, match="could not be restored"):
                engine.result(lost)

        asks(stream)
        del other, stream
        assert engine.is_idle
        assert engine.free_slots == 2
        assert isinstance(lost.error, StateLost)
        assert isinstance(lost.error.__cause__, RuntimeError)
