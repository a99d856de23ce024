"""Slots for drafter nets: their own keys and values, and the attention function that a net is handed for a pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.cache.passes import FreshRows
from outpace.cache.slots import Segment, SlotKV
from outpace.cache.tiles import TilePlan
from outpace.models.attention import attend_segments
from outpace.models.attention_settings import AttentionSettings
from outpace.models.compiled import loaded_kernels
from outpace.models.gpu.tree_attention import attend_plan


@dataclass(frozen=True, eq=False)
class Rows:
    """One request's share of a net's pass: N fresh rows behind S scratch rows of earlier passes.

    Attributes:
        slot: of the net.
        count: N.
        offsets: [S + N] positions of scratch and fresh rows, counted from the committed length.
        visible: [N, S + N] bool, which of those each fresh row sees; None if all.
        scratch: S.
    """

    slot: int
    count: int
    offsets: Tensor
    visible: Tensor | None = None
    scratch: int = 0


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
        layers, kv_heads, head_dim: of the net.
        slots: requests at a time.
        capacity: rows per slot.
        dtype, device: of the net. On a CPU without compiled kernels attention computes in float32 at least.

    Attributes:
        tiled: one call per layer attends for all requests, as on everything but a CPU.
    """

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

    def positions(self, parts: Sequence[Rows]) -> Tensor:
        """[T] absolute positions of the fresh rows, packed."""
        return torch.cat([part.offsets[part.scratch :] + self.kv.lengths[part.slot] for part in parts])

    def attention(self, parts: Sequence[Rows], sights: Sequence[Sight] = ()) -> "SlotAttention":
        """The attention function of one pass over the parts' fresh rows.

        Args:
            parts: the requests, in the order of the packed rows.
            sights: what each layer lets a row see; everything that its part does if left out.
        """
        plain = self.segments(parts)
        causal = self.segments([_causal(part) for part in parts]) if any(sight.is_causal for sight in sights) else plain
        return SlotAttention(plain, causal, self._scale, sights, self.tiled)

    def segments(self, parts: Sequence[Rows]) -> list[Segment]:
        """The parts as rows of a packed pass over the slots."""
        segments, start = [], 0
        for part in parts:
            where = part.offsets + self.kv.lengths[part.slot]
            segments.append(
                Segment(
                    self.kv,
                    part.slot,
                    start,
                    positions=where,
                    visible=part.visible,
                    is_prompt=True,
                    scratch=part.scratch,
                )
            )
            start += part.count
        return segments

    def append(self, slot: int, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Commit keys and values [T, kv_heads, D] of each layer that were computed without a query."""
        count = len(rows[0][0])
        segment = Segment(self.kv, slot, 0, torch.arange(count) + self.kv.lengths[slot])
        for layer, (keys, values) in enumerate(rows):
            segment.write(layer, keys.transpose(0, 1), values.transpose(0, 1))
        self.kv.commit([slot], [range(count)])


class SlotAttention:
    """`nets.layers.Attend` over slots: files the rows' keys and values, then attends to all that they may see."""

    def __init__(
        self, plain: Sequence[Segment], causal: Sequence[Segment], scale: float, sights: Sequence[Sight], tiled: bool
    ) -> None:
        self._plain, self._causal, self._scale, self._sights = plain, causal, scale, sights
        self._kv = plain[0].kv
        self._plain_tiles = self._causal_tiles = None
        if tiled:
            self._plain_tiles = TilePlan.of(plain)
            self._causal_tiles = self._plain_tiles if causal is plain else TilePlan.of(causal)
        self._fresh = FreshRows(plain, self._plain_tiles)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._fresh.write(layer, key.transpose(0, 1), value.transpose(0, 1))
        sight = self._sights[layer] if self._sights else Sight()
        settings = AttentionSettings(layer, self._scale, sight.window, None)
        tiles = self._causal_tiles if sight.is_causal else self._plain_tiles
        if tiles is not None:
            return attend_plan(query.transpose(0, 1), self._kv, tiles, settings)
        return attend_segments(query.transpose(0, 1), self._causal if sight.is_causal else self._plain, settings)


def _causal(part: Rows) -> Rows:
    """The same rows, each seeing only earlier ones of the pass and itself."""
    assert part.scratch == 0, "rows behind scratch bring their own visibility"
    return replace(part, visible=torch.ones(part.count, part.count, dtype=torch.bool).tril())
