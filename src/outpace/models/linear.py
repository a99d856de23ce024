"""Linear layers with weights laid out for the CPU's matrix kernels, swapped in at load as quantisers do.

Two gains, both measured (docs/log.md): a decoding pass of few rows takes a third of the time, and row i of the
result does not depend on how many rows share the pass, which stock kernels do not promise. The second is what keeps
a 1-row pass and a 9-row pass on the same tokens.
"""

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """A frozen linear layer over a weight reordered once for oneDNN.

    Args:
        weight: [out, in], bfloat16 or float32 on the CPU.
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self.bias = None if bias is None else bias.detach()
        self.pads_single_rows = weight.dtype == torch.float32

    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, self.in_features)  # [R, in]
        # The float32 kernel for exactly one row sums in another order than all the others.
        padded = flat.expand(2, -1) if self.pads_single_rows and len(flat) == 1 else flat
        result = torch.ops.mkldnn._linear_pointwise(padded, self.packed, self.bias, "none", [], "")
        return result[: len(flat)].view(*rows.shape[:-1], self.out_features)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build and CPU have the packed kernels for the dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(module: nn.Module) -> int:
    """Replace every nn.Linear below `module` by its packed form; returns how many were replaced."""
    count = 0
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight, child.bias))
            count += 1
        else:
            count += pack_linears(child)
    return count
