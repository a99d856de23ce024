"""What a layer asks of its attention, wherever that is computed."""

from typing import NamedTuple


class AttentionSettings(NamedTuple):
    """What a layer asks of its attention.

    Attributes:
        layer: whose keys and values are read.
        scaling: factor of the scores.
        window: how far back a row sees, in logical positions; None without a limit.
        softcap: c of c * tanh(scores / c); None for none.
    """

    layer: int
    scaling: float
    window: int | None
    softcap: float | None
