"""Learned drafters on tiny random nets: lossless, counted in passes, cached as if computed afresh."""

from typing import Any

import pytest
import torch
from torch import nn

from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.drafters.block import BlockSource
from outpace.engine.engine import Engine
from outpace.models.target import TransformersTarget
from outpace.nets.dflash import DFlashConfig, DFlashNet
from outpace.nets.domino import DominoConfig, DominoNet
from outpace.shaping.dynatree import DynaTree, DynaTreeConfig
from outpace.shaping.fixed import FixedTree, FixedTreeConfig
from outpace.shaping.growing import GrowingProposer
from outpace.shaping.proposer import StaticProposer
from outpace.shaping.rank_paths import Chain
from outpace.testing import assert_lossless
from tests.unit.models.tiny import VOCAB, random_ids, tiny_config, tiny_target

PROMPTS = [random_ids(9, 1), random_ids(30, 2), random_ids(3, 3)]
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash-sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5},
    "domino": {"shift_label": False, "pure_draft_prefix_len": 0},
    "domino-shifted": {"shift_label": True, "pure_draft_prefix_len": 1},
}


def net_of(kind: str) -> DFlashNet:
    sizes: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "layers": 2,
        "rope_theta": 10000.0, "max_positions": 512, "vocab_size": VOCAB, "target_hidden_size": 48, "target_layers": 3,
        "block_size": 6, "mask_token_id": 7, "target_layer_ids": (0, 1),
    }  # fmt: skip
    if kind.startswith("domino"):
        sizes |= {"emb_dim": 8, "gru_hidden_dim": 12}
        net: DFlashNet = DominoNet(DominoConfig(**sizes, **KINDS[kind]))
    else:
        net = DFlashNet(DFlashConfig(**sizes, **KINDS[kind]))
    generator = torch.Generator().manual_seed(5)
    for weight in net.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + (1.0 if weight.ndim == 1 else 0.0))
    return net


def source_of(kind: str, target: TransformersTarget, **options: Any) -> BlockSource:
    embed: nn.Module = target.decoder.get_input_embeddings()  # type: ignore[operator]
    return BlockSource(net_of(kind), embed, target.head, target.max_length, target.max_slots, **options)


def proposer_of(shape: str, source: BlockSource) -> Proposer:
    if shape == "chain":
        return StaticProposer(source, Chain(), 8, torch.device("cpu"))
    if shape == "fixed":
        return GrowingProposer(source, FixedTree(FixedTreeConfig(depth=3, breadth=2, threshold=0)), 9)
    return GrowingProposer(source, DynaTree(DynaTreeConfig()), 12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["chain", "fixed", "dynatree"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"repetition_penalty": 1.3}], ids=str)
def test_lossless(kind: str, shape: str, options: dict[str, Any]) -> None:
    """Guards against drafts that leak into the target, alone and in a ragged batch, whatever the source and shape."""
    target = tiny_target(tiny_config("llama"))
    params = [SamplingParams(max_new_tokens=24, seed=seed, **options) for seed in range(3)]
    sessions = assert_lossless(
        lambda: Engine(target, prefill_chunk=8),
        lambda known: proposer_of(shape, source_of(kind, target)),
        PROMPTS,
        params,
    )
    assert all(session.metrics.drafted for session in sessions)
    assert all(session.metrics.draft_passes <= session.metrics.steps for session in sessions), "one pass per round"
