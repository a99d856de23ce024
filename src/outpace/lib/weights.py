"""Tensors of a checkpoint into a net: in their dtype, where they are, none missing, none left over."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor, nn

from outpace.lib.errors import ModelError

N = TypeVar("N", bound=nn.Module)
# Smaller floats are quantised and mean nothing without scales.
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def filled(build: Callable[[], N], tensors: Mapping[str, Tensor], name: str) -> N:
    """A net with the tensors of a file (meta tensors stay meta), without initialising it first.

    Raises:
        ModelError: names that are missing or left over, shapes or kinds that differ, weights that are NaN or infinite;
            all of them are named.
    """
    with torch.device("meta"):
        net = build()
    check_fit(net, tensors, name)  # before memory is asked for: a damaged config may want any amount
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in floats))  # wide enough to round nothing
    net = net.to(dtype).to_empty(device=floats[0].device)
    with torch.no_grad():
        for key, weight in net.state_dict(keep_vars=True).items():
            weight.copy_(tensors[key])
    return net


def check_fit(net: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Refuse tensors that are not a module's. Floating-point dtypes may differ from its own; kinds may not."""
    wanted = net.state_dict(keep_vars=True)
    complaints = [f"missing {key} {list(wanted[key].shape)}" for key in wanted if key not in tensors]
    complaints += [f"unexpected {key} {list(tensors[key].shape)}" for key in tensors if key not in wanted]
    for key in wanted.keys() & tensors.keys():
        have, want = tensors[key], wanted[key]
        if have.shape != want.shape:
            complaints.append(f"{key} has shape {list(have.shape)}, its config says {list(want.shape)}")
        elif (have.dtype in _FLOATS) != (want.dtype in _FLOATS) or (
            have.dtype not in _FLOATS and have.dtype != want.dtype
        ):
            complaints.append(f"{key} has dtype {have.dtype}, not {want.dtype}")
        elif have.dtype in _FLOATS and not have.is_meta and not bool(have.isfinite().all()):
            complaints.append(f"{key} has values that are NaN or infinite")
    if complaints:
        raise ModelError(f"{name}: does not fit its config: {'; '.join(sorted(complaints))}")
