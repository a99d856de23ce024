"""Which code computes a module: a compiled kernel, or the module's own Python.

A kernel computes what exactly one set of classes computes. A subclass, a replaced method and an edited source file run
their own Python.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from outpace.kernels.build import loaded_kernels, why_none

COMPILED = "compiled"
# Limits of the differences of rows between two ways to compute a short pass, each relative to its row, on average. A
# single row may differ by three times as much: bfloat16 and int8 round an attention sink, whose activations are huge,
# more coarsely (SmolLM2's first token: 0.31). Another formula differs by far more, and no result at all by 1; rounding
# grows from layer to layer.
_TOLERANCE, _COARSE_TOLERANCE, _SINGLE = 1e-3, 0.25, 3


class NotCompiled(Exception):
    """No kernel computes this module; the message is the reason."""


def in_python(reason: object) -> str:
    """What stands in place of COMPILED, in `outpace doctor` and in traces, where a module's own Python runs."""
    return f"Python, because {reason}"


def check_kernels(device: torch.device) -> None:
    """Raise NotCompiled where no kernels run."""
    if device.type != "cpu":
        raise NotCompiled(f"the kernels are for CPUs, and this is on {device}")
    if loaded_kernels() is None:
        raise NotCompiled(f"there are no compiled kernels: {why_none()}")


def check_classes(module: nn.Module, classes: Collection[type], kept: Collection[str] = ()) -> None:
    """Check that a kernel may replace a module with all its submodules.

    Args:
        module: that a kernel would replace.
        classes: that the kernel was written for; layers of torch and linear layers of Outpace are allowed besides.
        kept: children that run their own Python, whatever they are.

    Raises:
        NotCompiled: a class that the kernel was not written for, a replaced method, or a hook.
    """
    _check_class(module, classes)
    for name, child in module.named_children():
        if name not in kept:
            check_classes(child, classes)


def check_stock(module: nn.Module, packages: tuple[str, ...]) -> None:
    """As `check_classes` for a model of transformers: every class must come from these packages.

    Raises:
        NotCompiled: as `check_classes`.
    """
    for part in module.modules():
        kind = type(part)
        if not kind.__module__.startswith(packages):
            raise NotCompiled(f"{kind.__name__} of {kind.__module__} is none of the classes that kernels compute")
        if not getattr(kind.forward, "__module__", "").startswith(packages):
            raise NotCompiled(f"{kind.__name__}.forward was replaced")
        _check_instance(part)


def _check_class(module: nn.Module, classes: Collection[type]) -> None:
    kind = type(module)
    _check_instance(module)
    if kind in classes:
        for owner in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            for name, method in _methods(owner):
                written = getattr(method, "__module__", None), getattr(method, "__qualname__", None)
                if written != (owner.__module__, f"{owner.__qualname__}.{name}"):
                    raise NotCompiled(f"{owner.__qualname__}.{name} was replaced")
    elif not kind.__module__.startswith(("torch.nn.modules.", "outpace.kernels.", "outpace.models.")):
        expected = ", ".join(one.__name__ for one in classes)
        raise NotCompiled(f"{kind.__name__} is none of the classes that the kernel computes: {expected}")


def _methods(owner: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        if isinstance(value, property):
            yield name, value.fget
        elif callable(value) and not isinstance(value, type):
            yield name, value


def _check_instance(module: nn.Module) -> None:
    kind = type(module)
    for name, value in vars(module).items():
        if callable(value) and callable(getattr(kind, name, None)):
            raise NotCompiled(f"{kind.__name__}.{name} was replaced on an instance")
    if module._forward_hooks or module._forward_pre_hooks:
        raise NotCompiled(f"a hook is registered on {kind.__name__}")


def check_same(name: str, compiled: Tensor, python: Tensor, is_coarse: bool) -> None:
    """Raise NotCompiled where rows [R, H] of a kernel, or one of them, differ by more than rounding from those of the
    Python that it replaces. `is_coarse`: computed in bfloat16 or int8."""
    limit = _COARSE_TOLERANCE if is_coarse else _TOLERANCE
    difference = (compiled.float() - python.float()).norm(dim=-1)  # [R]
    relative = torch.where(difference == 0, 0.0, difference / python.float().norm(dim=-1))
    if not (relative.mean() < limit and relative.max() < _SINGLE * limit):
        raise NotCompiled(f"the kernel computes other results than {name}")
