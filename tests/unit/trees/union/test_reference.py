"""Best-first growth against brute force: all that anybody names below any path, and the likeliest of it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.core.params import SamplingParams
from outpace.core.protocols import SamplingContext
from outpace.core.tree import DraftTree
from outpace.sampling.noise import gumbel, noise_key
from outpace.testing.toy import draft_request
from outpace.trees.union.acceptance import QUIET, UNMATCHED, UNPAIRED, UNRANKED, drafted, noisy
from tests.toys import node_paths
from tests.unit.trees.union.worlds import (
    CPU,
    DEPTH,
    VOCAB,
    WORLDS,
    World,
    clues_of,
    draft_tree,
    flat,
    growth_paths,
    rows_of,
)


@settings(max_examples=60, deadline=None)
@given(world=WORLDS, budget=st.integers(0, 40), depth=st.integers(0, DEPTH))
def test_the_likeliest_of_all_candidates_make_the_tree(world: World, budget: int, depth: int) -> None:
    """Guards against anything short of the best tree: a budget or depth passed over, likelier candidates left out,
    candidates of one token not added up or asked at another node, siblings twice, features of other nodes."""
    growth = world.grow(budget, depth)
    candidates = world.candidates(depth)
    affordable = sorted((gain for gain, _ in candidates.values()), reverse=True)
    grown = [candidates[path] for path in growth_paths(growth)]
    gains = [gain for gain, _ in grown]
    assert gains == pytest.approx(affordable[:budget]), "likeliest first, and nothing likelier is left"
    assert [features for _, features in grown] == clues_of(growth)
    assert growth.gain == pytest.approx(sum(affordable[:budget]))

    tree = growth.tree(CPU)
    paths = node_paths(tree)
    assert len(set(paths)) == len(paths) == len(grown) + 1, "no two siblings say the same"
    assert int(tree.tokens[0]) == world.sampling.ids[-1]
    assert tree.topology.max_depth <= depth
    below, in_order = world.below(), [(), *growth_paths(growth)]
    last = in_order[-1]
    for node, path in enumerate(in_order):
        asked = len(path) < depth and (path != last or len(paths) <= budget)  # not below the node that filled the tree
        assert growth.candidates.below(node) == (world.named(path, below) if asked else {})
    drafts = set() if world.draft is None else set(node_paths(world.draft))
    assert {path for path in paths[: tree.drafted] if path} <= drafts
    assert not drafts & set(paths[tree.drafted :]), "what is drafted comes first, and is not counted as retrieved"
    assert tree.draft_passes == (0 if world.draft is None else world.draft.draft_passes)
    assert tree.draft_probs is None


def test_the_draft_comes_first_and_keeps_its_parents() -> None:
    """Guards against a drafted node numbered behind a retrieved one, or hung below another when nodes are renumbered:
    here the matrix is likelier than the draft at every depth, so that growth takes them the other way round. And
    against a growth that its own tree puts in another order, so that a second tree of it is another one."""
    context = draft_request([0], 0, 0).sampling
    draft = draft_tree([(0, 1, 0.95), (0, 2, 0.95), (1, 3, 0.95), (2, 4, 0.95)], 0, passes=2)
    acceptance = flat(bias=-1, first=6, second=4, sure=2)
    world = World(context, rows_of({0: [8, 7], 1: [8]}), False, draft, acceptance)
    growth = world.grow(60, 2)
    assert growth.origins[1] == "retrieved"
    tree = growth.tree(CPU)
    paths = node_paths(tree)
    assert tree.retrieved == len(paths) - 5
    assert set(paths[1:5]) == {(1,), (2,), (1, 3), (2, 4)}
    assert {(8,), (1, 8)} <= set(paths[5:])
    assert sorted([(), *growth_paths(growth)]) == sorted(paths)
    assert tree.draft_passes == 2
    again = growth.tree(CPU)
    assert (again.tokens.tolist(), again.topology) == (tree.tokens.tolist(), tree.topology)


def test_siblings_that_the_draft_says_twice_are_one() -> None:
    """Guards against a slot for a token that can never be reached, behind its own twin."""
    draft = draft_tree([(0, 3, 0.95), (0, 3, 0.55), (2, 4, 0.95)], 1)
    world = World(draft_request([1], 0, 0).sampling, None, False, draft, flat())
    growth = world.grow(9, 9)
    assert growth_paths(growth) == [(3,)]
    assert clues_of(growth) == [(drafted(math.log(0.95)), UNPAIRED, UNRANKED, UNMATCHED, QUIET)]


def test_who_is_silent_names_nothing() -> None:
    """Guards against the zeros of rows never seen, and against matches of no length, taken for continuations."""
    context = draft_request([1, 2, 3], 0, 0).sampling
    for draft in (None, draft_tree([], 3, passes=1)):
        world = World(context, rows_of({}), True, draft, flat())
        growth = world.grow(9, 9)
        assert (growth.tokens, growth.candidates.below(0), growth.gain) == ([3], {}, 0.0)
        assert len(growth.tree(CPU)) == 1
    zero = World(context, rows_of({3: [0]}), False, None, flat())
    assert len(growth_paths(zero.grow(9, 1))) == 8, "a row that was seen may begin with 0"
    scoreless = World(context, None, False, DraftTree.chain(torch.tensor([3, 4])), flat())
    with pytest.raises(AssertionError, match="a draft needs scores"):
        scoreless.grow(9, 9)


def test_the_noise_is_that_of_the_targets_own_draw() -> None:
    """Guards against noise of another seed, sample, position or token, drafts that hear it twice, and rejection, which
    it does not decide, hearing it."""
    ids = [4, 4, 1, 2]
    draft = draft_tree([(0, 5, 0.95)], 2)
    rows = rows_of({token: range(8) for token in range(VOCAB)})
    for seed, heat, rule in ((3, 0.7, "match"), (4, 0.7, "match"), (3, 0.0, "match"), (3, 0.7, "rejection")):
        params = SamplingParams(temperature=heat, verification=rule)
        context = SamplingContext(params, seed, 2, ids, 3)
        is_deaf = not heat or rule == "rejection"
        growth = World(context, rows, False, draft, flat()).grow(200, 3)
        heard = set()
        for path, features in zip(growth_paths(growth), clues_of(growth), strict=True):
            value = gumbel([noise_key(seed, 2, len(ids) + len(path) - 1)], torch.tensor([path[-1]]))
            expected = QUIET if path == (5,) or is_deaf else noisy(float(value))
            assert features[4] == expected, path
            heard.add(features[4])
        assert heard == {QUIET} if is_deaf else len(heard) > 3
