"""Penalties, biases and bans: by definition, by hand, and the histories that they need."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.core.params import SamplingParams
from outpace.core.protocols import SamplingContext
from outpace.sampling.warp import History, cutoff_distance, history_of, process, warp

VOCAB = 12
INFINITY = float("inf")
ROW = [2.0, -2.0, 0.0, 1.0, -1.0, 4.0]

EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.7,
    "presence_penalty": 0.4,
    "frequency_penalty": -0.3,
    "logit_bias": {1: 3.0, 4: -2.0, 5: 100},
    "bad_words_ids": [[2], [3, 6], [7, 8, 9]],
    "min_new_tokens": 3,
}


def test_without_options_the_input_comes_back_itself() -> None:
    """Guards against work on requests that asked for nothing, and options that write into the model's logits."""
    logits = torch.tensor([ROW])
    params = SamplingParams(temperature=0.7, top_k=2, ignore_eos=True, logprobs=3)
    assert not params.has_processors
    assert process(logits, params, []) is logits
    assert torch.equal(warp(logits, params), warp(logits, params, [History([], [])]))
    process(logits, SamplingParams.from_options(**EVERYTHING | {"min_new_tokens": 1}), [History([1], [], (0,))])
    assert logits.tolist() == [ROW], "the target's logits must stay what they were"


def by_definition(row: list[float], params: SamplingParams, history: History) -> list[float]:
    """The same options again, token by token, in plain Python."""
    said, everything = Counter(history.output_ids), [*history.prompt_ids, *history.output_ids]
    window = len(everything) if params.penalty_window is None else params.penalty_window
    bias = dict(params.logit_bias)
    values = []
    for token, raw in enumerate(row):
        value = raw + bias.get(token, 0.0)
        if token in everything[max(0, len(everything) - window) :]:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * said[token] + params.presence_penalty * bool(said[token])
        too_early = token in history.eos_token_ids and len(history.output_ids) < params.min_new_tokens
        told = [*everything, token]
        is_bad = any(told[-len(sequence) :] == list(sequence) for sequence in params.bad_words_ids)
        values.append(-INFINITY if too_early or is_bad else value)
    return values


IDS = st.integers(0, 5)


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(IDS, min_size=1, max_size=6),
    output=st.lists(IDS, max_size=8),
    bad=st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=4),
    bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=4),
    numbers=st.tuples(st.floats(0.1, 10), st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 8)),
    window=st.none() | st.integers(1, 16),
)
def test_all_options_together_are_their_definition(
    prompt: list[int], output: list[int], bad: list[list[int]], bias: dict[int, float], numbers: Any, window: int | None
) -> None:
    """Guards against options that are right alone and wrong together, or in a row next to another history; and against
    a minimum that counts the prompt, or EOS ids outside the vocabulary that index from its end."""
    repetition, presence, frequency, minimum = numbers
    params = SamplingParams.from_options(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency,
        logit_bias=bias, bad_words_ids=bad, min_new_tokens=minimum,
        penalty_window=None if repetition == 1 else window,
    )  # fmt: skip
    ends = (4, 0, -1, 99)
    rows, histories = [ROW, ROW[::-1]], [History(prompt, output, ends), History(prompt, [], ends)]
    actual = process(torch.tensor(rows, dtype=torch.float64), params, histories)
    expected = [by_definition(row, params, history) for row, history in zip(rows, histories, strict=True)]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_a_history_follows_the_path() -> None:
    """Guards against drafted tokens counted as prompt, a pending token left out, and a context that drafts grow."""
    ids = [7, 8, 9, 1]
    context = SamplingContext(SamplingParams(), 0, 0, ids, prompt_length=3, eos_token_ids=(5,))
    assert history_of(context) == History([7, 8, 9], [1], (5,))
    assert history_of(context, (2, 4)) == History([7, 8, 9], [1, 2, 4], (5,))
    assert ids == [7, 8, 9, 1]
    prompt_only = SamplingContext(SamplingParams(), 0, 0, ids, prompt_length=4)
    assert history_of(prompt_only) == History(ids, [])


