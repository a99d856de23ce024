"""Attention over whole sequences, for nets that take whatever attention they are handed."""

import torch
from torch import Tensor


def attend_where(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Grouped attention under a mask.

    Args:
        query: [N, Q, heads, D].
        key, value: [N, K, kv_heads, D].
        visible: [N, Q, K] bool, or [Q, K] for all sequences alike; every row must see something.

    Returns:
        [N, Q, heads, D].
    """
    group = query.shape[2] // key.shape[2]
    # Fused kernels with a mask do not all take grouped heads; copying keys is cheap beside the rest of a training step.
    keys, values = (rows.repeat_interleave(group, dim=2).transpose(1, 2) for rows in (key, value))
    mask = visible if visible.ndim == 2 else visible[:, None]
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=mask)
    return out.transpose(1, 2)
