"""Sizes of new drafter layers: those of the target's own layers."""

from collections.abc import Collection
from typing import Any

from outpace.models.frozen import FrozenTarget

THETA, RMS_EPS = 10000.0, 1e-5  # for targets that have none of their own, like GPT-2


def layer_sizes(target: FrozenTarget, scalings: Collection[str]) -> dict[str, Any]:
    """Fields of a `LayerConfig`, and `rms_eps`.

    Args:
        target: whose layers they are.
        scalings: kinds of `rope_scaling` that the drafter can have. Of other targets it takes the base alone: its
            positions are its own, and need not turn as the target's do.
    """
    config, hidden = target.config, target.hidden_size
    heads: int = config.num_attention_heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    rotation: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    rotation = rotation.get("full_attention", rotation)  # families with windows have one for each kind of layer
    scaling = {key: value for key, value in rotation.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return {
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "intermediate_size": inner or 4 * hidden,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or hidden // heads,
        "rms_eps": getattr(config, "rms_norm_eps", None) or RMS_EPS,
        "rope_theta": float(rotation.get("rope_theta", THETA)),
        "rope_scaling": scaling if rotation.get("rope_type") in scalings else None,
        "max_positions": config.max_position_embeddings,
        "vocab_size": target.vocab_size,
    }