class Prompt(list[int]):
    """Counts how often all of it is read."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        self.reads += isinstance(key, slice) and (key.start or 0) == 0
        return super().__getitem__(key)


@pytest.mark.parametrize("window", [None, 3])
def test_a_prompt_is_read_once_for_all_rows(window: int | None) -> None:
    """Guards against a prompt of 32,000 tokens that is copied for every node of every tree, a millisecond each."""
    ids = Prompt([7, 8, 9, 8, 1])
    params = SamplingParams(repetition_penalty=1.7, penalty_window=window)
    context = SamplingContext(params, 0, 0, ids, prompt_length=4)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    paths = [(), (2,), (2, 4)]
    found = process(logits, params, [history_of(context, path) for path in paths])
    assert ids.reads == 1
    expected = process(logits, params, [History([7, 8, 9, 8], [1, *path]) for path in paths])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", list(EVERYTHING))
def test_an_option_without_a_history_is_an_error(name: str) -> None:
    """Guards against a draft or a verifier that forgets the history: the option would be ignored in silence."""
    logits = torch.tensor([ROW])
    for temperature in (0.0, 1.0):
        params = SamplingParams.from_options(temperature=temperature, **{name: EVERYTHING[name]})
        assert params.has_processors
        with pytest.raises(ValueError, match="one history per row"):
            warp(logits, params)
        with pytest.raises(ValueError, match="one history per row"):
            cutoff_distance(logits[0], params, 0)
        with pytest.raises(ValueError, match="2 histories for 1 rows"):
            warp(logits, params, [History([1], [])] * 2)


def test_words_that_are_still_words_are_an_error() -> None:
    """Guards against bad words that nobody resolved and that would be ignored in silence."""
    params = SamplingParams(bad_words=("no",))
    with pytest.raises(ValueError, match=r"bad_words=\('no',\): must be resolved"):
        warp(torch.tensor([ROW]), params, [History([1], [])])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("narrow", [{}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize("emptied", ["banned", "overflow"])
def test_a_row_with_nothing_left_is_empty_and_not_nan(temperature: float, narrow: dict[str, Any], emptied: str) -> None:
    """Guards against NaN, which compares as anything, and against a neighbour that suffers with the empty row."""
    everything = [[0, token] for token in range(6)]
    options = {"bad_words_ids": everything} if emptied == "banned" else {"repetition_penalty": 1e-40}
    params = SamplingParams.from_options(temperature=temperature, **options, **narrow)
    last = 0 if emptied == "banned" else 5
    log_probs = warp(torch.tensor([ROW, ROW]), params, [History([last], []), History([2], [])])
    assert log_probs[0].tolist() == [-INFINITY] * 6
    assert float(log_probs[1].exp().sum()) == pytest.approx(1.0)


def test_a_nucleus_of_nan_is_no_index_error() -> None:
    """Guards against a crash in top-p that takes the batch down before the engine can name the broken request."""
    logits = torch.tensor([[float("nan")] * 6, ROW])
    log_probs = warp(logits, SamplingParams(temperature=1.0, top_p=0.5))
    assert bool(torch.isfinite(log_probs[1]).any())


def test_the_warp_truncates_what_the_options_left() -> None:
    """Guards against truncation before the bans and penalties: the best tokens would be cut with nothing after them."""
    params = SamplingParams.from_options(temperature=2.0, top_k=2, bad_words_ids=[[5]], repetition_penalty=4.0)
    log_probs = warp(torch.tensor([ROW]), params, [History([0], [3])])
    # 5 is banned; 0 is 2 / 4 and 3 is 1 / 4 after the penalty; 2 is next.
    assert {token for token, value in enumerate(log_probs[0].tolist()) if value > -INFINITY} == {0, 3}
    expected = torch.log_softmax(torch.tensor([0.25, 0.125]), dim=0)
    torch.testing.assert_close(log_probs[0, [0, 3]], expected)


def test_the_distance_to_a_cutoff_is_measured_after_the_options() -> None:
    """Guards against a certificate that measures on raw logits, where another token stands at the cut-off."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    params = SamplingParams.from_options(temperature=1.0, top_k=2, bad_words_ids=[[1]])
    without = torch.tensor([0.4, 0.2, 0.1]).log()
    expected = cutoff_distance(without, SamplingParams(temperature=1.0, top_k=2), 1)
    assert cutoff_distance(logits, params, 2, History([0], [])) == pytest.approx(expected)
    assert cutoff_distance(logits, SamplingParams(temperature=1.0, top_k=2), 2) != pytest.approx(expected)
