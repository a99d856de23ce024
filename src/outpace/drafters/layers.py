"""What drafter nets are made of: rotary positions, and attention over keys that the caller keeps.

The nets compute on packed rows [T, H] and get the attention function as an argument: drafting reads keys from
slots, training from a mask over whole sequences, a test from a plain matrix product. Weights start as NaN, so that one
that a file did not provide cannot pass unseen.
"""

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from outpace.lib.errors import ModelError
from outpace.models.loading.config import MOST_LAYERS
from outpace.models.plain_decoder import RMSNorm
from outpace.models.rotation import SCALED, extended, frequencies

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [T, heads, D], key [T, kv_heads, D], value [T, kv_heads, D]) -> [T, heads, D], scaled by D ** -0.5.

Keys and values are those of the rows themselves; the function adds the others that a row sees."""

# Above the sizes of any drafter, and small enough that no product of two overflows: a damaged config is refused before
# memory is allocated.
LARGEST_SIZE = 2**26
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]

M = TypeVar("M", bound=nn.Module)


class LayerConfig(BaseModel):
    """What all drafters made of decoder layers have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    hidden_size: Size
    intermediate_size: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    rope_theta: float = Field(gt=0)
    rope_scaling: dict[str, Any] | None = None
    max_positions: Size
    vocab_size: Size
    target_hidden_size: Size

    @property
    def positions(self) -> int:
        """Tokens that the drafter has positions for."""
        return extended(self.max_positions, self.rope_scaling or {})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if complaints := list(self._contradictions()):
            raise ValueError("; ".join(complaints))
        return self

    def _contradictions(self) -> Iterator[str]:
        """Complaints about fields that do not go together."""
        if self.heads % self.kv_heads:
            yield f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}"
        if self.head_dim % 2:
            yield f"head_dim={self.head_dim} is odd, but positions rotate pairs"


def fill_with_nan(module: M) -> M:
    """Make every parameter of a module NaN, without gradients."""
    for weight in module.parameters():
        weight.requires_grad_(False)
        weight.fill_(torch.nan)
    return module


def _scaled(parameters: dict[str, Any], size: int, max_positions: int) -> tuple[Tensor, float]:
    """Frequencies [size/2] of a scaled rotation, and the factor of its angles' tables."""
    try:
        if parameters["rope_type"] == "yarn" and parameters["factor"] is None:
            parameters = {**parameters, "factor": max_positions / parameters["original_max_position_embeddings"]}
        return frequencies(parameters, size)
    except Exception as error:  # keys that are missing, values of other types, divisions by zero
        raise ModelError(f"rope_scaling={parameters}: cannot be worked out: {type(error).__name__}: {error}") from error


class Rotary(nn.Module):
    """Rotary position embedding over the whole head dimension, halves rotated against each other (Llama, Qwen).
    `scaling`: a `rope_scaling` dictionary of a static kind ("linear", "llama3", "yarn"), or None."""

    def __init__(self, head_dim: int, theta: float, scaling: dict[str, Any] | None, max_positions: int) -> None:
        super().__init__()
        kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
        self.factor = 1.0
        if kind == "default":
            found = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
        elif kind in SCALED:
            parameters = {**(scaling or {}), "rope_type": kind, "rope_theta": theta}
            found, self.factor = _scaled(parameters, head_dim, max_positions)
        else:
            raise ModelError(
                f"rope_scaling={scaling}: kind {kind!r} is not supported; use linear, llama3, yarn or none"
            )
        if not bool(found.isfinite().all()) or not math.isfinite(self.factor):
            raise ModelError(
                f"rope_theta={theta}, rope_scaling={scaling}: make angles that are not finite; correct them"
            )
        self.exact = tuple(found.tolist())
        self.frequencies: Tensor
        self.register_buffer("frequencies", found.double(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """Move with the net to its device, but keep the dtype: rounded to bfloat16, angles are wrong after few
        positions."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frequencies = torch.tensor(self.exact, dtype=torch.float64, device=self.frequencies.device)
        return self

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, D] float64 of positions [T], scaled."""
        angles = positions[:, None].double() * self.frequencies.double()  # [T, D/2]
        return (angles.cos() * self.factor).repeat(1, 2), (angles.sin() * self.factor).repeat(1, 2)

    def forward(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rotate rows [T, heads, D] to positions [T]."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        cosine, sine = (table.to(wide)[:, None] for table in self.tables(positions))  # [T, 1, D]
        low, high = rows.to(wide).chunk(2, dim=-1)
        return (rows.to(wide) * cosine + torch.cat((-high, low), dim=-1) * sine).to(rows.dtype)


class Projections(nn.Module):
    """The four projections of an attention layer, with rotated and optionally normalised queries and keys.

    Args:
        inputs: width of the rows that queries, keys and values are made of.
        eps: of the query and key norms; None for no such norms.
    """

    def __init__(
        self, inputs: int, outputs: int, heads: int, kv_heads: int, head_dim: int, eps: float | None, bias: bool = False
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(inputs, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, outputs, bias=bias)
        self.q_norm = RMSNorm(head_dim, eps) if eps is not None else None
        self.k_norm = RMSNorm(head_dim, eps) if eps is not None else None

    def forward(self, rows: Tensor, positions: Tensor, rotary: Rotary, attend: Attend, layer: int = 0) -> Tensor:
        """Attention's output [T, outputs] for rows [T, inputs] at positions [T]. `layer`: its number, for `attend`."""
        query = self.q_proj(rows).unflatten(-1, (-1, self.head_dim))  # [T, heads, D]
        query = rotary(query if self.q_norm is None else self.q_norm(query), positions)
        out: Tensor = self.o_proj(attend(layer, query, *self.keys_values(rows, positions, rotary)).flatten(1))
        return out

    def keys_values(self, rows: Tensor, positions: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys and values [T, kv_heads, D] of rows [T, inputs]."""
        key = self.k_proj(rows).unflatten(-1, (-1, self.head_dim))
        key = rotary(key if self.k_norm is None else self.k_norm(key), positions)
        return key, self.v_proj(rows).unflatten(-1, (-1, self.head_dim))
