"""Attention of a whole packed pass in one call: by a Triton kernel, or by torch where there is none."""

import torch
from torch import Tensor

from outpace.cache.passes import ROWS_PER_TILE, TilePlan
from outpace.cache.slots import AttentionSettings, SlotKV
from outpace.gpu.backend import next_power, on_device_of, runs_triton

_LEAST = 16  # rows, columns and inputs of the smallest product that a GPU's matrix units compute


def attend_plan(query: Tensor, kv: SlotKV, plan: TilePlan, settings: AttentionSettings) -> Tensor:
    """[T, H, D] attention of packed rows.

    Args:
        query: [H, T, D]; rows behind the plan's are padding and come out as zeros.
    """
    if not runs_triton(query.device, query.dtype):
        return by_torch(query, kv, plan, settings)
    with on_device_of(query):
        return _by_kernel(query, kv, plan, settings)


def _by_kernel(query: Tensor, kv: SlotKV, plan: TilePlan, settings: AttentionSettings) -> Tensor:
    from outpace.gpu import tree_kernels

    layer, scaling, window, softcap = settings
    heads, count, dim = query.shape
    keys, values = kv.keys[layer], kv.values[layer]  # [S, G, C, D]
    kv_heads, group = keys.shape[1], heads // keys.shape[1]
    query = query if query.stride(2) == 1 else query.contiguous()
    make = query.new_empty if count == len(plan.rows) else query.new_zeros
    output = make(count, heads, dim)
    group_padded, dim_padded = next_power(group), max(next_power(dim), _LEAST)
    rows = 1 if plan.exact else ROWS_PER_TILE
    if plan.exact:
        group_padded = max(group_padded, _LEAST)
    is_split = plan.exact or plan.is_split
    parts = len(plan.items) * rows * heads if is_split else 0
    partial, peaks, totals = (
        torch.empty(size, dtype=torch.float32, device=query.device) for size in (parts * dim, parts, parts)
    )
    kernel = tree_kernels.attend_paths if plan.exact else tree_kernels.attend_tiles
    sizes = {"HEADS": heads, "ROWS": rows, "DIM": dim, "DIM_PADDED": dim_padded}
    kernel[(len(plan.items), kv_heads)](
        *(query, keys, values, output, partial, peaks, totals),
        *(plan.rows, plan.tiles, plan.items, plan.tail, plan.sight),
        query_row=query.stride(1),
        query_head=query.stride(0),
        slot_stride=keys.stride(0),
        head_stride=keys.stride(1),
        words=plan.sight.shape[1],
        **{"window": window or 0, "scale": scaling, "softcap": softcap or 1.0, **sizes},
        GROUP=group,
        GROUP_PADDED=group_padded,
        BLOCK=_block(keys.dtype, dim_padded),
        WINDOW=window is not None,
        CAP=softcap is not None,
        SPLIT=is_split,
        num_stages=2,  # for which blocks are sized; Triton's own choice is three
    )
    if is_split:
        tree_kernels.join[(len(plan.tiles), rows * heads)](output, partial, peaks, totals, plan.tiles, **sizes)
    return output


def by_torch(query: Tensor, kv: SlotKV, plan: TilePlan, settings: AttentionSettings) -> Tensor:
    """The same attention, tile by tile, in float32 at least: the reference of the kernel, and what runs on a GPU
    without Triton. In exact mode its sums are in logical order too, but it does not guarantee equal bits."""
    layer, scaling, window, softcap = settings
    heads, count, dim = query.shape
    group = heads // kv.keys.shape[2]
    output, wide = query.new_zeros(count, heads, dim), torch.promote_types(query.dtype, torch.float32)
    sight = plan.sight.long()
    assert plan.on_host is not None, "padded tables are read by kernels"
    for slot, first, size, committed, offset, _, _, _, end in plan.on_host:
        own = slice(first, first + size)
        positions = plan.rows[own, 2]
        behind = torch.arange(end - committed, device=query.device)
        if plan.exact:
            tail = sight[first, : len(behind)]
            seen = torch.ones(1, len(behind), dtype=torch.bool, device=query.device)
        else:
            tail, seen = behind, (sight[own][:, behind >> 5] >> (behind & 31) & 1).bool()  # [N, S + N]
        stored = torch.cat([torch.arange(committed, device=query.device), committed + tail])  # [L]
        seen = torch.cat([seen.new_ones(size, committed), seen], dim=1)  # [N, L]
        if window is not None:
            stands = torch.cat([stored[:committed], plan.tail[offset + tail].long()])
            seen = seen & (stands > positions[:, None] - window)
        keys, values = (rows[layer, slot][:, stored].to(wide) for rows in (kv.keys, kv.values))  # [G, L, D]
        asked = query[:, own].to(wide).unflatten(0, (-1, group))  # [G, H/G, N, D]
        scores = asked @ keys[:, None].transpose(2, 3) * scaling  # [G, H/G, N, L]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        output[own] = (weights @ values[:, None]).flatten(0, 1).transpose(0, 1).to(query.dtype)
    return output


def _block(dtype: torch.dtype, dim: int) -> int:
    """Keys per block: two of them, and their values, fit into a multiprocessor's memory."""
    size = dim * dtype.itemsize
    return 64 if size <= 256 else 32 if size <= 512 else 16
