"""Several readers of one engine: whoever steps it, everyone gets all of their own events, in order."""

from outpace.core.params import SamplingParams
from outpace.engine.engine import Engine
from outpace.engine.stream import TokenStream
from outpace.testing import AdversaryDrafter
from tests.unit.engine.doubles import VOCAB, run_all, text_of, toy_engine


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
    """Guards against a stream that steps the engine and throws away what the others gained in that step."""
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


def test_a_stream_that_nobody_reads_still_gets_everything() -> None:
    """Guards against events bound to the moment: another reader drives the engine to the end, this one reads later."""
    engine = toy_engine(text=True)
    idle, busy = open_stream(engine, [1, 2], 1), open_stream(engine, [2, 2], 2)
    read(busy)
    run_all(engine, [idle._session])
    assert engine.is_idle
    tokens, text = read(idle)
    assert (tokens, text) == read(open_stream(toy_engine(text=True), [1, 2], 1))
    assert text == text_of(tokens)


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
