"""Choose and build the linear layers that replace a model's own: for compiled kernels, for oneDNN, or none.

Both kinds are faster for the few rows of a decoding pass (a third of the time) and mostly
batch-invariant: a row's result does not depend on the number of rows in the pass. `models.exactness` measures it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from outpace.kernels.build import loaded_kernels
from outpace.kernels.instructions import has_tiles, multiplies_bfloat16
from outpace.kernels.linear import KernelLinear, kind_of
from outpace.lib.int8 import int8_of, stacked
from outpace.lib.stages import advance

Make = Callable[[Tensor, Tensor | None], nn.Module]
"""(weight [out, in], bias [out] or None) -> a frozen linear layer."""

# Layers of one parent that read the same input: one product instead of two or three.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# oneDNN's kernel for exactly one row sums wider inputs in blocks of 1024 and the others do not: bits would differ.
_WIDEST_SINGLE_ROW = 1024
# With AMX, one kernel serves products of 2 to 32 rows; larger ones may sum in another order. Splitting 64 rows or more
# takes up to twice the time of one product, a third of the time without AMX.
_MOST_ROWS_OF_TILES = 32


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of the dtype are packed here: by compiled kernels or oneDNN; by kernels alone where torch was
    built without oneDNN, as for macOS."""
    if device.type != "cpu":
        return False
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bfloat16())
    return dtype == torch.float32 and loaded_kernels() is not None


def frozen_layers(dtype: torch.dtype, rounded_to: torch.dtype | None = None, quantize: str = "none") -> Make:
    """The function that builds frozen linear layers on this machine: for compiled kernels if there are, else oneDNN.

    Args:
        dtype: that products are computed in.
        rounded_to: that the weights were rounded to; None for the same.
        quantize: "none" or "int8"; other values count as "none" here.
    """
    has_kernels, kind = loaded_kernels() is not None, kind_of(dtype, rounded_to, quantize)

    def make(weight: Tensor, bias: Tensor | None) -> nn.Module:
        layer = KernelLinear(weight, bias, kind, int8=int8_of(weight)) if has_kernels else PackedLinear(weight, bias)
        advance(weight.numel())
        return layer

    return make


def layers_for(
    dtype: torch.dtype, device: torch.device, rounded_to: torch.dtype | None = None, quantize: str = "none"
) -> Make | None:
    """As `frozen_layers`; None where the model's own layers are kept."""
    return frozen_layers(dtype, rounded_to, quantize) if can_pack(dtype, device) else None


class PackedLinear(nn.Module):
    """A frozen linear layer over a weight reordered once for oneDNN.

    Args:
        weight: [out, in], bfloat16 or float32 on the CPU.
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self.bias = None if bias is None else bias.detach()
        self.outputs, self.inputs = weight.shape
        self.dtype = weight.dtype
        on_tiles = weight.dtype == torch.bfloat16 and has_tiles()
        self.pads_single_rows = on_tiles or weight.shape[1] > _WIDEST_SINGLE_ROW
        self.most_rows = _MOST_ROWS_OF_TILES if on_tiles else None

    def forward(self, rows: Tensor) -> Tensor:
        count = rows.shape[:-1].numel()
        if self.most_rows is not None and count > self.most_rows:
            pieces = rows.reshape(-1, rows.shape[-1]).split(self.most_rows)
            together = torch.cat([self.forward(piece) for piece in pieces])
            return together.view(*rows.shape[:-1], -1)
        if self.pads_single_rows and count == 1:
            return self._multiply(torch.cat((rows, rows), dim=-2)).narrow(-2, 0, 1)
        return self._multiply(rows)

    def _multiply(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return product


def linear_over(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A frozen layer of torch over a weight [out, in] and a bias [out], which it shares."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def is_conv1d(layer: nn.Module) -> bool:
    """Whether this is transformers' linear layer with a weight [in, out]; known by name, as importing it is slow."""
    kind = type(layer)
    return f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D"


class SiblingLinear(nn.Module):
    """One of several layers with the same input; the first one called computes them all.

    The other outputs are attached to the input tensor, so modules keep no state between calls.

    Args:
        together: the layers' weights stacked.
        sizes: outputs of each layer.
        index: of this layer.
    """

    def __init__(self, together: nn.Module, sizes: Sequence[int], index: int) -> None:
        super().__init__()
        self.together, self.sizes, self.index = together, list(sizes), index

    def forward(self, rows: Tensor) -> Tensor:
        owner, shares = getattr(rows, "_outpace_shares", (None, ()))
        if owner is not self.together:
            shares = self.together(rows).split(self.sizes, dim=-1)
            rows._outpace_shares = (self.together, shares)  # type: ignore[attr-defined]
        share: Tensor = shares[self.index]
        return share


def pack_linears(
    module: nn.Module,
    siblings: Sequence[Sequence[str]] = SIBLINGS,
    kept: Sequence[str] = (),
    make: Make = PackedLinear,
) -> None:
    """Replace the linear layers below `module`, in place.

    Args:
        module: whose layers are replaced.
        siblings: names of layers that are computed together.
        kept: names of children that keep their layers.
        make: builds a replacement.
    """
    for names in siblings:
        layers = [getattr(module, name, None) for name in names]
        if all(type(layer) is nn.Linear for layer in layers):
            _pack_siblings(module, dict(zip(names, layers, strict=True)), make)  # type: ignore[arg-type]
    for name, child in module.named_children():
        if name in kept:
            continue
        if type(child) is nn.Linear:
            setattr(module, name, make(child.weight, child.bias))
        elif is_conv1d(child):  # GPT-2's linear layer, its weight [in, out]
            setattr(module, name, make(child.weight.T, child.bias))  # type: ignore[arg-type]
        else:
            pack_linears(child, siblings, kept, make)


def _pack_siblings(module: nn.Module, layers: dict[str, nn.Linear], make: Make) -> None:
    biases = [layer.bias for layer in layers.values()]
    if any(bias is None for bias in biases) != all(bias is None for bias in biases):
        return
    weight = stacked([layer.weight for layer in layers.values()])
    together = make(weight, None if biases[0] is None else torch.cat([bias.detach() for bias in biases]))
    sizes = [layer.out_features for layer in layers.values()]
    for index, name in enumerate(layers):
        setattr(module, name, SiblingLinear(together, sizes, index))
