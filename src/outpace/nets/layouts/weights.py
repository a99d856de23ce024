"""Tensors of a checkpoint into a net: in their dtype, where they are, none missing, none left over."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor, nn

from outpace.nets.checkpoint import fill
from outpace.nets.layers import fill_with_nan

N = TypeVar("N", bound=nn.Module)


def filled(build: Callable[[], N], tensors: Mapping[str, Tensor], name: str) -> N:
    """A net with the tensors of a file (meta tensors stay meta), without initialising it first.

    Args:
        build: makes the net.
        tensors: by the net's own names.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: tensors that do not fit the net.
    """
    with torch.device("meta"):
        net = build()
    # Smaller floats than these are left for `fill` to refuse: they are quantised and mean nothing without scales.
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point() and tensor.element_size() > 1]
    # Wide enough to round nothing; `fill` names weights that are no floats at all.
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in floats)) if floats else torch.float32
    device = floats[0].device if floats else torch.device("cpu")
    net = fill_with_nan(net.to(dtype).to_empty(device=device))
    fill(net, tensors, name)
    return net
