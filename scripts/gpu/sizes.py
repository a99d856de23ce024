"""Sizes to measure: a target of Qwen3-8B's shape and drafters of the published shapes, or small ones."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from outpace.drafters.dflash.net import DFlashConfig, DFlashNet
from outpace.drafters.domino.net import DominoConfig, DominoNet
from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.models.attention import ATTENTION_NAME, register_attention


@dataclass(frozen=True)
class Sizes:
    """One set of sizes.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, inner, vocab: of the target.
        draft_layers, block, taps: of DFlash and Domino; taps are layers whose outputs are read.
        state, rank: G and r of Domino's head.
        draft_vocab: of EAGLE-3.
        eagle_depth, eagle_breadth: levels of EAGLE-3's tree and rows of each.
        contexts, batches, trees: the values to time; trees are verified rows per request.
        repeats: number of measurements for a median.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    draft_layers: int
    block: int
    taps: tuple[int, ...]
    state: int
    rank: int
    draft_vocab: int
    eagle_depth: int
    eagle_breadth: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    trees: tuple[int, ...]
    repeats: int


QWEN3_8B = Sizes(
    layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, inner=12288, vocab=151936, draft_layers=5, block=16,
    taps=(1, 9, 17, 25, 33), state=1024, rank=256, draft_vocab=32000, eagle_depth=8, eagle_breadth=10,
    contexts=(1024, 8192, 32768), batches=(1, 2, 4, 8, 16, 32), trees=(8, 16, 17, 60), repeats=15,
)  # fmt: skip
SMALL = Sizes(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, inner=48, vocab=160, draft_layers=1, block=4, taps=(0, 1),
    state=16, rank=16, draft_vocab=64, eagle_depth=2, eagle_breadth=2, contexts=(24,), batches=(1, 2), trees=(4, 5),
    repeats=1,
)  # fmt: skip


def random_target(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A Qwen3 with random weights, made on its device: a pass costs what a trained one's does."""
    config = Qwen3Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=False,
    )
    register_attention()
    with torch.device(device):  # on a CPU drawing billions of numbers would take minutes
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    return model.to(device).eval()


def drafter_configs(sizes: Sizes) -> tuple[DFlashConfig, DominoConfig, Eagle3Config]:
    """The configs of z-lab/Qwen3-8B-DFlash-b16, Huang2020/Qwen3-8B-Domino-b16 and AngelSlim/Qwen3-8B_eagle3."""
    layer: dict[str, Any] = {
        "hidden_size": sizes.hidden, "intermediate_size": sizes.inner, "heads": sizes.heads,
        "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim, "rope_theta": 1e6, "max_positions": 40960,
        "vocab_size": sizes.vocab, "target_hidden_size": sizes.hidden, "rms_eps": 1e-6,
    }  # fmt: skip
    block: dict[str, Any] = {
        "layers": sizes.draft_layers, "target_layers": sizes.layers, "block_size": sizes.block,
        "mask_token_id": sizes.vocab - 1, "target_layer_ids": sizes.taps,
    }  # fmt: skip
    head: dict[str, Any] = {
        "emb_dim": sizes.rank, "gru_hidden_dim": sizes.state, "shift_label": True, "pure_draft_prefix_len": 1,
    }  # fmt: skip
    eagle = Eagle3Config(**layer, draft_vocab_size=sizes.draft_vocab)
    return DFlashConfig(**layer, **block), DominoConfig(**layer, **block, **head), eagle


def random_drafters(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[DFlashNet, DominoNet, Eagle3Net]:
    """Drafters with random weights."""
    dflash, domino, eagle = drafter_configs(sizes)
    nets: list[Any] = []
    for kind, config in ((DFlashNet, dflash), (DominoNet, domino), (Eagle3Net, eagle)):
        with torch.device(device):
            net: nn.Module = kind(config)
        net = net.to(device, dtype)
        for weight in net.parameters():
            nn.init.ones_(weight) if weight.ndim == 1 else nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        nets.append(net)
    nets[2].d2t.copy_(torch.zeros_like(nets[2].d2t))
    return nets[0], nets[1], nets[2]
