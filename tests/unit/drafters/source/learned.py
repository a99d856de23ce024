"""Trained drafters on tiny random nets, and the usual shapes at sizes of tests: what several tests build alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.drafting import GrowingShape
from outpace.core.protocols import Proposer
from outpace.core.tree import DraftTree
from outpace.drafters.dart.net import DartConfig, DartNet
from outpace.drafters.dart.source import DartSource
from outpace.drafters.dflash.net import DFlashConfig, DFlashNet
from outpace.drafters.dflash2.net import DFlash2Config, DFlash2Net
from outpace.drafters.dflash2.source import DFlash2Source
from outpace.drafters.domino.net import DominoConfig, DominoNet
from outpace.drafters.domino.source import block_source
from outpace.drafters.dspark.net import DSparkConfig, DSparkNet
from outpace.drafters.dspark.source import DSparkSource
from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.drafters.eagle3.source import EagleSource
from outpace.drafters.lattice.net import LatticeConfig, LatticeNet
from outpace.drafters.lattice.source import LatticeSource
from outpace.drafters.medusa.net import MedusaConfig, MedusaNet
from outpace.drafters.medusa.source import MedusaSource
from outpace.drafters.packing import pack_net
from outpace.models.packed import PackedModel
from outpace.models.target import PackedTarget
from outpace.trees.proposer import GrowingProposer, StaticProposer
from outpace.trees.shapes.beam import Beam, BeamConfig, DddConfig, DynamicDepth
from outpace.trees.shapes.dynatree import DynaTreeConfig, DynaTreeShape, FixedTree, FixedTreeConfig
from outpace.trees.shapes.gates import Cut, CutConfig, Echo, EchoConfig, Gated, GatedConfig
from outpace.trees.shapes.rank_paths import Chain, MedusaTemplate
from outpace.trees.shapes.svip import Svip, SvipConfig
from outpace.trees.shapes.table import shapes
from tests.unit.models.tiny import VOCAB, random_ids

GROWING: dict[str, tuple[Callable[[], GrowingShape], int]] = {
    "beam": (lambda: Beam(BeamConfig(depth=4, breadth=3)), 10),
    "fixed": (lambda: FixedTree(FixedTreeConfig(depth=3, breadth=2, min_path_prob=0)), 9),
    # A gate for each stage, none of which is always open.
    "gated": (lambda: Gated(GatedConfig(depth=4, breadth=3, checkpoints=(1, 2, 3))), 10),
    "ddd": (lambda: DynamicDepth(DddConfig(depth=5, breadth=3, checkpoints=(2, 4))), 10),
    "svip": (lambda: Svip(SvipConfig()), 8),
    "echo": (lambda: Echo(EchoConfig(depth=3, breadth=3)), 10),
    "cut": (lambda: Cut(CutConfig(min_prob=0.01)), 8),
    "dynatree": (lambda: DynaTreeShape(DynaTreeConfig()), 12),
}
"""Shapes that grow, and their budgets."""
SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "rms_eps": 1e-6,
    "rope_theta": 10000.0, "max_positions": 512, "vocab_size": VOCAB, "target_hidden_size": 48,
}  # fmt: skip
BLOCK: dict[str, Any] = {
    "layers": 2, "target_layers": 3, "block_size": 6, "mask_token_id": 7, "target_layer_ids": (0, 1),
}  # fmt: skip
SUBSET = torch.arange(0, VOCAB, 3)  # for kinds whose drafts come from these ids alone
PROMPTS = [random_ids(9, 1), random_ids(30, 2), random_ids(3, 3)]
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash-sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5},
    "domino": {"shift_label": False, "pure_draft_prefix_len": 0},
    "domino-shifted": {"shift_label": True, "pure_draft_prefix_len": 1},
    "lattice": {"rank": 6, "candidates": 5},
    "lattice-subset": {"rank": 20, "candidates": 8},
    "dart": {"draft_vocab_size": VOCAB, "draft_length": 5},
    "dart-ranked": {"draft_vocab_size": 60, "draft_length": 2},
    "dart-subset": {"draft_vocab_size": VOCAB, "draft_length": 4},
    "medusa": {"head": "own", "layers": 2},
    "medusa-shared": {"head": "shared"},
    "medusa-target": {"head": "target"},
    "medusa-chained": {"head": "target", "bias": False, "chained": True},
    "medusa-subset": {"head": "own"},
    "dflash-subset": {},
    "domino-subset": {"shift_label": True, "pure_draft_prefix_len": 1},
    "dspark": {"markov_rank": 8},
    "dspark-subset": {"markov_rank": 8},
    "dspark-confident": {"markov_rank": 8, "enable_confidence_head": True, "confidence_head_with_markov": True},
    "dflash2": CONVOLVED,
    "dflash2-subset": CONVOLVED,
    "eagle3-subset": {"draft_vocab_size": 60, "own_head": True},
    "eagle3": {"draft_vocab_size": VOCAB},
    "eagle3-ranked": {"draft_vocab_size": 60, "norm_output": True, "qk_norm": True},
}


def random_net(net: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(5)
    for weight in net.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + (1.0 if weight.ndim == 1 else 0.0))
    return net


def source_of(kind: str, target: PackedTarget, pack: bool = False, **options: Any) -> Any:
    """A source over a random net, laid out for this machine's kernels or not."""
    taps, vocabulary = (0, 1, 2), SUBSET if kind.endswith("-subset") else None
    if kind.startswith("eagle3"):
        net = random_net(Eagle3Net(Eagle3Config(**SIZES, taps=taps, **KINDS[kind])))
        if net.d2t is not None:
            net.d2t.copy_(torch.arange(60))  # even ids only
        if pack:
            pack_net(net)
        options |= {"vocabulary": vocabulary}
        return EagleSource(net.to(target.device), target, **options)
    if kind.startswith("dart"):
        dart = random_net(DartNet(DartConfig(**SIZES, taps=taps, **KINDS[kind])))
        if dart.d2t is not None:
            dart.d2t.copy_(torch.arange(60))
        return DartSource(dart.to(target.device), target, vocabulary=vocabulary, **options)
    if kind.startswith("medusa"):
        heads = random_net(MedusaNet(MedusaConfig(hidden_size=48, vocab_size=VOCAB, heads=5, **KINDS[kind])))
        return MedusaSource(heads.to(target.device), target.head, 3, vocabulary=vocabulary, **options)
    make: Callable[..., Any] = block_source
    if kind.startswith("dspark"):
        block: DFlashNet = DSparkNet(DSparkConfig(**SIZES, **BLOCK, **KINDS[kind]))
        make = DSparkSource
    elif kind.startswith("dflash2"):
        block, make = DFlash2Net(DFlash2Config(**SIZES, **BLOCK, **KINDS[kind])), DFlash2Source
    elif kind.startswith("lattice"):
        block, make = LatticeNet(LatticeConfig(**SIZES, **BLOCK, **KINDS[kind])), LatticeSource
        block.pair_head.temperatures.copy_(torch.tensor([1.0, 1.5, 0.7, 2.0, 1.0, 1.3]))
    elif kind.startswith("domino"):
        block = DominoNet(DominoConfig(**SIZES, **BLOCK, emb_dim=8, gru_hidden_dim=12, **KINDS[kind]))
    else:
        block = DFlashNet(DFlashConfig(**SIZES, **BLOCK, **KINDS[kind]))
    head = target.head if vocabulary is None else target.head.restricted(vocabulary)
    random_net(block)
    if pack:
        pack_net(block)
    return make(block.to(target.device), target, head, **options)


