"""Values that people give by mistake, of every type, and the ones that mean to do harm."""

import random
import types
from collections import UserDict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Unspeakable:
    """Has no repr, no length, no items and equals nothing."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __iter__(self) -> Any:
        raise RuntimeError("no items")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")


def _whole(rng: random.Random) -> int:
    return rng.choice(
        [-1, 0, 1, 2, 7, 63, 263, 264, 2**31, 2**63, -(2**63), 2**64, 10**40, 10**5000, rng.randrange(300)]
    )


def _real(rng: random.Random) -> float:
    return rng.choice(
        [0.0, -0.0, 0.5, 1.0, 2.5, -1.5, 1e-320, 1e-38, 1e38, 1e308, float("nan"), float("inf"), -float("inf")]
    )


def _text(rng: random.Random) -> str:
    return rng.choice(
        ["", "x", "5", "²", "-1", "1.5", "\ud800", "a\0b", "[/red]", "é" * 5, "true", "x" * 3000, "\n", "nan"]
    )


def _array(rng: random.Random) -> Any:
    dtype = rng.choice([np.int64, np.uint8, np.int32, np.float32, np.bool_, np.complex64, np.object_, np.str_])
    shape = rng.choice([(), (0,), (1,), (3,), (1, 3), (2, 3), (1, 1, 2)])
    return np.ones(shape).astype(dtype)


def _tensor(rng: random.Random) -> Any:
    dtype = rng.choice([torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16, torch.bool])
    made = torch.ones(rng.choice([(), (0,), (1,), (3,), (1, 3), (2, 3), (1, 1, 2)]), dtype=dtype)
    kind = rng.randrange(6)
    return made.to("meta") if kind == 0 else made.to_sparse() if kind == 1 and made.ndim else made


def _scalar(rng: random.Random) -> Any:
    return rng.choice([np.int64(3), np.uint8(200), np.float32(0.5), np.float64(1.5), np.bool_(True), np.str_("x")])


def _odd(rng: random.Random) -> Any:
    return rng.choice(
        [b"", b"abc", bytearray(b"abc"), memoryview(b"abc"), Path("x"), Decimal(1), Fraction(1, 2), 1j, object(),
         Unspeakable(), Unspeakable, len, types, NotImplemented, ..., slice(2), range(3), RuntimeError("x")]
    )  # fmt: skip


def _container(rng: random.Random, depth: int) -> Any:
    items = [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    kind = rng.randrange(6)
    if kind == 0:
        return tuple(items)
    if kind == 1:
        return UserDict({rng.choice(["role", "content", "input_ids", "x"]): item for item in items})
    if kind == 2:
        return {rng.choice(["role", "content", "input_ids", 5, "5", -1, None]): item for item in items}
    if kind == 3:
        return {item for item in items if isinstance(item, int | str | float | None)}
    return items


def anything(rng: random.Random, depth: int = 0) -> Any:
    """A value of any type, containers two deep."""
    kinds: list[Callable[[random.Random], Any]] = [_whole, _real, _text, _array, _tensor, _scalar, _odd]
    kinds.append(lambda rng: rng.choice([None, True, False]))
    if depth < 2:
        kinds += [lambda rng: _container(rng, depth)] * 3
    return rng.choice(kinds)(rng)


def said(value: Any) -> str:
    """A value for a report."""
    try:
        return repr(value)[:120]
    except Exception:
        return f"a {type(value).__name__}"
