"""What a method holds: bytes that are its own business, whatever else the process has loaded."""

import sys
from collections import deque
from collections.abc import Hashable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CONTAINERS = (list, tuple, set, frozenset, deque)


def held_mb(*owners: object) -> float:
    """MiB of the tensors, arrays and containers that can be reached from objects: weights, slots of keys and values,
    tables, automata, each counted once. What a pass needs on its way, the interpreter and libraries are not in it.
    """
    held: dict[Hashable, int] = {}
    seen: set[int] = set()
    waiting: list[Any] = list(owners)
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            key, size = _storage(found)
            held[key] = size
        elif isinstance(found, np.ndarray):
            held[id(found)] = found.nbytes
        elif isinstance(found, Mapping):
            held[id(found)] = sys.getsizeof(found)
            waiting += [value for value in found.values() if _may_hold(value)]
        elif isinstance(found, _CONTAINERS):
            held[id(found)] = sys.getsizeof(found)
            waiting += [value for value in found if _may_hold(value)]
        else:
            waiting += [value for value in getattr(found, "__dict__", {}).values() if _may_hold(value)]
    return sum(held.values()) / 2**20


def _storage(tensor: Tensor) -> tuple[Hashable, int]:
    """What a tensor shares with its views, and how many bytes that is."""
    if tensor.layout == torch.strided and not tensor.is_meta:
        storage = tensor.untyped_storage()
        return (str(tensor.device), storage.data_ptr()), storage.nbytes()
    return id(tensor), 0 if tensor.is_meta else tensor.nbytes  # packed for the CPU's kernels: no views


def _may_hold(value: object) -> bool:
    """Whether to look at it: numbers and texts are too many and too small, functions and modules hold nothing of it."""
    return not isinstance(value, int | float | str | bytes | type | FunctionType | ModuleType | None)
