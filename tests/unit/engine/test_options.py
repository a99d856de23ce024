"""Options of requests at the engine: where an answer ends, so that ids, text, counts and reason all end at the same
token, wherever in a run it lies; no token left; log-probabilities."""

from typing import Any

import pytest
import torch

from outpace.core.events import Sample
from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.engine.engine import Engine
from outpace.engine.margin import decision_margin
from outpace.engine.session import Session
from outpace.engine.stopping import Stop, StopChecker
from outpace.lib.errors import InvalidRequest
from outpace.sampling.noise import gumbel, noise_key
from outpace.sampling.warp import History, process, warp
from outpace.testing import AdversaryDrafter, OracleDrafter, ToyTarget, decode
from outpace.trees.proposer import EmptyDraft
from tests.unit.engine.doubles import (
    PROMPT,
    VOCAB,
    CharDetokenizer,
    PairDetokenizer,
    character,
    distinct_answer,
    event_text,
    event_tokens,
    run,
    run_all,
    text_of,
    toy_engine,
)

LENGTH = 14
UNSAID = 1  # an id that the answer does not have
BUDGET = 8  # token 0 comes from the prompt, 1 to 8 are accepted drafts, 9 is the bonus, 10 is in the next round


@pytest.fixture(scope="module")
def answer() -> list[int]:
    return distinct_answer(LENGTH)


def oracle_run(answer: list[int], engine: Engine | None = None, **options: Any) -> tuple[Session, Sample]:
    """A request whose drafts are all right, so that rounds emit nine tokens at once."""
    engine = engine or toy_engine(text=True)
    params = SamplingParams.from_options(**({"max_new_tokens": LENGTH} | options))
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
    """Guards against tokens accepted after an EOS, and against models with several EOS ids (chat and text) of which
    only one is obeyed: a really produced token is declared EOS at each place of the run."""
    session, sample = oracle_run(answer, eos_token_ids=(answer[-1], answer[offset], UNSAID))
    assert (sample.finish_reason, session.stop_reason) == ("stop", answer[offset])
    assert_ends_together(session, sample, answer, offset + 1, text_of(answer[:offset]))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("offset", range(2, LENGTH - 1))
def test_stop_string_completed_at_each_offset_of_an_accepted_run(answer: list[int], offset: int, size: int) -> None:
    """Guards against a stop string seen only at the end of a round, or only inside one token."""
    string = text_of(answer[offset + 1 - size : offset + 1])
    session, sample = oracle_run(answer, stop=("never", string))
    assert (sample.finish_reason, sample.stop_reason) == ("stop", string)
    assert_ends_together(session, sample, answer, offset + 1, text_of(answer[: offset + 1 - size]))


@pytest.mark.parametrize("limit", range(1, LENGTH))
def test_token_limit_at_each_offset_of_an_accepted_run(answer: list[int], limit: int) -> None:
    """Guards against runs that overshoot max_new_tokens, and against drafting tokens that can never be emitted."""
    session, sample = oracle_run(answer, max_new_tokens=limit)
    assert (sample.finish_reason, sample.stop_reason) == ("length", None)
    assert_ends_together(session, sample, answer, limit, text_of(answer[:limit]), at_limit=True)
    assert sample.metrics.drafted == sample.metrics.accepted, "a right draft that is not emitted was drafted in vain"


@pytest.mark.parametrize(("own", "count"), [(None, 3), ((), LENGTH), ((UNSAID,), LENGTH)])
def test_a_requests_eos_ids_replace_the_models(answer: list[int], own: tuple[int, ...] | None, count: int) -> None:
    """Guards against merging the two lists: a request with no EOS ids must run on to its limit."""
    assert UNSAID not in answer
    session, _ = oracle_run(answer, toy_engine(eos_token_ids=(answer[2],)), eos_token_ids=own)
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


@pytest.mark.parametrize("own", [True, False])
def test_ignored_eos_ids_are_tokens_like_any_other(answer: list[int], own: bool) -> None:
    """Guards against an answer that ends at an ignored EOS, of the model or of its own, or swallows it or its text."""
    eos = (answer[2], answer[6])
    engine = toy_engine(text=True) if own else toy_engine(text=True, eos_token_ids=eos)
    session, sample = oracle_run(answer, engine, ignore_eos=True, eos_token_ids=eos if own else None)
    assert session.generated == answer
    assert (session.finish_reason, session.stop_reason, sample.text) == ("length", None, text_of(answer))


