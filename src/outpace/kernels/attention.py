"""Attention over slots by the compiled kernels (cpp/attention.h).

Python reference: `models.attention.reference_attention`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.cache.slots import AttentionSettings, Segment, SlotKV
from outpace.kernels import structs
from outpace.kernels.build import address_of, call, loaded_kernels, threads
from outpace.lib.int8 import rotated

KV_CACHE_DTYPES = {"int8": torch.int8, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""Of keys and values, by the words of `kv_cache_dtype`."""
_STORED = "keys", "values", "key_scales", "value_scales"
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_WIDEST = 2**31 - 1  # in the kernels' 32 bits, and wider than any text


def has_kernels(kv: SlotKV) -> bool:
    """Whether the compiled kernels attend to these slots."""
    dtype = kv.keys.dtype
    readable = dtype == kv.values.dtype and dtype in _KINDS and kv.keys.device.type == "cpu"
    return readable and loaded_kernels() is not None


def store_of(kv: SlotKV) -> structs.Store:
    """Slots as the kernels read them."""
    layer, slot, head, row, _ = kv.keys.stride()
    assert row == kv.keys.shape[-1], "rows of a slot are contiguous"
    return structs.Store(
        **dict(zip(_STORED, (storage.data_ptr() for storage in kv.storages), strict=False)),  # without scales null
        key_offsets=kv.key_offsets.data_ptr(),
        layer_stride=layer,
        slot_stride=slot,
        head_stride=head,
        kind=_KINDS[kv.keys.dtype],
        head_dim=row,
    )


def parts_of(segments: Sequence[Segment]) -> tuple[Any, list[Tensor]]:
    """Segments as the kernels read them, and the tensors that must stay alive during the call."""
    parts, kept = structs.array(structs.Part, len(segments))(), []
    for part, segment in zip(parts, segments, strict=True):
        positions = segment.positions.long().contiguous()
        visible = None if segment.visible is None else segment.visible.bool().contiguous()
        kept += [positions] if visible is None else [positions, visible]
        part.visible = address_of(visible)
        part.positions, part.slot, part.start = positions.data_ptr(), segment.slot, segment.start
        part.count, part.committed, part.scratch = segment.count, segment.committed, segment.scratch
        if segment.view is not None:
            view = segment.view.int().contiguous()
            kept.append(view)
            part.view, part.viewed = view.data_ptr(), view.shape[-1]
            strides = zip(view.shape, view.stride(), strict=True)
            layer, head, _ = (stride if size > 1 else 0 for size, stride in strides)
            part.view_layer_stride, part.view_head_stride = layer, head
    return parts, kept


def width_of(window: int | None) -> int:
    """A window as the kernels read it, 0 for None. Configs may state any number that no position reaches."""
    return min(window or 0, _WIDEST)


def sight_of(settings: AttentionSettings) -> structs.AttentionSight:
    """What a layer lets a row see, as the kernels read it."""
    return structs.AttentionSight(width_of(settings.window), settings.softcap or 0.0, settings.scaling)


def attend(query: Tensor, segments: Sequence[Segment], settings: AttentionSettings) -> Tensor:
    """[T, heads, head_dim] of queries [heads, T, head_dim], each row's sums in the order of the positions it sees."""
    kv = segments[0].kv
    rows = query.transpose(0, 1).float().contiguous()  # [T, H, D]
    if kv.scales:
        rows = rotated(rows)  # as keys of int8 are
    output = torch.empty_like(rows)
    parts, kept = parts_of(segments)
    shape = len(segments), settings.layer, rows.shape[1], kv.keys.shape[2]
    call("attend", store_of(kv), parts, *shape, sight_of(settings), rows, output, threads())
    del kept
    return output.to(query.dtype)
