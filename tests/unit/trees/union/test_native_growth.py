"""Growth by the compiled kernels: node for node the trees of the Python reference, and what it learns."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.budget.costs import PassTimes, Prices
from outpace.kernels.build import loaded_kernels
from outpace.testing.toy import draft_request
from outpace.trees.union.growth import CompiledGrower, Growth, Lesson
from outpace.trees.union.reference import ReferenceGrower
from tests.unit.trees.union.worlds import WORLDS, World, flat

pytestmark = pytest.mark.skipif(loaded_kernels() is None, reason="needs a C++ compiler")
PRICES = Prices(0.4, PassTimes(tuple(1.0 + 0.3 * nodes + 0.05 * (nodes % 4) for nodes in range(16))))
COMPILED, REFERENCE = CompiledGrower(), ReferenceGrower()


def columns(growth: Growth) -> tuple[object, ...]:
    below = [list(growth.candidates.below(node).items()) for node in range(len(growth.tokens))]
    return growth.tokens, growth.parents, growth.origins, below, growth.passes


@given(
    worlds=st.lists(WORLDS, min_size=1, max_size=4),
    budget=st.integers(0, 30),
    depth=st.integers(0, 7),
    prices=st.sampled_from([None, PRICES]),
)
@settings(max_examples=80, deadline=None)
def test_trees_are_those_of_the_reference(worlds: list[World], budget: int, depth: int, prices: Prices | None) -> None:
    """Guards against another order of nodes, a candidate or a feature lost, a depth or gain off by one, noise of
    another position, a neighbour's text, and siblings that share a gain by chance: random weights make ties rare."""
    found, expected = (
        grower.grow([world.request(grower, budget, depth, prices=prices) for world in worlds])
        for grower in (COMPILED, REFERENCE)
    )
    for one, other in zip(found, expected, strict=True):
        assert columns(one) == columns(other)
        assert one.gains == pytest.approx(other.gains, rel=1e-12)


@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=60), kept=st.integers(1, 60), cuts=st.data())
@settings(max_examples=60, deadline=None)
def test_a_text_that_grows_is_matched_as_in_python(ids: list[int], kept: int, cuts: st.DataObject) -> None:
    """Guards against an automaton whose states do not part, and against one that remembers what was taken back."""
    world = World(draft_request(ids, 0, 0).sampling, None, False, None, flat(single=1.0, pair=2.0, longer=3.0))
    compiled, text = COMPILED.text(), REFERENCE.text()
    length = 0
    while length < len(ids):
        length = cuts.draw(st.integers(length + 1, len(ids)))
        for one in (compiled, text):
            one.follow(ids[:length])
    for one in (compiled, text):
        one.rewind(min(kept, len(ids)))
        one.follow(ids)
    (found,) = COMPILED.grow([replace(world.request(COMPILED, 20, 20), text=compiled)])
    (expected,) = REFERENCE.grow([replace(world.request(REFERENCE, 20, 20), text=text)])
    assert columns(found) == columns(expected)


@given(world=WORLDS, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_it_learns_what_the_reference_learns(world: World, seed: int) -> None:
    """Guards against steps of another size, weights that keep what siblings share, and nodes of another tree."""
    (found,) = COMPILED.grow([world.request(COMPILED, 9, 4)])
    nodes = [0, *np.random.default_rng(seed).integers(0, len(found.candidates), size=3).tolist()]
    chosen = [next(iter(found.candidates.below(node)), 0) if node % 2 else seed % 12 for node in nodes]
    here, there = deepcopy(world.acceptance), deepcopy(world.acceptance)
    for _ in range(3):
        COMPILED.learn([Lesson(here, found.candidates, nodes, chosen)])
        REFERENCE.learn([Lesson(there, found.candidates, nodes, chosen)])
    assert list(here.weights) == pytest.approx(list(there.weights), rel=1e-12, abs=1e-14)
    assert list(here.squares) == pytest.approx(list(there.squares), rel=1e-12)
