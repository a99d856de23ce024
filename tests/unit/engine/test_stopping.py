"""Where an answer ends: ids, text, counts and reason must all end at the same token, wherever in a run it lies."""

import pytest

from outpace.core.events import Sample
from outpace.core.params import SamplingParams
from outpace.engine.session import Session, Stop, StopChecker
from outpace.testing import OracleDrafter
from tests.unit.engine.doubles import (
    PROMPT,
    CharDetokenizer,
    PairDetokenizer,
    character,
    distinct_answer,
    event_text,
    event_tokens,
    run,
    text_of,
    toy_engine,
)

LENGTH = 14
UNSAID = 1  # an id that the answer does not have
BUDGET = 8  # token 0 comes from the prompt, 1 to 8 are accepted drafts, 9 is the bonus, 10 is in the next round


@pytest.fixture(scope="module")
def answer() -> list[int]:
    return distinct_answer(LENGTH)


def oracle_run(answer: list[int], params: SamplingParams) -> tuple[Session, Sample]:
    """A request whose drafts are all right, so that rounds emit nine tokens at once."""
    engine = toy_engine(text=True)
    session = run(engine, PROMPT, params, OracleDrafter([PROMPT + answer], BUDGET))
    assert engine.is_idle
    return session, engine.result(session)


def assert_ends_together(
    session: Session, sample: Sample, answer: list[int], count: int, text: str, at_limit: bool = False
) -> None:
    """Everything a user sees stops at `count` tokens. At the limit nothing is drafted for the last place: a bonus."""
    assert sample.token_ids == tuple(answer[:count])
    assert sample.text == text
    assert event_tokens(session) == answer[:count]
    assert event_text(session) == text
    assert [event.finish_reason for event in session.events][-1] == sample.finish_reason
    metrics = sample.metrics
    steps = -(-(count - 1) // (BUDGET + 1))
    bonuses = steps if at_limit else (count - 1) // (BUDGET + 1)
    accepted = count - 1 - bonuses
    assert (metrics.new_tokens, metrics.steps, metrics.accepted) == (count, steps, accepted)
    assert sum(metrics.accepted_per_depth) == accepted
    assert metrics.accepted <= metrics.drafted


@pytest.mark.parametrize("offset", range(LENGTH - 1))
def test_eos_at_each_offset_of_an_accepted_run(answer: list[int], offset: int) -> None:
    """Guards against tokens accepted after an EOS: a really produced token is declared EOS at each place of the run."""
    params = SamplingParams(max_new_tokens=LENGTH, eos_token_ids=(answer[offset],))
    session, sample = oracle_run(answer, params)
    assert (sample.finish_reason, session.stop_reason) == ("stop", answer[offset])
    assert_ends_together(session, sample, answer, offset + 1, text_of(answer[:offset]))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("offset", range(2, LENGTH - 1))
def test_stop_string_completed_at_each_offset_of_an_accepted_run(answer: list[int], offset: int, size: int) -> None:
    """Guards against a stop string seen only at the end of a round, or only inside one token."""
    string = text_of(answer[offset + 1 - size : offset + 1])
    session, sample = oracle_run(answer, SamplingParams(max_new_tokens=LENGTH, stop=("never", string)))
    assert (sample.finish_reason, sample.stop_reason) == ("stop", string)
    assert_ends_together(session, sample, answer, offset + 1, text_of(answer[: offset + 1 - size]))


@pytest.mark.parametrize("limit", range(1, LENGTH))
def test_token_limit_at_each_offset_of_an_accepted_run(answer: list[int], limit: int) -> None:
    """Guards against runs that overshoot max_new_tokens, and against drafting tokens that can never be emitted."""
    session, sample = oracle_run(answer, SamplingParams(max_new_tokens=limit))
    assert (sample.finish_reason, sample.stop_reason) == ("length", None)
    assert_ends_together(session, sample, answer, limit, text_of(answer[:limit]), at_limit=True)
    assert sample.metrics.drafted == sample.metrics.accepted, "a right draft that is not emitted was drafted in vain"


def test_first_of_several_eos_ids_ends_the_answer(answer: list[int]) -> None:
    """Guards against models with several EOS ids (chat and text) of which only one is obeyed."""
    ids = (answer[7], answer[3], answer[11])
    session, sample = oracle_run(answer, SamplingParams(max_new_tokens=LENGTH, eos_token_ids=ids))
    assert sample.stop_reason == answer[3]
    assert_ends_together(session, sample, answer, 4, text_of(answer[:3]))


@pytest.mark.parametrize(("own", "count"), [(None, 3), ((), LENGTH), ((UNSAID,), LENGTH)])
def test_a_requests_eos_ids_replace_the_models(answer: list[int], own: tuple[int, ...] | None, count: int) -> None:
    """Guards against merging the two lists: a request with no EOS ids must run on to its limit."""
    assert UNSAID not in answer
    engine = toy_engine(eos_token_ids=(answer[2],))
    params = SamplingParams(max_new_tokens=LENGTH, eos_token_ids=own)
    session = run(engine, PROMPT, params, OracleDrafter([PROMPT + answer], BUDGET))
    assert len(session.generated) == count


@pytest.mark.parametrize("options", [{"eos_token_ids": (5,)}, {"stop": (character(5),)}], ids=["eos", "stop string"])
def test_a_stop_on_the_last_allowed_token_is_a_stop(options: dict[str, tuple[int | str, ...]]) -> None:
    """Guards against reporting "length" for an answer that ended by itself on its last token."""
    params = SamplingParams(max_new_tokens=3, **options)  # type: ignore[arg-type]
    checker = StopChecker(3, params.eos_token_ids or (), params.stop, CharDetokenizer())
    kept, text, stop = checker.take([1, 2, 5, 7])
    assert kept == [1, 2, 5]
    assert text == text_of([1, 2])
    assert stop is not None
    assert stop.finish_reason == "stop"


def taken(checker: StopChecker, text: str) -> tuple[list[str], Stop | None]:
    """What each character releases, and the end."""
    pieces = []
    for symbol in text:
        _, piece, stop = checker.take([ord(symbol) - ord("A")])
        pieces.append(piece)
        if stop is not None:
            return pieces, stop
    return pieces, None


@pytest.mark.parametrize(
    ("stop", "text", "pieces"),
    [
        ("XYZ", "AXYB", ["A", "", "", "XYB"]),  # looked like a beginning, was none
        ("ABAC", "ABABAC", ["", "", "", "AB", "", ""]),  # the beginning starts anew inside itself
        ("AAB", "AAAAB", ["", "", "A", "A", ""]),
        ("ZZ", "AZBZZ", ["A", "", "ZB", "", ""]),
    ],
)
def test_text_is_held_back_as_long_as_it_may_begin_a_stop_string(stop: str, text: str, pieces: list[str]) -> None:
    """Guards against streaming a part of a stop string, and against holding back more than needed or for ever."""
    checker = StopChecker(100, (), (stop,), CharDetokenizer())
    assert taken(checker, text)[0] == pieces
    assert checker.text == "".join(pieces)


def test_the_stop_string_that_begins_first_cuts_the_text() -> None:
    """Guards against cutting at whichever of two stop strings is listed first when one token completes both."""
    checker = StopChecker(100, (), ("CD", "BCD"), CharDetokenizer())
    pieces, stop = taken(checker, "ABCDE")
    assert "".join(pieces) == checker.text == "A"
    assert stop == Stop("stop", "BCD")


def test_a_stop_string_inside_the_text_of_one_token() -> None:
    """Guards against looking only at the end of the text: a token of many characters can contain a stop string."""

    class Words:
        def push(self, token: int) -> str:
            return ["one ", "two END three"][token]

        def flush(self) -> str:
            return ""

    checker = StopChecker(100, (), ("END",), Words())
    assert checker.take([0, 1, 0]) == ([0, 1], "one two ", Stop("stop", "END"))


@pytest.mark.parametrize("end", ["eos", "length", "cancelled"])
def test_held_text_is_released_when_the_answer_ends_otherwise(end: str) -> None:
    """Guards against losing the last characters: "X" could begin "XY" and is due when nothing more comes."""
    checker = StopChecker(2 if end == "length" else 9, (50,), ("XY",), CharDetokenizer())
    pieces, _ = taken(checker, "AX")
    if end == "eos":
        pieces.append(checker.take([50])[1])
    if end == "cancelled":
        pieces.append(checker.close())
    assert "".join(pieces) == checker.text == "AX"


def test_text_open_inside_a_character_is_flushed_at_the_end() -> None:
    """Guards against dropping what the detokenizer still holds, and against a flush that repeats it."""
    checker = StopChecker(5, (), (), PairDetokenizer())
    _, text, stop = checker.take([0, 1, 2, 3, 4, 5])
    assert stop == Stop("length")
    assert text == checker.text == text_of([0, 1, 2, 3, 4])
    assert checker.close() == ""
