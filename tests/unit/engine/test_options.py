"""Options at the engine: refusals by name, EOS ignored or held back, no token left, log-probabilities."""

from typing import Any

import pytest
import torch

from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.engine.engine import Engine
from outpace.engine.margin import decision_margin
from outpace.engine.session import Session
from outpace.lib.errors import InvalidRequest
from outpace.sampling.noise import gumbel, noise_key
from outpace.sampling.warp import History, process, warp
from outpace.testing import AdversaryDrafter, OracleDrafter, ToyTarget, decode
from outpace.trees.proposer import EmptyDraft
from tests.unit.engine.doubles import PROMPT, VOCAB, character, distinct_answer, run, run_all, text_of, toy_engine

LENGTH = 14


@pytest.fixture(scope="module")
def answer() -> list[int]:
    return distinct_answer(LENGTH)


def oracle_run(answer: list[int], engine: Engine | None = None, **options: Any) -> Session:
    """One request whose drafts are right, so that rounds emit up to nine tokens at once."""
    params = SamplingParams.from_options(**({"max_new_tokens": LENGTH} | options))
    engine = engine or toy_engine(text=True)
    return run(engine, PROMPT, params, OracleDrafter([PROMPT + answer]))


@pytest.mark.parametrize("own", [True, False])
def test_ignored_eos_ids_are_tokens_like_any_other(answer: list[int], own: bool) -> None:
    """Guards against an answer that ends at an ignored EOS, of the model or of its own, or swallows it or its text."""
    eos = (answer[2], answer[6])
    engine = toy_engine(text=True) if own else toy_engine(text=True, eos_token_ids=eos)
    session = oracle_run(answer, engine, ignore_eos=True, eos_token_ids=eos if own else None)
    assert session.generated == answer
    assert (session.finish_reason, session.stop_reason) == ("length", None)
    assert engine.result(session).text == text_of(answer)


def test_stop_strings_end_an_answer_that_ignores_eos(answer: list[int]) -> None:
    """Guards against an option that switches off more than it says; a minimum holds no stop string back."""
    options: dict[str, Any] = {"eos_token_ids": (answer[1],), "stop": character(answer[4])}
    session = oracle_run(answer, ignore_eos=True, **options)
    assert (session.generated, session.stop_reason) == (answer[:5], character(answer[4]))
    held = oracle_run(answer, min_new_tokens=LENGTH, eos_token_ids=(0,), stop=character(answer[4]))
    assert (held.generated, held.stop_reason) == (answer[:5], character(answer[4]))


@pytest.mark.parametrize("minimum", [0, 3, 4, 9, 10, LENGTH])
def test_an_eos_comes_after_the_minimum_and_not_before(answer: list[int], minimum: int) -> None:
    """Guards against a minimum off by one, wherever in a round it is reached: EOS would be answer[3]."""
    eos = (answer[3],)
    engine = toy_engine(text=True, eos_token_ids=eos)
    session = oracle_run(answer, engine, min_new_tokens=minimum)
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
    (free,) = decode(toy_engine(), [PROMPT], [SamplingParams(**base)], [EmptyDraft()])
    last = free.ids[len(PROMPT) + after - 1]
    banned = [[*free.ids[len(PROMPT) + after - 2 : len(PROMPT) + after], token] for token in range(VOCAB)]
    params = SamplingParams.from_options(**base, bad_words_ids=banned)
    proposer: Proposer = AdversaryDrafter(VOCAB, [free.ids], truth=0.9, seed=2) if drafted else EmptyDraft()
    engine = toy_engine()
    (stuck,) = engine.add(PROMPT, params, proposer)
    (neighbour,) = engine.add([9, 9], healthy, EmptyDraft())
    run_all(engine, [stuck, neighbour])
    assert neighbour.generated == expected.generated
    if verification == "rejection" and drafted and stuck.finish_reason == "length":
        return  # another distribution-abiding answer, which never met the dead end
    assert stuck.finish_reason == "error"
    assert stuck.ids[-1] == last
    place = len(stuck.ids)
    if verification == "match" or not drafted:
        assert stuck.generated == free.generated[:after]
    with pytest.raises(InvalidRequest, match=f"leave no token to choose at position {place}"):
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
    engine = toy_engine(text=True)
    session = oracle_run(answer, engine, logprobs=count, **ENDS[end](answer))
    sample = engine.result(session)
    assert sample.logprobs is not None
    assert tuple(entry.token_id for entry in sample.logprobs) == sample.token_ids == tuple(session.generated)
    assert all(len(entry.top) == count for entry in sample.logprobs)
    assert all(entry.rank == 1 for entry in sample.logprobs), "greedy tokens are the most likely ones"
    events = [(event.tokens, event.logprobs) for event in session.events]
    assert all(tuple(entry.token_id for entry in logprobs or ()) == tokens for tokens, logprobs in events)
    assert all(logprobs is not None for _, logprobs in events)


def test_who_asks_for_no_log_probabilities_gets_none(answer: list[int]) -> None:
    """Guards against empty lists that look like answers without tokens, and against work nobody asked for."""
    engine = toy_engine(text=True)
    session = oracle_run(answer, engine)
    assert engine.result(session).logprobs is None
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
