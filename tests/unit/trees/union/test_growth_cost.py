"""What growing a tree may cost: nothing is worked out twice, and a hopeless sketch ends early."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.sampling.noise import gumbel_of, noise_key
from outpace.testing.requests import draft_request
from outpace.trees.union import best_first
from outpace.trees.union.best_first import CandidatePool
from tests.unit.trees.union.worlds import DEPTH, VOCAB, WORLDS, World, flat, rows_of


@settings(max_examples=60, deadline=None)
@given(world=WORLDS, budget=st.integers(0, 20), share=st.sampled_from([0.3, 0.999_999, 1.5]))
def test_a_tree_that_gains_enough_is_grown_to_its_end(world: World, budget: int, share: float) -> None:
    """Guards against trees that are given up though they would have gained enough."""
    whole = world.grow(budget, DEPTH)
    growth = world.grow(budget, DEPTH, wanted_gain=share * whole.gain)
    assert growth.tokens == whole.tokens[: len(growth.tokens)]
    if share < 1:
        assert growth.tokens == whole.tokens


def test_a_hopeless_tree_is_not_grown() -> None:
    """Guards against sketches that cost as much as the tree for which they are thrown away."""
    doubtful = flat(bias=-5)
    world = World(draft_request([2], 0, 0).stream, rows_of({2: range(8)}), False, None, doubtful)
    assert len(world.grow(60, 9).tokens) > 8
    assert len(world.grow(60, 9, wanted_gain=3.0).tokens) == 1


def test_noise_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against keys hashed for every node, or noise for every node that names a token, or for every tree."""
    keys, values = list[int](), list[tuple[tuple[int, int], int]]()

    def key_of(seed: int, sample: int, position: int) -> tuple[int, int]:
        keys.append(position)
        return noise_key(seed, sample, position)

    def value_of(key: tuple[int, int], token: int) -> float:
        values.append((key, token))
        return gumbel_of(key, token)

    monkeypatch.setattr(best_first, "noise_key", key_of)
    monkeypatch.setattr(best_first, "gumbel_of", value_of)
    rows = rows_of({token: range(8) for token in range(VOCAB)})
    candidates = CandidatePool(draft_request([1, 2], 0, 0, temperature=1.0).stream, rows, None)
    for _ in range(2):
        assert len(candidates.grow(flat(), 70, 2).tokens) == 71
    assert sorted(keys) == [2, 3]
    assert len(values) == len(set(values)) == 2 * 8
