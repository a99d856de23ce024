"""DFlash 2: DFlash's block with short convolutions around each sublayer, and a selector over the best ids of a depth.

    conv(x)_t = sum_i k_{t,i} x_{t-i}        S_t(a, b) = U_t(b) + <A(a) * H(h_t), B(b)>

k_{t,i} is a learned kernel plus a correction, computed from the row that enters the sublayer and shared by a group of
channels. Convolutions stay inside the block: rows before the anchor count as zero.
"""

from collections.abc import Iterator

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.drafters.dflash.neighbours import NeighbourHead, NeighbourNet
from outpace.drafters.dflash.net import DFlashConfig, DFlashLayer
from outpace.drafters.layers import Attend, Rotary, Size, fill_with_nan


class DFlash2Config(DFlashConfig):
    """A DFlash drafter with convolutions and a selector.

    Attributes:
        conv_kernel_size: rows that a convolution reads: the own one and those before.
        conv_group_size: channels that share a correction of the kernel.
        selector_rank: columns of A and B.
        selector_top_k: ids of a depth that the selector chooses from, those with the best base logits.
        output_multiplier: of the LM head's logits, before they are capped.
        final_logit_softcapping: c of c * tanh(logits / c); None for none.
    """

    conv_kernel_size: int = Field(ge=1, le=64)
    conv_group_size: Size
    selector_rank: Size
    selector_top_k: Size
    output_multiplier: float = Field(default=1.0, gt=0)
    final_logit_softcapping: float | None = Field(default=None, gt=0)

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.hidden_size % self.conv_group_size:
            yield f"hidden_size={self.hidden_size} is not a multiple of conv_group_size={self.conv_group_size}"
        if self.selector_top_k > self.vocab_size:
            yield f"selector_top_k={self.selector_top_k} is above vocab_size={self.vocab_size}"

    def base_logits(self, logits: Tensor) -> Tensor:
        """U, of what the LM head computes."""
        cap, factor = self.final_logit_softcapping, self.output_multiplier
        scaled = logits if factor == 1 else logits * factor
        return scaled if cap is None else torch.tanh(scaled / cap) * cap


class BlockConvolution(nn.Module):
    """The two convolutions around a sublayer: `before` it, and `after` it with the kernels that `before` returned."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self._taps, self._groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
        self._block_size = config.block_size
        self.base_kernel = nn.Parameter(torch.empty(2, self._taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self._taps * self._groups, bias=False)

    def before(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, H] of whole blocks convolved, and the corrections [T, taps, groups] for `after`."""
        corrections = self.kernel_projection(rows).view(-1, 2, self._taps, self._groups)
        first, second = corrections.unbind(dim=1)
        return self._convolved(rows, first, self.base_kernel[0]), second

    def after(self, rows: Tensor, corrections: Tensor) -> Tensor:
        """Outputs [T, H] of the sublayer convolved."""
        return self._convolved(rows, corrections, self.base_kernel[1])

    def _convolved(self, rows: Tensor, corrections: Tensor, base: Tensor) -> Tensor:
        count = len(rows)
        if missing := -count % self._block_size:  # a captured pass ends with rows of padding, which fill no block
            rows = nn.functional.pad(rows, (0, 0, 0, missing))
            corrections = nn.functional.pad(corrections, (0, 0, 0, 0, 0, missing))
        kernels = corrections[..., None] + base.view(self._taps, self._groups, -1)  # [T, taps, groups, C]
        blocks = rows.view(-1, self._block_size, self._groups, kernels.shape[-1])
        total = torch.zeros_like(blocks)
        for offset, kernel in enumerate(kernels.view(-1, self._block_size, *kernels.shape[1:]).unbind(dim=2)):
            if offset < self._block_size:
                shifted = blocks[:, : self._block_size - offset]
                total = total + kernel * nn.functional.pad(shifted, (0, 0, 0, 0, offset, 0))
        return total.view_as(rows)[:count]


class DFlash2Layer(DFlashLayer):
    """A decoder layer with convolutions around its attention and its MLP."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.attention_conv = BlockConvolution(config)
        self.mlp_conv = BlockConvolution(config)

    def forward(self, hidden: Tensor, positions: Tensor, rotary: Rotary, attend: Attend, layer: int) -> Tensor:
        """As of `DFlashLayer`, of rows of whole blocks, and padding after them."""
        rows, kernels = self.attention_conv.before(self.input_layernorm(hidden))  # [T, H]
        attended = self.self_attn(rows, positions, rotary, attend, layer)
        hidden = hidden + self.attention_conv.after(attended, kernels)
        rows, kernels = self.mlp_conv.before(self.post_attention_layernorm(hidden))
        return hidden + self.mlp_conv.after(self.mlp(rows), kernels)


class Selector(NeighbourHead):
    """The projections A, B and H. Ids other than the best `selector_top_k` of a depth score -inf."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config.vocab_size, config.selector_rank)
        self._top_k = config.selector_top_k
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def left(self, before: Tensor, hidden: Tensor) -> Tensor:
        left: Tensor = before * self.hidden_projection(hidden)
        return left

    def scores(self, base: Tensor, before: Tensor, hidden: Tensor) -> Tensor:
        best = base.topk(min(self._top_k, base.shape[1])).indices  # [R, k]
        moved = super().scores(base, before, hidden)
        return torch.full_like(moved, -torch.inf).scatter(1, best, moved.gather(1, best))


class DFlash2Net(NeighbourNet):
    """DFlash's backbone with convolutions, and the selector."""

    config: DFlash2Config
    head: Selector

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config, Selector(config))
        self.layers = nn.ModuleList(DFlash2Layer(config) for _ in range(config.layers))
        fill_with_nan(self)
