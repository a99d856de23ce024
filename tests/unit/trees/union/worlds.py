"""Requests with everything that may name continuations of their ids, and what follows by looking all up again."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from outpace.core.protocols import NO_TOKEN, Proposer, SamplingContext
from outpace.core.tree import DraftTree, Topology
from outpace.sampling.noise import gumbel, noise_key
from outpace.testing.toy import draft_request
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.union.acceptance import (
    OUTRANKED,
    PASSED_OVER,
    QUIET,
    SIZE,
    UNDRAFTED,
    UNMATCHED,
    UNPAIRED,
    UNRANKED,
    AcceptanceModel,
    Features,
    drafted,
    matched,
    noisy,
    paired,
    priors,
    ranked,
)
from outpace.trees.union.growth import Grower, Growth, GrowthRequest
from outpace.trees.union.proposer import UnionPlan, UnionProposer
from outpace.trees.union.reference import ReferenceGrower
from tests.toys import node_paths
from tests.unit.trees.retrieval.test_suffix import first_ends

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


def union_of(base: Proposer, matrix: MatrixLearner, plan: UnionPlan, budget: int = 10) -> UnionProposer:
    """A union that begins with the acceptance models that ship."""
    greedy, sampled = (AcceptanceModel(priors()[kind]) for kind in ("greedy", "sampled"))
    return UnionProposer(base, matrix, greedy, sampled, plan, budget, CPU)


Pair = tuple[int, int]


def rows_of(known: dict[int, Sequence[int]], pairs: dict[Pair, Sequence[int]] | None = None) -> TransitionMatrix:
    """A matrix of these rows, each filled up with other ids; with rows of pairs where they are given."""
    matrix = TransitionMatrix(VOCAB, CPU, context=1 if pairs is None else 2)

    def filled(row: Sequence[int]) -> torch.Tensor:
        return torch.tensor([*row, *(other for other in range(VOCAB) if other not in row)][:8])

    for token, row in known.items():
        matrix.successors[token] = filled(row)
    for (before, token), row in (pairs or {}).items():
        assert matrix.pairs is not None
        matrix.pairs.update(torch.tensor([before]), torch.tensor([token]), filled(row)[None])
    return matrix


@dataclass
class World:
    """One request and everything that may name continuations of its ids."""

    sampling: SamplingContext
    matrix: TransitionMatrix | None
    asks_text: bool
    draft: DraftTree | None
    acceptance: AcceptanceModel

    def request(self, grower: Grower, budget: int, depth: int, **options: Any) -> GrowthRequest:
        text = grower.text() if self.asks_text else None
        if text is not None:
            text.follow(self.sampling.ids)
        settings = {"draft": self.draft} | options
        return GrowthRequest(
            self.sampling, self.matrix, text, acceptance=self.acceptance, budget=budget, max_depth=depth, **settings
        )

    def grow(self, budget: int, depth: int, **options: Any) -> Growth:
        """The tree of the Python reference."""
        grower = ReferenceGrower()
        return grower.grow([self.request(grower, budget, depth, **options)])[0]

    def named(self, path: Path, below: dict[Path, dict[int, float]]) -> dict[int, Features]:
        """What follows a path and what speaks for it, by looking everything up again."""
        ids = self.sampling.ids
        before, token = (NO_TOKEN, *ids, *path)[-2:]
        seen: list[int] = []
        pair: list[int] | None = None
        if self.matrix is not None:
            row = self.matrix.successors[token]
            seen = row.tolist() if bool(row.any()) else []
            known = self.matrix.rows()
            keys = known.pairs.tolist()
            pair = known.pair_successors[keys.index([before, token])].tolist() if [before, token] in keys else None
        match = self._match([*ids, *path])
        scores = below.get(path, {})
        silent = PASSED_OVER if scores else UNDRAFTED
        named: dict[int, Features] = {}
        for token in {*scores, *seen, *(pair or []), *([match[0]] if match else [])}:
            draft = drafted(scores[token]) if token in scores else silent
            unpaired = UNPAIRED if pair is None else OUTRANKED
            two = paired(pair.index(token)) if pair is not None and token in pair else unpaired
            matrix = ranked(seen.index(token)) if token in seen else UNRANKED
            text = matched(match[1]) if match and match[0] == token else UNMATCHED
            noise = QUIET
            if not self.sampling.params.is_greedy and token not in scores:
                key = noise_key(self.sampling.seed, self.sampling.sample_index, len(ids) + len(path))
                noise = noisy(float(gumbel([key], torch.tensor([token]))))
            named[token] = draft, two, matrix, text, noise
        return named

    def _match(self, ids: list[int]) -> tuple[int, int] | None:
        """What followed the longest end of some ids whose first place in the text is not its end."""
        text = list(self.sampling.ids)
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

    def candidates(self, depth: int) -> dict[Path, tuple[float, Features]]:
        """Expected gain and features of every path to a depth."""
        below = self.below()

        def walk(path: Path, gain: float) -> Iterator[tuple[Path, tuple[float, Features]]]:
            if len(path) < depth:
                named = self.named(path, below)
                found = self.acceptance.probabilities(list(named.values()))
                for (token, features), probability in zip(named.items(), found, strict=True):
                    yield (*path, token), (gain * probability, features)
                    yield from walk((*path, token), gain * probability)

        return dict(walk((), 1.0))


def random_world(seed: int, heat: float) -> World:
    source = random.Random(seed)
    letters = source.choice([2, 3, VOCAB])
    ids = [source.randrange(letters) for _ in range(source.randint(1, 14))]
    matrix = None
    if source.random() < 0.8:
        known = [token for token in range(VOCAB) if source.random() < 0.8]
        both = [(before, token) for before in (NO_TOKEN, *range(VOCAB)) for token in known if source.random() < 0.4]
        pairs: dict[Pair, Sequence[int]] | None = None
        if source.random() < 0.6:
            pairs = {pair: source.sample(range(VOCAB), 8) for pair in both}
        matrix = rows_of({token: source.sample(range(VOCAB), 8) for token in known}, pairs)
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
    context = draft_request(ids, 0, 0, seed=seed, temperature=heat).sampling
    return World(
        context, matrix, source.random() < 0.8, draft, AcceptanceModel([source.gauss(0, 1.2) for _ in range(SIZE)])
    )


WORLDS = st.builds(random_world, st.integers(0, 100_000), st.sampled_from([0.0, 0.8]))


def clues_of(growth: Growth) -> list[Features]:
    """What spoke for each node but the first."""
    nodes = zip(growth.parents[1:], growth.tokens[1:], strict=True)
    return [growth.candidates.below(parent)[token] for parent, token in nodes]


def growth_paths(growth: Growth) -> list[Path]:
    paths: list[Path] = [()]
    for parent, token in zip(growth.parents[1:], growth.tokens[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def flat(**weights: float) -> AcceptanceModel:
    """A model by which nothing counts but what is named."""
    numbers = {
        "bias": 0, "sure": drafted(0.0), "over": PASSED_OVER, "first": ranked(0), "second": ranked(1),
        "single": matched(1), "pair": matched(2), "longer": matched(3),
    }  # fmt: skip
    prior = [0.0] * SIZE
    for name, weight in weights.items():
        prior[numbers[name]] = weight
    return AcceptanceModel(prior)
