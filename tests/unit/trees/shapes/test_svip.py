"""SVIP: chains that end behind a token drafted in doubt, and the entropies that sources say."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outpace.core.drafting import Candidates, Frontier
from outpace.core.params import SamplingParams
from outpace.core.tree import DraftTree
from outpace.drafters.draft_lm.source import DraftLM
from outpace.engine.engine import Engine
from outpace.models.draft import early_exit
from outpace.testing import decode
from outpace.testing.sources import Path, ToySource, blend
from outpace.testing.toy import draft_request
from outpace.trees.proposer import GrowingProposer, StaticProposer
from outpace.trees.shapes.rank_paths import Chain
from outpace.trees.shapes.svip import Svip, SvipConfig
from tests.toys import table
from tests.unit.drafters.source.learned import KINDS, PROMPTS, source_of
from tests.unit.models.tiny import VOCAB, tiny_config, tiny_target

SIZE = 12


def distribution_of(entropies: list[float]) -> dict[Path, list[float]]:
    """A distribution whose entropy along its likeliest path, all ones, is what is asked for, one number per depth."""
    distribution: dict[Path, list[float]] = {}
    for depth, wanted in enumerate(entropies):
        low, high = 1 / SIZE, 1.0
        for _ in range(60):
            chance = (low + high) / 2
            row = [(1 - chance) / (SIZE - 1)] * SIZE
            row[1] = chance
            entropy = -sum(value * math.log(value) for value in row if value)
            low, high = (chance, high) if entropy > wanted else (low, chance)
        distribution[(1,) * depth] = row
    return distribution


def draft(config: SvipConfig, distribution: dict[Path, list[float]], budget: int = 60, depth: int = 60) -> DraftTree:
    proposer = GrowingProposer(ToySource(table(distribution, SIZE)), Svip(config), 40)
    (tree,) = proposer.propose([proposer.open(0)], [draft_request([0], budget, depth)])
    return tree


@pytest.mark.parametrize("doubt", [0, 3, 7])
def test_the_chain_ends_behind_the_doubtful_token(doubt: int) -> None:
    """Guards against a chain cut before the token in doubt, a root or a factor left out, and bits taken for nats."""
    entropies = [0.59] * 12
    entropies[doubt] = 0.61  # sqrt(0.15 * 0.6) is 0.3
    tree = draft(SvipConfig(), distribution_of(entropies))
    assert tree.topology.is_chain
    assert len(tree) - 1 == tree.draft_passes == doubt + 1
    assert len(draft(SvipConfig(entropy_threshold=0.31), distribution_of(entropies))) - 1 > doubt + 1


@pytest.mark.parametrize(("budget", "depth", "length"), [(60, 60, 40), (9, 60, 9), (60, 7, 7), (0, 60, 0)])
def test_the_cap_is_forty(budget: int, depth: int, length: int) -> None:
    """Guards against chains without an end where a draft is sure of itself."""
    assert len(draft(SvipConfig(), distribution_of([0.01] * 60), budget, depth)) - 1 == length


@pytest.mark.parametrize("heat", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(5))
def test_without_a_limit_on_doubt_it_is_the_chain(heat: float, seed: int) -> None:
    """Guards against other tokens than the chain's, at any temperature, and against requests that share their end."""
    source = ToySource(blend(0, SIZE, other=seed, sharpness=3))
    requests = [draft_request([seed, i], 3 + 5 * i, 9, i, temperature=heat) for i in range(3)]
    grown = GrowingProposer(source, Svip(SvipConfig(entropy_threshold=math.inf)), 40)
    chain = StaticProposer(source, Chain(), 40, torch.device("cpu"))
    drafted = grown.propose([grown.open(slot) for slot in range(3)], requests)
    expected = chain.propose([chain.open(slot) for slot in range(3)], requests)
    for got, want in zip(drafted, expected, strict=True):
        assert got.tokens.tolist() == want.tokens.tolist()
        assert (got.topology, got.draft_passes) == (want.topology, want.draft_passes)


def test_requests_of_a_batch_end_apart() -> None:
    """Guards against one request's doubt that ends its neighbours."""
    distribution: dict[Path, list[float]] = {}
    for index, doubt in enumerate((1, 4, 2)):
        entropies = [0.1] * 10
        entropies[doubt] = 2.0
        distribution |= {(index, *path): row for path, row in distribution_of(entropies).items()}
    proposer = GrowingProposer(ToySource(table(distribution, SIZE)), Svip(SvipConfig()), 40)
    requests = [draft_request([0, index], 40, 40) for index in range(3)]
    trees = proposer.propose([proposer.open(slot) for slot in range(len(requests))], requests)
    assert [len(tree) - 1 for tree in trees] == [2, 5, 3]


class Whole:
    """A source that is asked for all candidates, so that their scores are the whole distribution, and watched."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.entropies: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def expand(self, states: Sequence[Any], frontier: Frontier, width: int) -> Candidates:
        found: Candidates = self._source.expand(states, frontier, VOCAB)
        assert frontier.wants_entropy
        assert found.log_probs is not None
        assert found.entropy is not None
        torch.testing.assert_close(found.entropy, torch.special.entr(found.log_probs.exp()).sum(dim=-1))
        self.entropies += found.entropy.tolist()
        return Candidates(found.tokens[:, :width], found.log_probs[:, :width], found.passes, found.entropy)


@pytest.mark.parametrize("heat", [0.0, 0.8])
@pytest.mark.parametrize("kind", [*KINDS, "draft-lm"])
def test_sources_say_the_entropy_of_their_scores(kind: str, heat: float) -> None:
    """Guards against a source that says none, that of a few candidates instead of the whole law, or another row's."""
    target = tiny_target(tiny_config("llama"))
    source = Whole(DraftLM(early_exit(target, 2), VOCAB) if kind == "draft-lm" else source_of(kind, target))
    proposer = GrowingProposer(source, Svip(SvipConfig(entropy_threshold=math.inf)), 3)
    params = [SamplingParams(max_new_tokens=5, temperature=heat, seed=seed) for seed in range(2)]
    decode(Engine(target), PROMPTS[:2], params, [proposer] * 2)
    assert len(set(source.entropies)) > 3
    assert all(0 <= entropy <= math.log(VOCAB) for entropy in source.entropies)
