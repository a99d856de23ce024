"""Random passes over slots, and the plainest attention there is to compare with."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.cache.slots import Segment, SlotKV
from outpace.core.tree import Topology
from outpace.models.attention import ATTENTION_NAME
from outpace.models.target import PackedTarget
from scripts.gpu.interpreter import mend_interpreter
from tests.unit.models.tiny import stock_model, tiny_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Kernels run on a GPU where there is one, else in Triton's interpreter."""
if DEVICE.type == "cpu":
    mend_interpreter()
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Of a target: each layer and each key-value head is a program more per item, and interpreters are slow."""


@dataclass(frozen=True)
class World:
    """A pass: queries [H, T, D], slots that hold all keys and values, the requests' rows."""

    query: Tensor
    kv: SlotKV
    segments: list[Segment]


def random_parents(count: int, chance: random.Random) -> list[int]:
    return [-1, *(chance.randrange(max(0, node - 4), node) for node in range(1, count))]


def empty_slots(slots: int, kv_heads: int, capacity: int, dim: int, dtype: torch.dtype, layers: int = 1) -> SlotKV:
    return SlotKV(layers, slots, kv_heads, capacity, dim, key_dtype=dtype, value_dtype=dtype, device=DEVICE)


def random_world(
    seed: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, longest: int = 90, requests: int = 4
) -> World:
    """Prefixes from none to `longest`, trees of one node and of many, prompts, blocks that see each other, scratch rows
    of which some are hidden. Storage that nobody wrote holds NaN."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    slots = chance.sample(range(requests + 2), requests)
    kv = empty_slots(requests + 2, kv_heads, longest + 64, dim, dtype)
    kv.keys.fill_(torch.nan)
    kv.values.fill_(torch.nan)
    segments, start = [], 0
    for number, slot in enumerate(slots):
        kv.lengths[slot] = chance.choice([0, 1, longest, chance.randrange(longest)])
        count = chance.choice([1, 2, 7, 19, 40])
        kind = ("tree", "scratch", "all", "one")[(seed + number) % 4]
        scratch = 0
        if kind == "one":
            count, visible, depths = 1, None, torch.zeros(1, dtype=torch.int64)
        elif kind == "all":
            visible, depths = None, torch.arange(count)
        else:
            shape = Topology.of(random_parents(count, chance))
            scratch = 0 if kind == "tree" else chance.randrange(count)
            visible, depths = shape.ancestor_mask[scratch:], shape.depth_tensor
        segments.append(Segment(kv, slot, start, depths + kv.lengths[slot], visible, scratch=scratch))
        end = segments[-1].end
        for storage in (kv.keys, kv.values):
            storage[0, slot, :, :end] = torch.randn(kv_heads, end, dim, generator=generator).to(dtype)
        start += segments[-1].count
    query = torch.randn(start, heads, dim, generator=generator).to(DEVICE, dtype).transpose(0, 1)
    return World(query, kv, segments)


def in_order(world: World) -> World:
    """Without blocks whose rows all see each other: they have no logical order, and a target has none."""
    segments = [one for one in world.segments if one.visible is not None or one.count == 1]
    kept, start = torch.cat([torch.arange(one.start, one.start + one.count) for one in segments]), 0
    for segment in segments:
        segment.start, start = start, start + segment.count
    return World(world.query[:, kept], world.kv, segments)


def target_of(family: str, tiled: bool = True, exact: bool = False, pack: bool = True, **sizes: Any) -> PackedTarget:
    model = stock_model(tiny_config(family, **sizes), ATTENTION_NAME).to(DEVICE)  # type: ignore[arg-type]
    return PackedTarget(model, 256, 4, (), pack, tiled=tiled, exact=exact)


def plain_attention(world: World, scaling: float, window: int | None, softcap: float | None) -> Tensor:
    """[T, H, D] float64, row by row: what a row sees is written out as a list of keys."""
    outputs = []
    for segment in world.segments:
        positions = [*range(segment.committed), *segment.positions.tolist()]
        for number in range(segment.count):
            seen = list(range(segment.committed))
            tail = range(len(segment.positions))
            if segment.visible is not None:
                tail = [each for each in tail if segment.visible[number, each]]  # type: ignore[assignment]
            seen += [segment.committed + each for each in tail]
            own = positions[segment.committed + segment.scratch + number]
            seen = [each for each in seen if window is None or positions[each] > own - window]
            keys, values = (rows[0, segment.slot][:, seen].double() for rows in (world.kv.keys, world.kv.values))
            query = world.query[:, segment.start + number].double().unflatten(0, (len(keys), -1))  # [G, H/G, D]
            scores = query @ keys.transpose(1, 2) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            outputs.append((torch.softmax(scores, dim=-1) @ values).flatten(0, 1))
    return torch.stack(outputs)
