"""Checks every Triton kernel against its torch reference, on random passes with the timed shapes."""

import random
from typing import Any

import torch
from torch import Tensor

from outpace.cache.passes import Tables
from outpace.cache.slots import AttentionSettings, Segment, SlotKV
from outpace.core.tree import Topology
from outpace.drafters.domino.gpu import head as steps
from outpace.gpu.backend import runs_triton
from outpace.gpu.tree_attention import attend_plan, by_torch
from outpace.sampling.noise import noise_key

BOUNDS = {torch.float32: 2e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest differences that the order of sums explains, for outputs of about 1."""


def check_kernels(device: torch.device, small: bool) -> dict[str, Any]:
    """Largest differences by kernel and dtype, and whether all of them are within bounds."""
    if not runs_triton(device):
        return {"ran": False, "why": "Triton is not installed"}
    found: dict[str, Any] = {"ran": True}
    passed = True
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cpu" else tuple(BOUNDS)
    for dtype in dtypes:
        for name, difference in (
            ("attention", _attention(device, dtype, small, exact=False)),
            ("attention_exact", _attention(device, dtype, small, exact=True)),
            ("domino_step", _step(device, dtype, small)),
        ):
            found[f"{name}_{str(dtype).removeprefix('torch.')}"] = difference
            passed = passed and difference <= BOUNDS[dtype]
    return found | {"passed": bool(passed)}


def _worst(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite if one is NaN, which Python's `max` would ignore."""
    return float((one - other).abs().nan_to_num(nan=torch.inf).max())


def _attention(device: torch.device, dtype: torch.dtype, small: bool, exact: bool) -> float:
    heads, kv_heads, dim, longest = (4, 2, 16, 70) if small else (32, 8, 128, 5000)
    worst = 0.0
    for seed in range(1 if small else 8):
        chance = random.Random(seed)
        torch.manual_seed(seed)
        kv = SlotKV(1, 5, kv_heads, longest + 96, dim, key_dtype=dtype, value_dtype=dtype, device=device)
        kv.keys.normal_()
        kv.values.normal_()
        segments, start = [], 0
        for slot in chance.sample(range(5), 4):
            kv.lengths[slot], count = chance.randrange(longest), chance.choice([1, 16, 60])
            shape = Topology.of([-1, *(chance.randrange(max(0, node - 5), node) for node in range(1, count))])
            segments.append(Segment(kv, slot, start, shape.depth_tensor + kv.lengths[slot], shape.ancestor_mask))
            start += count
        query = torch.randn(heads, start, dim, device=device).to(dtype)
        window, softcap = chance.choice([None, 33]), chance.choice([None, 20.0])
        settings = AttentionSettings(0, dim**-0.5, window, softcap)
        plan = Tables.of(segments, exact).on(device)
        actual, expected = (compute(query, kv, plan, settings).float() for compute in (attend_plan, by_torch))
        worst = max(worst, _worst(actual, expected))
    return worst


def _step(device: torch.device, dtype: torch.dtype, small: bool) -> float:
    hidden, state, rank, vocabulary = (24, 16, 16, 300) if small else (4096, 1024, 256, 151936)
    torch.manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=device) / shape[-1] ** 0.5).to(dtype)

    weights = steps.TritonHead(
        of_input=made(3 * state, hidden),
        of_state=made(3 * state, state),
        of_hidden=made(rank, hidden),
        of_causal=made(rank, state),
        vocabulary=made(vocabulary, rank),
        ids=None,
    )
    worst = 0.0
    for count in (1, 20):
        keys = torch.tensor([noise_key(row, 0, row) for row in range(count)], dtype=torch.int32, device=device)
        warmth = torch.arange(count, device=device) % 2 * 0.8
        before, gates = torch.randn(count, state, device=device), torch.randn(count, 3 * state, device=device)
        low, base = torch.randn(count, rank, device=device), torch.randn(count, vocabulary, device=device)
        rows = steps.StepRows(before, gates.to(dtype), low.to(dtype), base, keys, warmth)
        actual, expected = steps.step(weights, rows, 4), steps.by_torch(weights, rows, 4)
        for one, other in ((actual.states, expected.states), (actual.log_probs, expected.log_probs)):
            worst = max(worst, _worst(one, other))
    return worst