def test_stop_strings_end_an_answer_that_ignores_eos(answer: list[int]) -> None:
    """Guards against an option that switches off more than it says; a minimum holds no stop string back."""
    stop = character(answer[4])
    ignoring, _ = oracle_run(answer, stop=stop, ignore_eos=True, eos_token_ids=(answer[1],))
    held, _ = oracle_run(answer, stop=stop, min_new_tokens=LENGTH, eos_token_ids=(0,))
    for session in (ignoring, held):
        assert (session.generated, session.stop_reason) == (answer[:5], stop)


@pytest.mark.parametrize("minimum", [0, 3, 4, 9, 10, LENGTH])
def test_an_eos_comes_after_the_minimum_and_not_before(answer: list[int], minimum: int) -> None:
    """Guards against a minimum off by one, wherever in a round it is reached: EOS would be answer[3]."""
    session, _ = oracle_run(answer, toy_engine(text=True, eos_token_ids=(answer[3],)), min_new_tokens=minimum)
    if minimum <= 3:
        assert (session.generated, session.stop_reason) == (answer[:4], answer[3])
    else:
        assert session.generated[:3] == answer[:3]
        assert len(session.generated) >= minimum
        assert answer[3] not in session.generated[:minimum]


@pytest.mark.parametrize(("temperature", "verification"), [(0.0, "match"), (0.9, "match"), (0.9, "rejection")])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("after", [0, 4])
def test_a_request_without_a_token_left_ends_alone(
    temperature: float, verification: str, drafted: bool, after: int
) -> None:
    """Guards against NaN drawn as a token, a banned token emitted, and a neighbour taken down with the request."""
    healthy = SamplingParams(max_new_tokens=12)
    (expected,) = decode(toy_engine(), [[9, 9]], [healthy], [EmptyDraft()])
    base: dict[str, Any] = {"max_new_tokens": 10, "temperature": temperature, "seed": 3, "top_p": 0.9}
    base |= {"verification": verification}
    (answer,) = decode(toy_engine(), [PROMPT], [SamplingParams(**base)], [EmptyDraft()])

    def proposer() -> Proposer:
        return AdversaryDrafter(VOCAB, [answer.ids], truth=0.9, seed=2) if drafted else EmptyDraft()

    # Rejection gives another answer with drafts than without: the dead end lies on the one that it gives.
    (free,) = decode(toy_engine(), [PROMPT], [SamplingParams(**base)], [proposer()])
    last = free.ids[len(PROMPT) + after - 1]
    banned = [[*free.ids[len(PROMPT) + after - 2 : len(PROMPT) + after], token] for token in range(VOCAB)]
    params = SamplingParams.from_options(**base, bad_words_ids=banned)
    engine = toy_engine()
    (stuck,) = engine.add(PROMPT, params, proposer())
    (neighbour,) = engine.add([9, 9], healthy, EmptyDraft())
    run_all(engine, [stuck, neighbour])
    assert neighbour.generated == expected.generated
    assert stuck.finish_reason == "error"
    assert stuck.ids[-1] == last
    assert stuck.generated == free.generated[:after]
    with pytest.raises(InvalidRequest, match=f"leave no token to choose at position {len(stuck.ids)}"):
        engine.result(stuck)
    assert engine.free_slots == engine.target.max_slots


