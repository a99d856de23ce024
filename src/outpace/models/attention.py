"""Tree attention over slots, registered as an attention implementation of unmodified transformers models.

The requests of a pass are packed into one row of tokens, and each attends to its own slot at its exact length. On a GPU
one call per layer attends for all of them (`gpu.tree_attention`). On a CPU attention is batch-invariant. Stock
attention would copy grouped keys, read unused positions and need one rectangular mask.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.cache.passes import PassCache
from outpace.cache.slots import AttentionSettings, Segment, in_blocks
from outpace.gpu.tree_attention import attend_plan
from outpace.kernels import attention as kernel_attention
from outpace.lib.errors import UnsupportedModel

ATTENTION_NAME = "outpace"
_ROW_BLOCK = 4
# Arguments that attention interfaces receive without changing what is computed here.
_HARMLESS = frozenset({"dropout", "position_ids", "use_cache", "is_causal", "output_attentions", "cache_position"})


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    slots: PassCache | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed pass: query [1, heads, T, head_dim] -> [1, T, heads, head_dim].

    Raises:
        UnsupportedModel: the model asks for attention features that this function does not compute.
    """
    del key, value, attention_mask  # replaced by the slots and the segments' visibility
    unknown = [name for name, setting in kwargs.items() if setting is not None and name not in _HARMLESS]
    if slots is None or scaling is None or unknown:
        raise UnsupportedModel(f"{type(module).__name__} uses attention features that are not supported: {unknown}")
    settings = AttentionSettings(module.layer_idx, scaling, sliding_window, softcap)  # type: ignore[arg-type]
    slots.settings[settings.layer] = settings
    if slots.tiles is not None:
        assert slots.kv is not None, "tables are of slots"
        return attend_plan(query[0], slots.kv, slots.tiles, settings)[None], None
    if slots.watch is not None:
        slots.watch(query[0], slots.segments, settings)
    return attend_segments(query[0], slots.segments, settings)[None], None


def attend_segments(query: Tensor, segments: Sequence[Segment], settings: AttentionSettings) -> Tensor:
    """[T, heads, head_dim] attention on a CPU of packed rows [heads, T, head_dim], each to its own segment's slot, by
    the compiled kernels, else by their reference."""
    if kernel_attention.has_kernels(segments[0].kv):
        return kernel_attention.attend(query, segments, settings)
    if len(segments) == 1:
        return reference_attention(query, segments[0], settings)
    return torch.cat(
        [
            reference_attention(query[:, segment.start : segment.start + segment.count], segment, settings)
            for segment in segments
        ]
    )


def reference_attention(query: Tensor, segment: Segment, settings: AttentionSettings) -> Tensor:
    """Grouped attention whose result for a node depends on its path alone, to the last bit.

    The same token can be computed in trees of different shapes and by plain decoding, with its keys at different
    positions in storage. Sums over keys run in float64, where the order of summation disappears in the final rounding;
    products with keys run in float32 in sizes that one kernel serves (`products`). One flipped bit would grow to full
    bfloat16 noise within a few layers.
    """
    keys, values, bias = segment.seen(settings.layer, settings.window)  # [G, L and more, D] float32, [G, L, D] float64
    scores = attention_scores(query, keys, bias, values.shape[1], settings)
    output = torch.bmm(torch.softmax(scores, dim=-1, dtype=torch.float64), values.double())  # [G, H/G*N, D]
    return output.view(query.shape).transpose(0, 1).to(query.dtype)  # [N, H, D]


def attention_scores(
    query: Tensor, keys: Tensor, bias: Tensor | None, length: int, settings: AttentionSettings
) -> Tensor:
    """Logarithms [G, H/G*N, L] of the attention weights of queries [H, N, D], up to a constant for each row. `keys`,
    `bias`: as of `Segment.seen`, of `length` visible rows."""
    rows = (query.to(keys.dtype) * settings.scaling).reshape(len(keys), -1, query.shape[-1])  # [G, H/G*N, D]
    scores = products(rows, keys, length)  # [G, H/G*N, L]
    if settings.softcap is not None:
        scores = scores.div_(settings.softcap).tanh_().mul_(settings.softcap)
    if bias is not None:
        scores.unflatten(1, (-1, query.shape[1]))[..., length - bias.shape[-1] :] += bias
    return scores


def products(rows: Tensor, keys: Tensor, length: int) -> Tensor:
    """[G, R, L] batch-invariant products of rows [G, R, D] with the first L keys.

    The batched kernel is batch-invariant for blocks of 4 rows and 16 keys, also when threads split the product. Smaller
    pieces, and batches of one, run other kernels, so they are padded.

    Args:
        rows: any number.
        keys: [G, at least L in whole blocks, D]; products with keys after the first L are discarded.
        length: L.
    """
    groups, count, _ = rows.shape
    keys = keys[:, : in_blocks(length)]
    if count % _ROW_BLOCK:
        rows = nn.functional.pad(rows, (0, 0, 0, -count % _ROW_BLOCK))
    if groups == 1:
        rows, keys = rows.expand(2, -1, -1), keys.expand(2, -1, -1)
    return torch.bmm(rows, keys.transpose(1, 2))[:groups, :count, :length]


def register_attention() -> None:
    """Make transformers know `tree_attention` as `ATTENTION_NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, tree_attention)
