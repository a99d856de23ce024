"""Domino's head by kernels behind the source: the trees of its own modules, and chains in one go."""

from typing import Any

import pytest
import torch

from outpace.core.protocols import PromptChunk
from outpace.drafters.domino.gpu import chains
from outpace.drafters.domino.gpu.chains import Chains
from outpace.drafters.domino.gpu.head import HeadWeights, TritonHead
from outpace.drafters.domino.source import DominoSource
from outpace.models.attention import ATTENTION_NAME
from outpace.models.target import TransformersTarget
from outpace.testing import draft_request
from tests.unit.drafters.source.learned import PROMPTS, proposer_of, source_of
from tests.unit.drafters.source.test_domino_cost import propose
from tests.unit.gpu.worlds import DEVICE
from tests.unit.models.tiny import stock_model, tiny_config


def sources(kind: str) -> tuple[DominoSource, DominoSource]:
    """The same net, once with its head's kernels and once by its modules, both without what CPUs have."""
    model = stock_model(tiny_config("llama"), ATTENTION_NAME).to(DEVICE)  # type: ignore[arg-type]
    target = TransformersTarget(model, 256, 4, (), pack=False, tiled=True)
    made: list[DominoSource] = [source_of(kind, target) for _ in range(2)]
    for source in made:
        source._causal, source._native, source.chains = None, None, None
    fast, embed = made[0], target.embedding
    net: Any = fast.net
    fast._causal = TritonHead(HeadWeights.of(net.head, None))
    corrected = [fast.net.config.draft_step(depth).corrected for depth in range(1, fast.depth + 1)]
    fast.chains = Chains(fast._causal.weights, embed, corrected)
    return made[0], made[1]


@pytest.mark.parametrize("kind", ["domino", "domino-shifted"])
@pytest.mark.parametrize("shape", ["chain", "fixed", "beam", "cut"])
@pytest.mark.parametrize("count", [1, 3])
def test_trees_are_those_of_the_modules(kind: str, shape: str, count: int) -> None:
    """Guards against a head whose kernels read another request's block, another depth, or a sibling's state."""
    fast, slow = sources(kind)
    for _ in range(2):  # the second round writes over the first one's buffers
        found, expected = (propose(shape, source, count, str(DEVICE)) for source in (fast, slow))
        for one, other in zip(found, expected, strict=True):
            assert one.topology.parents == other.topology.parents
            assert one.tokens.tolist() == other.tokens.tolist()


def test_a_chain_is_one_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the loop over depths on the host, each with several launches per request."""
    fast, _ = sources("domino-shifted")
    assert fast.chains is not None
    calls, run = 0, fast.chains.rollout

    def counted(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal calls
        calls += 1
        return run(*inputs)

    monkeypatch.setattr(fast.chains, "rollout", counted)
    monkeypatch.setattr(TritonHead, "correct", None)
    trees = propose("chain", fast, 3, str(DEVICE))
    assert calls == 1
    assert len(trees) == 3
    assert all(len(tree) > 2 for tree in trees)
    assert tuple(sorted(chains.BUCKETS)) == chains.BUCKETS


def test_chains_of_an_earlier_round_are_forgotten() -> None:
    """Guards against a greedy request that goes on alone below a sampled one's last level with the chain that it had
    in the round before."""
    drafted = []
    for source in sources("domino-shifted"):
        proposer = proposer_of("chain", source, str(DEVICE))
        states = [proposer.open(slot) for slot in range(2)]
        for state, ids in zip(states, PROMPTS, strict=False):
            features = torch.randn(len(ids) - 1, 96, generator=torch.Generator().manual_seed(len(ids)))
            proposer.prefill([state], [PromptChunk(torch.tensor(ids[:-1]), None, features.to(DEVICE))])
        for temperature, last in ((0.0, 5), (0.7, 99)):
            wanted = [
                draft_request(PROMPTS[0], 5, 2, seed=1, temperature=temperature),
                draft_request([*PROMPTS[1][:-1], last], 5, 5, seed=2),
            ]
            drafted.append([tree.tokens.tolist() for tree in proposer.propose(states, wanted)])
    assert drafted[:2] == drafted[2:]
