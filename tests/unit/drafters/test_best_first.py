"""Best-first growth against brute force: all that anybody names below any path, and the likeliest of it."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import Stream
from outpace.core.tree import DraftTree, Topology
from outpace.drafters.best_first import NOWHERE, Growth, Witnesses
from outpace.drafters.evidence import (
    PASSED_OVER,
    QUIET,
    SIZE,
    UNDRAFTED,
    UNMATCHED,
    UNRANKED,
    Clues,
    Evidence,
    drafted,
    matched,
    noisy,
    ranked,
)
from outpace.drafters.suffix import TextMatch
from outpace.sampling.noise import gumbel, noise_key
from tests.unit.drafters.requests import draft_request
from tests.unit.drafters.test_suffix import first_ends
from tests.unit.shaping.toy_source import node_paths

VOCAB = 9
DEPTH = 3  # to which brute force goes
CPU = torch.device("cpu")
Path = tuple[int, ...]


def draft_tree(nodes: Sequence[tuple[int, int, float]], pending: int, passes: int = 1) -> DraftTree:
    """A tree with scores, of (parent, token, probability below the parent)."""
    scores = [0.0]
    for parent, _, share in nodes:
        scores.append(scores[parent] + math.log(share))
    tokens = torch.tensor([pending, *(token for _, token, _ in nodes)])
    topology = Topology.of([-1, *(parent for parent, _, _ in nodes)])
    return DraftTree(tokens, topology, None, passes, scores=torch.tensor(scores))


def rows_of(known: dict[int, Sequence[int]]) -> Tensor:
    rows = torch.zeros(VOCAB, 8, dtype=torch.int64)
    for token, row in known.items():
        rows[token] = torch.tensor([*row, *(other for other in range(VOCAB) if other not in row)][:8])
    return rows


@dataclass
class World:
    """One request and everything that may name continuations of its ids."""

    stream: Stream
    rows: Tensor | None
    asks_text: bool
    draft: DraftTree | None
    evidence: Evidence

    @property
    def witnesses(self) -> Witnesses:
        text = TextMatch()
        text.follow(self.stream.ids)
        return Witnesses(self.stream, self.rows, text if self.asks_text else None)

    def grow(self, budget: int, depth: int, floor: float = 0.0, enough: float = 0.0) -> Growth:
        return self.witnesses.grow(self.evidence, budget, depth, floor, self.draft, enough)

    def named(self, path: Path, below: dict[Path, dict[int, float]]) -> dict[int, Clues]:
        """What follows a path and what speaks for it, by looking everything up again."""
        ids, rows = self.stream.ids, self.rows
        seen = [] if rows is None or not rows[(*ids, *path)[-1]].any() else rows[(*ids, *path)[-1]].tolist()
        match = self._match([*ids, *path])
        scores = below.get(path, {})
        silent = PASSED_OVER if scores else UNDRAFTED
        named: dict[int, Clues] = {}
        for token in {*scores, *seen, *([match[0]] if match else [])}:
            draft = drafted(scores[token]) if token in scores else silent
            matrix = ranked(seen.index(token)) if token in seen else UNRANKED
            text = matched(match[1]) if match and match[0] == token else UNMATCHED
            noise = QUIET
            if not self.stream.params.is_greedy and token not in scores:
                key = noise_key(self.stream.seed, self.stream.sample_index, len(ids) + len(path))
                noise = noisy(float(gumbel([key], torch.tensor([token]))))
            named[token] = draft, matrix, text, noise
        return named

    def _match(self, ids: list[int]) -> tuple[int, int] | None:
        """What followed the longest end of some ids whose first place in the text is not its end."""
        text = list(self.stream.ids)
        for length in range(len(ids) if self.asks_text else 0, 0, -1):
            end = first_ends(text, ids[-length:])
            if end is not None and end < len(text):
                return text[end], length
        return None

    def below(self) -> dict[Path, dict[int, float]]:
        """For each path of the draft the tokens below it and their conditional scores."""
        below: dict[Path, dict[int, float]] = {}
        if self.draft is not None and self.draft.scores is not None:
            paths, scores = node_paths(self.draft), self.draft.scores.tolist()
            for node, parent in enumerate(self.draft.topology.parents[1:], start=1):
                below.setdefault(paths[parent], {}).setdefault(paths[node][-1], scores[node] - scores[parent])
        return below

    def candidates(self, depth: int) -> dict[Path, tuple[float, Clues]]:
        """Price and clues of every path to a depth."""
        below = self.below()

        def walk(path: Path, price: float) -> Iterator[tuple[Path, tuple[float, Clues]]]:
            if len(path) < depth:
                for token, clues in self.named(path, below).items():
                    worth = price * self.evidence.price(clues)
                    yield (*path, token), (worth, clues)
                    yield from walk((*path, token), worth)

        return dict(walk((), 1.0))


def random_world(seed: int, heat: float) -> World:
    source = random.Random(seed)
    letters = source.choice([2, 3, VOCAB])
    ids = [source.randrange(letters) for _ in range(source.randint(1, 14))]
    rows = None
    if source.random() < 0.8:
        known = [token for token in range(VOCAB) if source.random() < 0.8]
        rows = rows_of({token: source.sample(range(VOCAB), 8) for token in known})
    draft = None
    if source.random() < 0.8:
        nodes: list[tuple[int, int, float]] = []
        taken: set[tuple[int, int]] = set()
        for node in range(source.randint(0, 12)):
            parent, token = source.randint(max(0, node - 4), len(nodes)), source.randrange(VOCAB)
            if (parent, token) not in taken:
                taken.add((parent, token))
                nodes.append((parent, token, source.uniform(0.01, 0.99)))
        draft = draft_tree(nodes, ids[-1], passes=source.randint(0, 3))
    stream = draft_request(ids, 0, 0, seed=seed, temperature=heat).stream
    return World(stream, rows, source.random() < 0.8, draft, Evidence([source.gauss(0, 1.2) for _ in range(SIZE)]))


WORLDS = st.builds(random_world, st.integers(0, 100_000), st.sampled_from([0.0, 0.8]))


@settings(max_examples=120, deadline=None)
@given(
    world=WORLDS, budget=st.integers(0, 40), depth=st.integers(0, DEPTH), floor=st.sampled_from([0.0, 0.0, 0.02, 0.3])
)
def test_the_likeliest_of_all_candidates_make_the_tree(world: World, budget: int, depth: int, floor: float) -> None:
    """Guards against anything short of the best tree: a budget, depth or floor passed over, likelier candidates left
    out, witnesses of one token not added up or asked at another node, siblings twice, clues of other nodes."""
    witnesses = world.witnesses
    witnesses.grow(world.evidence, 5, 2)  # what it looked up must serve the next tree
    growth = witnesses.grow(world.evidence, budget, depth, floor, world.draft)
    candidates = world.candidates(depth)
    affordable = sorted((price for price, _ in candidates.values() if price >= floor), reverse=True)
    grown = [candidates[path] for path in growth_paths(growth)]
    assert [price for price, _ in grown] == affordable[:budget], "likeliest first, and nothing likelier is left"
    assert [clues for _, clues in grown] == growth.clues
    assert growth.gain == pytest.approx(sum(affordable[:budget]))

    tree, clues = growth.tree(CPU)
    paths = node_paths(tree)
    assert len(set(paths)) == len(paths) == len(grown) + 1, "no two siblings say the same"
    assert int(tree.tokens[0]) == world.stream.ids[-1]
    assert tree.topology.max_depth <= depth
    assert [candidates[path][1] for path in paths[1:]] == clues == growth.tree(CPU)[1], "in the order of the nodes"
    drafts = set() if world.draft is None else set(node_paths(world.draft))
    assert {path for path in paths[: tree.drafted] if path} <= drafts
    assert not drafts & set(paths[tree.drafted :]), "what is drafted comes first, and is not counted as retrieved"
    assert tree.draft_passes == (0 if world.draft is None else world.draft.draft_passes)
    assert tree.draft_probs is None


def growth_paths(growth: Growth) -> list[Path]:
    paths: list[Path] = [()]
    for parent, token in zip(growth.parents[1:], growth.tokens[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def flat(**weights: float) -> Evidence:
    """Evidence by which nothing counts but what is named."""
    numbers = {
        "bias": 0, "sure": drafted(0.0), "over": PASSED_OVER, "first": ranked(0), "second": ranked(1),
        "single": matched(1), "pair": matched(2), "longer": matched(3),
    }  # fmt: skip
    prior = [0.0] * SIZE
    for name, weight in weights.items():
        prior[numbers[name]] = weight
    return Evidence(prior)


def test_a_token_that_all_name_is_one_drafted_node() -> None:
    """Guards against a node for each witness, and a drafted subtree lost because somebody else named its top too."""
    stream = draft_request([5, 6, 7, 5, 6], 0, 0).stream  # after 5 6 the text had 7
    draft = draft_tree([(0, 7, 0.95), (1, 8, 0.35)], 6)
    evidence = flat(bias=-3, first=2, sure=4, pair=2)
    growth = World(stream, rows_of({6: [7, 2]}), True, draft, evidence).grow(30, 2)
    assert growth_paths(growth).count((7,)) == 1
    assert growth_paths(growth)[0] == (7,)
    clues = dict(zip(growth_paths(growth), growth.clues, strict=True))
    assert clues[7,] == (drafted(math.log(0.95)), ranked(0), matched(2), QUIET)
    assert clues[2,] == (PASSED_OVER, ranked(1), UNMATCHED, QUIET)
    assert clues[7, 8][0] == drafted(math.log(0.35)), "the draft goes on below it"
    assert growth.tree(CPU)[0].drafted == 3


def test_every_witness_goes_on_behind_every_other() -> None:
    """Guards against retrieval behind the pending token alone: matrix and text go on behind drafts and each other."""
    stream = draft_request([1, 2, 3, 0], 0, 0).stream
    draft = draft_tree([(0, 1, 0.95)], 0)
    trusting = flat(bias=-5, sure=9, first=9, single=9, pair=9, longer=12)
    growth = World(stream, rows_of({3: [8]}), True, draft, trusting).grow(4, 9)
    assert growth_paths(growth) == [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 0)], "drafted, then as the text goes on"
    growth = World(stream, rows_of({1: [6], 6: [4]}), False, draft, trusting).grow(3, 9)
    assert growth_paths(growth) == [(1,), (1, 6), (1, 6, 4)], "drafted, then the matrix twice"


def test_the_draft_comes_first_and_keeps_its_parents() -> None:
    """Guards against a drafted node numbered behind a retrieved one, or hung below another when nodes are renumbered:
    here the matrix is likelier than the draft at every depth, so that growth takes them the other way round."""
    stream = draft_request([0], 0, 0).stream
    draft = draft_tree([(0, 1, 0.95), (0, 2, 0.95), (1, 3, 0.95), (2, 4, 0.95)], 0, passes=2)
    evidence = flat(bias=-1, first=6, second=4, sure=2)
    world = World(stream, rows_of({0: [8, 7], 1: [8]}), False, draft, evidence)
    growth = world.grow(8, 2)
    assert growth.drafted[1] == NOWHERE
    clues = dict(zip(growth_paths(growth), growth.clues, strict=True))
    tree, ordered = growth.tree(CPU)
    paths = node_paths(tree)
    assert tree.retrieved == len(paths) - 5
    assert set(paths[1:5]) == {(1,), (2,), (1, 3), (2, 4)}
    assert {(8,), (1, 8)} <= set(paths[5:])
    assert ordered == [clues[path] for path in paths[1:]]
    assert tree.draft_passes == 2


def test_siblings_that_the_draft_says_twice_are_one() -> None:
    """Guards against a slot for a token that can never be reached, behind its own twin."""
    draft = draft_tree([(0, 3, 0.95), (0, 3, 0.55), (2, 4, 0.95)], 1)
    world = World(draft_request([1], 0, 0).stream, None, False, draft, flat())
    growth = world.grow(9, 9)
    assert growth_paths(growth) == [(3,)]
    assert growth.clues == [(drafted(math.log(0.95)), UNRANKED, UNMATCHED, QUIET)]


def test_who_is_silent_names_nothing() -> None:
    """Guards against the zeros of rows never seen, and against matches of no length, taken for continuations."""
    stream = draft_request([1, 2, 3], 0, 0).stream
    for draft in (None, draft_tree([], 3, passes=1)):
        world = World(stream, rows_of({}), True, draft, flat())
        growth = world.grow(9, 9)
        assert (growth.tokens, growth.clues, growth.gain) == ([3], [], 0.0)
        assert len(growth.tree(CPU)[0]) == 1
    zero = World(stream, rows_of({3: [0]}), False, None, flat())
    assert len(growth_paths(zero.grow(9, 1))) == 8, "a row that was seen may begin with 0"
    scoreless = World(stream, None, False, DraftTree.chain(torch.tensor([3, 4])), flat())
    with pytest.raises(AssertionError, match="a draft without scores cannot be weighed"):
        scoreless.grow(9, 9)


def test_the_noise_is_that_of_the_targets_own_draw() -> None:
    """Guards against noise of another seed, sample, position or token, drafts that hear it twice, and rejection, which
    it does not decide, hearing it."""
    ids = [4, 4, 1, 2]
    draft = draft_tree([(0, 5, 0.95)], 2)
    rows = rows_of({token: range(8) for token in range(VOCAB)})
    for seed, heat, rule, hears in (
        (3, 0.7, "match", True), (4, 0.7, "match", True), (3, 0.0, "match", True), (3, 0.7, "rejection", True),
        (3, 0.7, "match", False),
    ):  # fmt: skip
        params = SamplingParams(temperature=heat, verification=rule)
        stream = Stream(params, seed, 2, ids, 3)
        is_deaf = not heat or rule == "rejection" or not hears
        growth = Witnesses(stream, rows, None, hears).grow(flat(), 200, 3, draft=draft)
        heard = set()
        for path, clues in zip(growth_paths(growth), growth.clues, strict=True):
            value = gumbel([noise_key(seed, 2, len(ids) + len(path) - 1)], torch.tensor([path[-1]]))
            expected = QUIET if path == (5,) or is_deaf else noisy(float(value))
            assert clues[3] == expected, path
            heard.add(clues[3])
        assert heard == {QUIET} if is_deaf else len(heard) > 3


def test_what_the_noise_speaks_for_gets_the_slots() -> None:
    """Guards against a clue that is heard and changes nothing: of equal tokens the loudest comes first."""
    loud = Evidence([float(weight) if weight >= noisy(-1.0) else 0.0 for weight in range(SIZE)])
    stream = draft_request([2], 0, 0, seed=8, temperature=1.0).stream
    growth = World(stream, rows_of({2: range(8)}), False, None, loud).grow(8, 1)
    values = gumbel([noise_key(8, 0, 1)], torch.tensor(growth.tokens[1:]))[0].tolist()
    kinds = [noisy(value) for value in values]
    assert kinds == sorted(kinds, reverse=True)
    assert len(set(kinds)) > 2
