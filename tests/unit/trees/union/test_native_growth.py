"""Growth by the compiled kernels: node for node what the host's own growth makes, and what it learns."""

from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.budget.prices import PassTimes, Prices
from outpace.kernels.build import loaded_kernels
from outpace.kernels.growth import NativeText
from outpace.testing.requests import draft_request
from outpace.trees.retrieval.suffix import TextMatch
from outpace.trees.union.acceptance import learn_together
from outpace.trees.union.best_first import grow
from outpace.trees.union.growth import Growth, GrowthRequest
from outpace.trees.union.native_growth import grow_natively
from tests.unit.trees.union.worlds import CPU, WORLDS, World, flat

pytestmark = pytest.mark.skipif(loaded_kernels() is None, reason="needs a C++ compiler")
PRICES = Prices(0.4, PassTimes(tuple(1.0 + 0.3 * nodes + 0.05 * (nodes % 4) for nodes in range(16))))


def request_of(world: World, native: bool, **changes: object) -> GrowthRequest:
    text = NativeText() if native else TextMatch()
    text.follow(world.stream.ids)
    asked = GrowthRequest(
        stream=world.stream,
        matrix=world.matrix,
        text=text if world.asks_text else None,
        uses_noise=True,
        acceptance=world.acceptance,
        budget=12,
        max_depth=5,
        min_prob=0.0,
        draft=world.draft,
        wanted_gain=0.0,
        prices=None,
    )
    return replace(asked, **changes)  # type: ignore[arg-type]


def seen(growth: Growth) -> tuple[object, ...]:
    order = range(len(growth.tokens))
    return growth.tokens, growth.parents, growth.drafted, growth.origins, list(growth.named_in(order)), growth.passes


@given(
    worlds=st.lists(WORLDS, min_size=1, max_size=4),
    budget=st.integers(0, 30),
    depth=st.integers(0, 7),
    least=st.sampled_from([0.0, 0.02, 0.3]),
    wanted=st.sampled_from([0.0, 1.0, 2.5]),
    prices=st.sampled_from([None, PRICES]),
)
@settings(max_examples=150, deadline=None)
def test_trees_are_those_of_the_host(
    worlds: list[World], budget: int, depth: int, least: float, wanted: float, prices: Prices | None
) -> None:
    """Guards against another order of nodes, a candidate or a feature lost, a depth or price off by one, noise of
    another position, a neighbour's text, and siblings that share a price by chance: random weights make ties rare."""
    wishes = {"budget": budget, "max_depth": depth, "min_prob": least, "wanted_gain": wanted, "prices": prices}
    expected = [grow(request_of(world, False, **wishes)) for world in worlds]
    found = grow_natively([request_of(world, True, **wishes) for world in worlds])
    for one, other in zip(found, expected, strict=True):
        assert seen(one) == seen(other)
        assert one.gains == pytest.approx(other.gains, rel=1e-12)
        assert one.gain == pytest.approx(other.gain, rel=1e-12)


@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=60), kept=st.integers(1, 60), cuts=st.data())
@settings(max_examples=100, deadline=None)
def test_a_text_that_grows_is_matched_as_in_python(ids: list[int], kept: int, cuts: st.DataObject) -> None:
    """Guards against an automaton whose states do not part, and against one that remembers what was taken back."""
    world = World(draft_request(ids, 0, 0).stream, None, True, None, flat(single=1.0, pair=2.0, longer=3.0))
    native, text = NativeText(), TextMatch()
    length = 0
    while length < len(ids):
        length = cuts.draw(st.integers(length + 1, len(ids)))
        for one in (native, text):
            one.follow(ids[:length])
    kept = min(kept, len(ids))
    for one in (native, text):
        one.rewind(kept)
        one.follow(ids)
    wishes = {"budget": 20, "max_depth": 20}
    (found,) = grow_natively([request_of(world, True, text=native, **wishes)])
    assert seen(found) == seen(grow(request_of(world, False, text=text, **wishes)))


@given(world=WORLDS, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_it_learns_what_the_host_learns(world: World, seed: int) -> None:
    """Guards against steps of another size, weights that keep what siblings share, and nodes of another tree."""
    wishes = {"budget": 9, "max_depth": 4}
    (found,) = grow_natively([request_of(world, True, **wishes)])
    tree, named = found.tree(CPU)
    paths = [tree.topology.path(node) for node in range(len(tree))]
    path = paths[seed % len(paths)]
    said = [*tree.tokens[list(path[1:])].tolist(), seed % 12]
    here, there = deepcopy(world.acceptance), deepcopy(world.acceptance)
    for _ in range(3):
        lesson = here.lesson(named, path, said)
        assert lesson is not None
        learn_together([lesson])
        assert there.lesson(list(named), path, said) is None
    assert list(here.weights) == pytest.approx(list(there.weights), rel=1e-12, abs=1e-14)
    assert list(here.squares) == pytest.approx(list(there.squares), rel=1e-12)
    features = [feature for below in named for feature in below.values()]
    assert here.prices(features) == pytest.approx(there.prices(features), rel=1e-12), "odds of before are kept"
