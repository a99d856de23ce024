"""Transitions added up over texts: ranks by mean probability, against a count by hand."""

from collections import Counter, defaultdict

import pytest
import torch

from outpace.core.protocols import NO_TOKEN
from outpace.trees.retrieval import transition_matrix, warm_file
from outpace.trees.retrieval.transition_matrix import SUCCESSORS, TransitionMatrix
from outpace.trees.retrieval.warm_file import TransitionRanks

VOCAB, EXPECTED = 40, 12


def texts(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Ids from few tokens, so that keys come again, with the likeliest ids after each and probabilities."""
    draws = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(1, 30, (), generator=draws))
        ids = torch.randint(0, 6, (length,), generator=draws)
        top = torch.stack([torch.randperm(VOCAB, generator=draws)[:EXPECTED] for _ in range(length)])
        probs = torch.rand(length, EXPECTED, generator=draws).sort(dim=1, descending=True).values
        made.append((ids, top, probs))
    return made


def added(given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> TransitionMatrix:
    ranks = TransitionRanks(VOCAB)
    for one in given:
        ranks.add(*one)
    return ranks.matrix()


def test_ranks_are_by_the_sum_over_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the last word instead of all of them, keys of other contexts, and sums that are lost where texts
    are added up in parts."""
    given = texts(60)
    masses: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for ids, top, probs in given:
        for place, token in enumerate(ids.tolist()):
            before = int(ids[place - 1]) if place else NO_TOKEN
            keys: tuple[tuple[int, ...], ...] = ((token,), (before, token))
            for key in keys:
                masses[key].update(dict(zip(top[place].tolist(), probs[place].double().tolist(), strict=True)))
    whole = added(given)
    monkeypatch.setattr(warm_file, "AT_ONCE", 500)
    for made in (whole, added(given)):
        known = made.rows()
        assert known.tokens.tolist() == sorted(key[0] for key in masses if len(key) == 1)
        assert [tuple(pair) for pair in known.pairs.tolist()] == sorted(key for key in masses if len(key) == 2)
        for key, row in (*zip(known.tokens[:, None], known.successors, strict=True),
                         *zip(known.pairs, known.pair_successors, strict=True)):  # fmt: skip
            best = masses[tuple(key.tolist())].most_common(SUCCESSORS)
            assert row.tolist() == [token for token, _ in best], "masses are of real numbers, and never alike"


def test_of_pairs_with_one_place_the_frequent_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a table that rare pairs empty of common ones."""
    monkeypatch.setattr(transition_matrix, "PLACES", 1)
    monkeypatch.setattr(transition_matrix, "PLACE_BITS", 0)
    monkeypatch.setattr(transition_matrix, "_places", lambda keys: torch.zeros_like(keys))
    top, probs = torch.arange(8)[None], torch.full((1, 8), 0.1)
    common = torch.tensor([3, 4] * 9), top.expand(18, 8), probs.expand(18, 8)
    rare = [(torch.tensor([token]), top, probs) for token in (1, 2, 30)]
    for given in ([common, *rare], [*rare, common]):
        known = added(given).rows()
        assert known.pairs.tolist() == [[3, 4]]
        assert known.tokens.tolist() == [1, 2, 3, 4, 30], "rows of one token have no places to share"
