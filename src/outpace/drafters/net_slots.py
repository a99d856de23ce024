"""Slots for drafter nets: their own keys and values, and the attention function that a net is handed for a pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from outpace.cache.passes import PassCache, Tables, TilePlan
from outpace.cache.slots import AttentionSettings, Rows, Segment, SlotKV, segments_of
from outpace.drafters.layers import Attend
from outpace.gpu.capture import CapturedPass, captures_on
from outpace.gpu.tree_attention import attend_plan
from outpace.kernels.build import loaded_kernels
from outpace.models.attention import attend_segments

MOST_CAPTURED_ROWS = 64
"""Most rows of a request in a captured pass. Prompts have more."""


@dataclass(frozen=True)
class Sight:
    """What a layer lets a row see of its pass.

    Attributes:
        window: how far back, in positions; None without a limit.
        is_causal: whether rows of the pass see only earlier ones and themselves, whatever their part says.
    """

    window: int | None = None
    is_causal: bool = False


class NetSlots:
    """Keys and values of a drafter net, one slot per request.

    Args:
        dtype, device: of the net. On a CPU without compiled kernels attention computes in float32 at least.

    Attributes:
        tiled: one call per layer attends for all requests, as on everything but a CPU.
        captures: passes of few rows run over static buffers, on CUDA as graphs (`NetPass`); where they are tiled.
        window: number of the last committed rows that passes see, with the first few (`SlotKV.windowed`); None for all.
            Unused where `tiled`.
    """

    window: int | None = None

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        reads_halves = device.type != "cpu" or loaded_kernels() is not None
        kept = dtype if reads_halves else torch.promote_types(dtype, torch.float32)
        self.kv = SlotKV(
            layers,
            slots,
            kv_heads,
            capacity=capacity,
            head_dim=head_dim,
            key_dtype=kept,
            value_dtype=kept,
            device=device,
        )
        self._scale, self.tiled = head_dim**-0.5, device.type != "cpu"
        self.captures = captures_on(device, dtype)

    def positions(self, parts: Sequence[Rows]) -> Tensor:
        """[T] absolute positions of the fresh rows, packed."""
        return torch.cat([part.offsets[part.scratch :] + self.kv.lengths[part.slot] for part in parts])

    def attention(self, parts: Sequence[Rows], sights: Sequence[Sight] = ()) -> Attend:
        """The attention function of one pass over the parts' fresh rows. `sights`: what each layer lets a row see; by
        default all that the row's part does."""
        if self.tiled:
            return self.attend_by([tables.on(self.kv.keys.device) for tables in self.tables(parts, sights)], sights)
        return self.attend_by(self._plans(parts, sights), sights)

    def tables(self, parts: Sequence[Rows], sights: Sequence[Sight] = ()) -> list[Tables]:
        """Tables of a pass with the visibility of its parts; and if there are causal layers, a second one for these."""
        return [Tables.of(segments) for segments in self._plans(parts, sights)]

    def _plans(self, parts: Sequence[Rows], sights: Sequence[Sight]) -> list[list[Segment]]:
        """Segments with the visibility of the parts; and if there are causal layers, others for these."""
        plans = [self.segments(parts)]
        if any(sight.is_causal for sight in sights):
            plans.append(self.segments([_causal(part) for part in parts]))
        return plans

    def attend_by(self, plans: Sequence[TilePlan] | Sequence[list[Segment]], sights: Sequence[Sight] = ()) -> Attend:
        """The attention function of a pass: stores the rows' keys and values, then attends to all visible ones.

        Args:
            plans: for layers with the visibility of the parts, and for causal layers: segments, or tables, with which
                one call serves all requests.
            sights: as of `attention`.
        """
        first = plans[0]
        cache = PassCache((), first, self.kv) if isinstance(first, TilePlan) else PassCache(first)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache.write(layer, key.transpose(0, 1), value.transpose(0, 1))
            sight = sights[layer] if sights else Sight()
            settings = AttentionSettings(layer, self._scale, sight.window, None)
            plan, query = plans[-1 if sight.is_causal else 0], query.transpose(0, 1)
            if isinstance(plan, TilePlan):
                return attend_plan(query, self.kv, plan, settings)
            return attend_segments(query, plan, settings)

        return attend

    def segments(self, parts: Sequence[Rows]) -> list[Segment]:
        """The parts as rows of a packed pass over the slots, which see the committed rows in the window."""
        return segments_of(self.kv, [replace(one, view=self.kv.windowed(one.slot, self.window)) for one in parts])

    def append(self, slot: int, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Commit keys and values [T, kv_heads, D] of each layer that were computed without a query."""
        count = len(rows[0][0])
        segment = Segment(self.kv, slot, 0, torch.arange(count) + self.kv.lengths[slot])
        for layer, (keys, values) in enumerate(rows):
            segment.write(layer, keys.transpose(0, 1), values.transpose(0, 1))
        self.kv.commit([slot], [range(count)])


class NetPass:
    """A net's pass over rows of its slots, captured where `NetSlots.captures` says so. `function`: of positions [T], an
    attention function and packed rows; returns tensors of T rows."""

    def __init__(
        self, slots: NetSlots, function: Callable[..., tuple[Tensor, ...]], sights: Sequence[Sight] = ()
    ) -> None:
        self._slots, self._function, self._sights = slots, function, sights
        self._tiled = partial(_tiled, slots, function, sights)
        self._captured = CapturedPass(slots.kv, self._tiled)

    def __call__(self, parts: Sequence[Rows], *rows: Tensor) -> tuple[Tensor, ...]:
        """The function's results for the parts' fresh rows."""
        slots, device = self._slots, self._slots.kv.keys.device
        if not slots.tiled:
            return self._function(slots.positions(parts), slots.attention(parts, self._sights), *rows)
        tables, found = slots.tables(parts, self._sights), None
        if slots.captures and max(part.count for part in parts) <= MOST_CAPTURED_ROWS:
            found = self._captured(tables, rows)
        return self._tiled([one.on(device) for one in tables], *rows) if found is None else found


def _tiled(
    slots: NetSlots,
    function: Callable[..., tuple[Tensor, ...]],
    sights: Sequence[Sight],
    plans: Sequence[TilePlan],
    *rows: Tensor,
) -> tuple[Tensor, ...]:
    """A pass by tables. Not a method: a captured method would refer back to its `NetPass`, and only the garbage
    collector would free the drafter's slots."""
    return function(plans[0].rows[:, 2].long(), slots.attend_by(plans, sights), *rows)


def _causal(part: Rows) -> Rows:
    """The same rows, each seeing only earlier ones of the pass and itself."""
    assert part.scratch == 0, "rows behind scratch bring their own visibility"
    return replace(part, visible=torch.ones(part.count, part.count, dtype=torch.bool).tril())
