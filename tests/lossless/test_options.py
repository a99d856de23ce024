"""Every sampling option on a target known exactly: a method may not change what an option makes of the answer."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from outpace.core.params import SamplingParams
from outpace.engine.session import Session
from outpace.sampling.noise import gumbel, noise_key
from outpace.testing import AdversaryDrafter, OracleDrafter, ToyTarget, assert_lossless, decode
from outpace.trees.proposer import EmptyDraft
from tests.lossless.test_toy import EOS, METHODS, PROMPTS, VOCAB, make_engine
from tests.pairwise import covering

OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.6},
    "repetition-reward": {"repetition_penalty": 0.7},
    "repetition-window": {"repetition_penalty": 1.6, "penalty_window": 4},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.6},
    "logit_bias": {"logit_bias": {0: 1.5, 7: -100.0, "9": 2.0}},
    "bad_words": {"bad_words_ids": [[5], [4, 6], [6, 4], [1, 0, 2], [0, 8], [8, 0]]},
    "min_new_tokens": {"min_new_tokens": 5},
    "ignore_eos": {"ignore_eos": True},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.5,
        "logit_bias": {2: 1.0},
        "bad_words_ids": [[5], [4, 6]],
        "min_new_tokens": 4,
        "logprobs": 2,
    },
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T=1": {"temperature": 1.0},
    "top_p": {"temperature": 1.3, "top_p": 0.7},
}
DRAFTERS = ["oracle", "adversary-0", "adversary-1", "adversary-2", "lookup", "recycle-template", "samd", "lookahead"]
DRAFTERS += ["outpace"]


def requests(**options: Any) -> list[SamplingParams]:
    """One request per prompt; limits that end some answers inside a draft."""
    return [
        SamplingParams.from_options(max_new_tokens=limit, seed=60 + index, **options)
        for index, limit in enumerate((30, 7, 40, 17, 6))
    ]


def plain(params: list[SamplingParams]) -> list[Session]:
    return decode(make_engine(), PROMPTS, params, [EmptyDraft()] * len(PROMPTS))


@pytest.mark.parametrize(("method", "option", "sampling"), covering(list(product(DRAFTERS, OPTIONS, SAMPLING))))
def test_an_option_means_the_same_with_every_method(method: str, option: str, sampling: str) -> None:
    """Guards against options applied along another path than the token's own, alone and in a batch."""
    params = requests(**OPTIONS[option], **SAMPLING[sampling])
    sessions = assert_lossless(make_engine, METHODS[method], PROMPTS, params)
    assert sum(session.metrics.drafted for session in sessions) > 0
    if method.startswith(("oracle", "adversary")):
        assert sum(session.metrics.accepted for session in sessions) > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_these_answers(option: str, sampling: str) -> None:
    """Guards against tests above of options that change nothing here, and so would pass if they were ignored."""
    without = plain(requests(**SAMPLING[sampling]))
    with_option = plain(requests(**OPTIONS[option], **SAMPLING[sampling]))
    assert [session.generated for session in with_option] != [session.generated for session in without]


@pytest.mark.parametrize("option", OPTIONS)
def test_rejection_of_greedy_requests_obeys_the_options(option: str) -> None:
    """Guards against options that matching obeys and rejection does not: greedy, the two must say the same."""
    params = requests(**OPTIONS[option])
    expected = plain(params)
    rejecting = requests(**OPTIONS[option], verification="rejection")
    drafter = AdversaryDrafter(VOCAB, [session.ids for session in expected], seed=6)
    sessions = decode(make_engine(), PROMPTS, rejecting, [drafter] * len(PROMPTS))
    assert [session.ids for session in sessions] == [session.ids for session in expected]
    assert sum(session.metrics.accepted for session in sessions) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_decoding_with_options_is_its_definition(temperature: float) -> None:
    """Guards against a wrong baseline, in which all methods would agree: the options again, in plain Python."""
    target = ToyTarget(VOCAB, sharpness=4.0)
    params = requests(**OPTIONS["all"], temperature=temperature)[0]
    prompt = PROMPTS[1]
    (session,) = decode(make_engine(), [prompt], [params], [EmptyDraft()])
    ids = list(prompt)
    while len(ids) < len(session.ids):
        said = Counter(ids[len(prompt) :])
        scores = target.logits(ids, len(ids)).tolist()
        scores[2] += 1.0
        for token in range(VOCAB):
            if token in ids:
                scores[token] = scores[token] / 1.2 if scores[token] > 0 else scores[token] * 1.2
            scores[token] -= 0.5 * said[token] - 0.4 * (said[token] > 0)
        scores[5] = -float("inf")
        if ids[-1] == 4:
            scores[6] = -float("inf")
        if len(ids) - len(prompt) < 4:
            scores[EOS[0]] = -float("inf")
        row = torch.tensor(scores)
        if temperature:
            row = torch.log_softmax(row, dim=-1) + gumbel([noise_key(60, 0, len(ids))], torch.arange(VOCAB))[0]
        ids.append(int(row.argmax()))
    assert session.ids == ids
    assert len(session.generated) >= 4


def test_a_minimum_holds_eos_back_also_where_eos_is_ignored() -> None:
    """Guards against the two options undoing each other: ignored EOS ids still wait for the minimum."""
    both = {"ignore_eos": True, "min_new_tokens": 6, "temperature": 1.0}
    sessions = assert_lossless(make_engine, OracleDrafter, PROMPTS, requests(**both))
    assert all(not set(EOS) & set(session.generated[:6]) for session in sessions)
    assert any(set(EOS) & set(session.generated[6:]) for session in sessions)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("method", DRAFTERS)
def test_log_probabilities_do_not_depend_on_the_method(method: str, sampling: str) -> None:
    """Guards against log-probabilities of other nodes, of rejected ones, or after the options; one per emitted id."""
    target = ToyTarget(VOCAB, sharpness=4.0)
    params = requests(logprobs=3, frequency_penalty=0.6, **SAMPLING[sampling])
    expected = plain(params)
    sessions = assert_lossless(make_engine, METHODS[method], PROMPTS, params)
    for want, got in zip(expected, sessions, strict=True):
        assert got.logprobs == want.logprobs
        assert [entry.token_id for entry in got.logprobs] == got.generated
        for place, entry in enumerate(got.logprobs):
            before = got.ids[: len(got.prompt_ids) + place]
            distribution = target.probs(before)
            assert entry.logprob == pytest.approx(float(distribution[entry.token_id].log()), abs=1e-5)
            assert len(entry.top) == 3
        reported = [entry for event in got.events for entry in event.logprobs or ()]
        assert reported == got.logprobs
        assert all(len(event.logprobs or ()) == len(event.tokens) for event in got.events)