def proposer_of(shape: str, source: Any, device: str = "cpu", leaves_room: bool = False) -> Proposer:
    if shape == "chain":
        return StaticProposer(source, Chain(), 8, torch.device(device), leaves_room)
    if shape == "template":
        return StaticProposer(source, MedusaTemplate(), 20, torch.device(device), leaves_room)
    settings = shapes()[shape].settings  # of a shape that was added and is not above, its own
    growing, budget = GROWING.get(shape) or (lambda: shapes()[shape].growing(settings()), 10)  # type: ignore[misc]
    return GrowingProposer(source, growing(), budget, leaves_room)


@dataclass(frozen=True)
class Every:
    """A selector whose rows are known: each `step`-th that is committed."""

    model: PackedModel
    step: int

    def select(self, slot: int, prompt: Sequence[int]) -> None:
        pass

    def view(self, slot: int, selected: Tensor | None) -> Tensor:
        return torch.arange(0, self.model.kv.lengths[slot], self.step, dtype=torch.int32)[None, None]


def assert_same_trees(found: Sequence[DraftTree], wanted: Sequence[DraftTree]) -> None:
    """The same shapes and tokens, and scores but for rounding."""
    for one, other in zip(found, wanted, strict=True):
        assert one.topology.parents == other.topology.parents
        assert one.tokens.tolist() == other.tokens.tolist()
        if one.scores is not None:
            torch.testing.assert_close(one.scores, other.scores, atol=1e-4, rtol=1e-4)
