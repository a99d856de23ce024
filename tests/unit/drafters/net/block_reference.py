"""DFlash and Domino once more, from the papers' equations: float64, one request, attention one row and head at a time.

Nothing is shared with the package: weights come as a dictionary of tensors, sizes as a plain dictionary.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.unit.drafters.net.reference import Array, attention, norm, rotate, silu

Weights = dict[str, Tensor]
EPS = 1e-6


def array(tensor: Tensor) -> Array:
    values: Array = tensor.detach().double().numpy()
    return values


def linear(w: dict[str, Array], name: str, rows: Array) -> Array:
    out: Array = rows @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)
    return out


def heads_of(w: dict[str, Array], name: str, rows: Array, positions: Array, sizes: dict[str, Any]) -> Array:
    """Normed and rotated query or key heads [T, heads, D]."""
    heads = linear(w, f"{name}_proj", rows).reshape(len(rows), -1, sizes["head_dim"])
    return rotate(norm(heads, w[f"{name}_norm.weight"], EPS), positions, sizes["rope_theta"])


def sees(sizes: dict[str, Any], layer: int, own: int, other: int, anchor: int) -> bool:
    """Whether a block row at position `own` sees the key at position `other`."""
    if sizes["layer_types"][layer] == "full_attention":
        return True
    in_window = own - other < sizes["sliding_window"]
    return in_window and (other < anchor or not sizes.get("sliding_causal", True) or other <= own)


def dflash_block(weights: Weights, sizes: dict[str, Any], features: Tensor, block: Tensor) -> Tensor:
    """Outputs [B, H] of a block behind committed positions 0 .. T-1 with features [T, taps * Ht]."""
    w, anchor, hidden = {name: array(weight) for name, weight in weights.items()}, len(features), array(block)
    context = norm(linear(w, "fc", array(features)), w["hidden_norm.weight"], EPS)
    positions = np.arange(anchor + len(hidden), dtype=np.float64)
    for layer in range(sizes["layers"]):
        prefix, attended = f"layers.{layer}", f"layers.{layer}.self_attn"
        normed = norm(hidden, w[f"{prefix}.input_layernorm.weight"], EPS)
        rows = np.concatenate((context, normed))
        queries = heads_of(w, f"{attended}.q", normed, positions[anchor:], sizes)
        keys = heads_of(w, f"{attended}.k", rows, positions, sizes)
        values = linear(w, f"{attended}.v_proj", rows).reshape(keys.shape)
        seen = [
            [other for other in range(len(rows)) if sees(sizes, layer, own, other, anchor)]
            for own in range(anchor, len(rows))
        ]
        merged = attention(queries, keys, values, seen).reshape(len(hidden), -1)
        hidden = hidden + linear(w, f"{attended}.o_proj", merged)
        inner = norm(hidden, w[f"{prefix}.post_attention_layernorm.weight"], EPS)
        gated = silu(linear(w, f"{prefix}.mlp.gate_proj", inner)) * linear(w, f"{prefix}.mlp.up_proj", inner)
        hidden = hidden + linear(w, f"{prefix}.mlp.down_proj", gated)
    return torch.from_numpy(norm(hidden, w["norm.weight"], EPS))


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