ENDS: dict[str, Any] = {
    "eos-first": lambda answer: {"eos_token_ids": (answer[0],)},
    "eos-in-a-round": lambda answer: {"eos_token_ids": (answer[5],)},
    "stop-in-a-round": lambda answer: {"stop": text_of(answer[4:6])},
    "length-in-a-round": lambda answer: {"max_new_tokens": 7},
    "one-token": lambda answer: {"max_new_tokens": 1},
    "no-token": lambda answer: {"max_new_tokens": 0},
    "several-rounds": lambda answer: {},
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("count", [0, 2])
def test_there_are_as_many_log_probabilities_as_ids(answer: list[int], end: str, count: int) -> None:
    """Guards against entries of tokens that a stop cut off in the middle of a round, and against missing ones."""
    session, sample = oracle_run(answer, logprobs=count, **ENDS[end](answer))
    assert sample.logprobs is not None
    assert tuple(entry.token_id for entry in sample.logprobs) == sample.token_ids == tuple(session.generated)
    assert all(len(entry.top) == count for entry in sample.logprobs)
    assert all(entry.rank == 1 for entry in sample.logprobs), "greedy tokens are the most likely ones"
    events = [(event.tokens, event.logprobs) for event in session.events]
    assert all(tuple(entry.token_id for entry in logprobs or ()) == tokens for tokens, logprobs in events)
    assert all(logprobs is not None for _, logprobs in events)


def test_who_asks_for_no_log_probabilities_gets_none(answer: list[int]) -> None:
    """Guards against empty lists that look like answers without tokens, and against work nobody asked for."""
    session, sample = oracle_run(answer)
    assert sample.logprobs is None
    assert all(event.logprobs is None for event in session.events)
    assert session.logprobs == []


def test_a_cancelled_request_keeps_the_log_probabilities_it_has() -> None:
    """Guards against entries repeated or lost by the event that announces the end."""
    engine = toy_engine()
    (session,) = engine.add(PROMPT, SamplingParams(logprobs=1), EmptyDraft())
    for _ in range(4):
        engine.step()
    engine.cancel(session)
    reported = [entry.token_id for event in session.events for entry in event.logprobs or ()]
    assert reported == session.generated != []
    assert session.events[-1].logprobs == ()
    assert len(engine.result(session).logprobs or ()) == len(session.generated)


MARGINS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {2: 1.0}},
    "minimum": {"min_new_tokens": 3},
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("option", MARGINS)
def test_margins_are_taken_from_what_was_decided_on(option: str, temperature: float) -> None:
    """Guards against a certificate that explains a wrong token by close raw logits, or by another history."""
    target = ToyTarget(8, seed=5, eos_token_ids=(6,))
    params = SamplingParams.from_options(temperature=temperature, seed=4, **MARGINS[option])
    prompt, said = [1, 2, 3], [4, 1]
    ids = prompt + said
    raw = target.logits(ids, len(ids))[None]
    history = History(prompt, said, (6,))
    if temperature:
        scores = warp(raw, params, [history])[0] + gumbel([noise_key(4, 0, len(ids))], torch.arange(8))[0]
    else:
        scores = process(raw, params, [history])[0]
    margin = decision_margin(target, ids, params, (1, 2), len(prompt), slot=1)
    assert margin.between == pytest.approx(abs(float(scores[1] - scores[2])))
    best = scores.topk(2).values
    assert margin.top2 == pytest.approx(float(best[0] - best[1]))
    banned = decision_margin(target, ids, params, (1, 6), len(prompt), slot=1)
    assert (banned.between is None) == (option == "minimum")
    as_prompt = decision_margin(target, ids, params, (1, 2), len(ids), slot=1)
    assert (as_prompt == margin) == (option != "penalties"), "what is prompt and what is answer matters to presence"


def test_the_margin_of_a_draw_needs_its_seed() -> None:
    """Guards against a margin under the noise of seed 0, silently, for an answer whose seed the engine chose."""
    target, ids = ToyTarget(8, seed=5), [1, 2, 3]
    with pytest.raises(InvalidRequest, match="seed=None"):
        decision_margin(target, ids, SamplingParams(temperature=0.8), (1, 2), len(ids), slot=1)


def test_a_draw_under_rejection_has_no_margin() -> None:
    """Guards against a margin under the keyed noise of the target's draws, silently, for an answer that other noise and
    its drafts have decided. Greedy, the two rules are one."""
    target, ids = ToyTarget(8, seed=5), [1, 2, 3]
    rejecting = SamplingParams(temperature=0.8, seed=4, verification="rejection")
    with pytest.raises(InvalidRequest, match="verification='rejection'"):
        decision_margin(target, ids, rejecting, (1, 2), len(ids), slot=1)
    greedy = [SamplingParams(verification=rule) for rule in ("match", "rejection")]
    first, second = (decision_margin(target, ids, params, (1, 2), len(ids), slot=1) for params in greedy)
    assert first == second
