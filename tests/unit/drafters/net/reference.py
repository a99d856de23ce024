"""The drafters' equations once more, in numpy float64, over whole sequences, without a line of the nets' code."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

Array = NDArray[np.float64]


def weights_of(net: nn.Module) -> dict[str, Array]:
    """A net's weights and buffers as float64 arrays, by name."""
    return {name: tensor.double().numpy() for name, tensor in net.state_dict().items()}


def norm(x: Array, weight: Array, eps: float) -> Array:
    scaled: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return scaled


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """x [T, heads, D]: dimensions i and i + D/2 are the two parts of a complex number, turned by position."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-np.arange(half) / half)  # [T, D/2]
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate((turned.real, turned.imag), axis=-1)


def attention(query: Array, key: Array, value: Array, seen: Sequence[list[int]] | None = None) -> Array:
    """Attention, one row and one head at a time: of each row over the keys that it sees, or causal."""
    rows, heads, width = query.shape
    group = heads // key.shape[1]
    out = np.zeros_like(query)
    for t in range(rows):
        own = list(range(t + 1)) if seen is None else seen[t]
        for head in range(heads):
            scores = key[own, head // group] @ query[t, head] / np.sqrt(width)
            shares = np.exp(scores - scores.max())
            out[t, head] = (shares / shares.sum()) @ value[own, head // group]
    return out


def layer(w: dict[str, Array], config: Any, pairs: Array, residual: Array, positions: Array) -> Array:
    """Attention on rows [T, 2H], then residual, MLP, residual: [T, H]."""

    def project(name: str) -> Array:
        rows = pairs @ w[f"midlayer.self_attn.{name}_proj.weight"].T + w.get(
            f"midlayer.self_attn.{name}_proj.bias", 0.0
        )
        heads: Array = rows.reshape(len(pairs), -1, config.head_dim)
        return heads

    query, key, value = project("q"), project("k"), project("v")
    if config.qk_norm:
        query = norm(query, w["midlayer.self_attn.q_norm.weight"], config.rms_eps)
        key = norm(key, w["midlayer.self_attn.k_norm.weight"], config.rms_eps)
    theta = config.rope_theta
    seen = attention(rotate(query, positions, theta), rotate(key, positions, theta), value).reshape(len(pairs), -1)
    h = residual + seen @ w["midlayer.self_attn.o_proj.weight"].T + w.get("midlayer.self_attn.o_proj.bias", 0.0)
    inner = norm(h, w["midlayer.post_attention_layernorm.weight"], config.rms_eps)
    gated = silu(inner @ w["midlayer.mlp.gate_proj.weight"].T) * (inner @ w["midlayer.mlp.up_proj.weight"].T)
    out: Array = h + gated @ w["midlayer.mlp.down_proj.weight"].T
    return out


def eagle3_fuse(w: dict[str, Array], config: Any, features: Array) -> Array:
    """g = fc(concat), with the norms before it that the variant has."""
    if config.norm_before_fc:
        features = norm(features, w["input_norm.weight"], config.rms_eps)
    if config.fc_norm:
        width = config.target_hidden_size
        parts = [features[:, i * width : (i + 1) * width] for i in range(config.tap_count)]
        parts = [norm(part, w[f"fc_norm.{i}.weight"], config.rms_eps) for i, part in enumerate(parts)]
        features = np.concatenate(parts, axis=-1)
    fused: Array = features @ w["fc.weight"].T
    return fused


def eagle3(w: dict[str, Array], config: Any, embeddings: Array, g: Array, positions: Array) -> tuple[Array, Array]:
    """(state of the next step, what the head reads) of a whole sequence."""
    eps = config.rms_eps
    normed = norm(g, w["midlayer.hidden_norm.weight"], eps)
    pairs = np.concatenate((norm(embeddings, w["midlayer.input_layernorm.weight"], eps), normed), axis=-1)
    h = layer(w, config, pairs, normed if config.norm_before_residual else g, positions)
    hidden = norm(h, w["norm.weight"], eps)
    return (hidden if config.norm_output else h), hidden


def dart(w: dict[str, Array], config: Any, embeddings: Array, features: Array) -> Array:
    """Logits [draft_length + 1, Vd] after a whole sequence."""
    g, eps, length = features @ w["fc.weight"].T, config.rms_eps, config.draft_length
    normed = norm(g, w["midlayer.hidden_norm.weight"], eps)
    pairs = np.concatenate((norm(embeddings, w["midlayer.input_layernorm.weight"], eps), normed), axis=-1)
    mask = w["midlayer.mask_rep"]
    pairs = np.concatenate((pairs, np.tile(mask, (length, 1))))
    residual = np.concatenate((g, np.tile(mask[: config.hidden_size], (length, 1))))
    h = layer(w, config, pairs, residual, np.arange(len(pairs), dtype=np.float64))[-length - 1 :]
    twice = norm(norm(h, w["norm.weight"], eps), w["norm.weight"], eps)
    logits: Array = twice @ w["lm_head.weight"].T
    return logits
