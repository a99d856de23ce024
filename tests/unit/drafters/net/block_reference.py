"""DFlash and Domino once more, from the papers' equations: float64, one request, one head, one row at a time.

Nothing is shared with the package: weights come as a dictionary of tensors, sizes as a plain dictionary.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def rms_norm(row: Tensor, weight: Tensor, eps: float) -> Tensor:
    return row / torch.sqrt((row * row).sum() / row.numel() + eps) * weight


def linear(weights: Weights, name: str, row: Tensor) -> Tensor:
    out = weights[f"{name}.weight"] @ row
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def rotate(row: Tensor, position: int, theta: float) -> Tensor:
    """The pairs (i, i + D/2) are complex numbers, turned by position * theta^(-2i/D)."""
    half = row.numel() // 2
    turned = torch.empty_like(row)
    for index in range(half):
        angle = position * theta ** (-2 * index / row.numel())
        number = complex(float(row[index]), float(row[index + half])) * complex(math.cos(angle), math.sin(angle))
        turned[index], turned[index + half] = number.real, number.imag
    return turned


def heads_of(weights: Weights, name: str, row: Tensor, position: int, sizes: dict[str, Any]) -> list[Tensor]:
    """Normed and rotated query or key heads of one row."""
    norm = weights[f"{name[:-5]}_norm.weight"]
    heads = linear(weights, name, row).split(sizes["head_dim"])
    return [rotate(rms_norm(head, norm, 1e-6), position, sizes["rope_theta"]) for head in heads]


def sees(sizes: dict[str, Any], layer: int, own: int, other: int, anchor: int) -> bool:
    """Whether a block row at position `own` sees the key at position `other`."""
    if sizes["layer_types"][layer] == "full_attention":
        return True
    in_window = own - other < sizes["sliding_window"]
    return in_window and (other < anchor or not sizes.get("sliding_causal", True) or other <= own)


def dflash_block(weights: Weights, sizes: dict[str, Any], features: Tensor, block: Tensor) -> Tensor:
    """Outputs [B, H] of a block behind committed positions 0 .. T-1 with features [T, taps * Ht]."""
    weights = {name: weight.double() for name, weight in weights.items()}
    anchor, group = features.shape[0], sizes["heads"] // sizes["kv_heads"]
    context = [rms_norm(linear(weights, "fc", row.double()), weights["hidden_norm.weight"], 1e-6) for row in features]
    hidden = list(block.double())
    for layer in range(sizes["layers"]):
        prefix = f"layers.{layer}"
        attention = f"{prefix}.self_attn"
        normed = [rms_norm(row, weights[f"{prefix}.input_layernorm.weight"], 1e-6) for row in hidden]
        rows = context + normed
        keys = [heads_of(weights, f"{attention}.k_proj", row, index, sizes) for index, row in enumerate(rows)]
        values = [linear(weights, f"{attention}.v_proj", row).split(sizes["head_dim"]) for row in rows]
        after = []
        for index, row in enumerate(hidden):
            own = anchor + index
            seen = [other for other in range(len(rows)) if sees(sizes, layer, own, other, anchor)]
            merged = []
            for head, query in enumerate(heads_of(weights, f"{attention}.q_proj", normed[index], own, sizes)):
                scores = [float(query @ keys[other][head // group]) / math.sqrt(sizes["head_dim"]) for other in seen]
                shares = [math.exp(score - max(scores)) for score in scores]
                mixed = sum(
                    (share * values[other][head // group] for share, other in zip(shares, seen, strict=True)),
                    start=torch.zeros(sizes["head_dim"], dtype=torch.float64),
                )
                merged.append(mixed / sum(shares))
            row = row + linear(weights, f"{attention}.o_proj", torch.cat(merged))
            inner = rms_norm(row, weights[f"{prefix}.post_attention_layernorm.weight"], 1e-6)
            gate = linear(weights, f"{prefix}.mlp.gate_proj", inner)
            gated = gate / (1 + torch.exp(-gate)) * linear(weights, f"{prefix}.mlp.up_proj", inner)
            after.append(row + linear(weights, f"{prefix}.mlp.down_proj", gated))
        hidden = after
    return torch.stack([rms_norm(row, weights["norm.weight"], 1e-6) for row in hidden])


def gru(weights: Weights, embeddings: Sequence[Tensor], size: int) -> Tensor:
    """State after some tokens, from the equations of a gated recurrent unit without biases (gates r, z, n)."""
    state = torch.zeros(size, dtype=torch.float64)
    of_input = weights["head.prefix_gru.weight_ih_l0"].double().split(size)
    of_state = weights["head.prefix_gru.weight_hh_l0"].double().split(size)
    for embedding in embeddings:
        row = embedding.double()
        reset = 1 / (1 + torch.exp(-(of_input[0] @ row + of_state[0] @ state)))
        update = 1 / (1 + torch.exp(-(of_input[1] @ row + of_state[1] @ state)))
        new = torch.tanh(of_input[2] @ row + reset * (of_state[2] @ state))
        state = (1 - update) * new + update * state
    return state


def correction(weights: Weights, hidden: Tensor, state: Tensor) -> Tensor:
    """W2 silu(W1 [H; S]) of one row, [V]."""
    low = weights["head.embed_proj.0.weight"].double() @ torch.cat((hidden.double(), state.double()))
    return weights["head.embed_proj.2.weight"].double() @ (low / (1 + torch.exp(-low)))
