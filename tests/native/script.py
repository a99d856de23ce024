"""Scripts of calls of the kernels for driver.cpp: written on one machine and run on another, or under an emulator."""

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

_CALL, _CLOSE, _SAME = range(3)
_NUMBER, _ADDRESS = range(2)
_SPARE = 4096
"""Bytes behind a buffer: kernels may read some rows behind the last one."""
Memory = Any
"""A tensor, an array of NumPy, or a structure or array of ctypes."""


class Script:
    """Calls of kernels and what must come of them. Memory is written as it is when the script is written."""

    def __init__(self) -> None:
        self._buffers: list[tuple[int, int, Memory]] = []  # address, bytes
        self._steps: list[bytes] = []

    def keep(self, *memory: Memory) -> None:
        """Make known what structures point to."""
        for one in memory:
            start, size = _span(one)
            if self._find(start) is None:
                self._buffers.append((start, max(size, 1), one))  # arrays without elements have an address too

    def call(self, name: str, *arguments: Memory | int | None, result: Memory = None) -> None:
        """Call `outpace_<name>`.

        Args:
            arguments: integers, memory, None for a null pointer.
            result: [1] int64 that receives what the function returns.
        """
        step = [_number(_CALL), _text(f"outpace_{name}"), _number(len(arguments))]
        for one in arguments:
            if one is None or isinstance(one, int):
                step += [_number(_NUMBER), _number(one or 0)]
            else:
                step += [_number(_ADDRESS), self._place(one)]
        step.append(_number(0) if result is None else _number(1) + self._place(result))
        self._steps.append(b"".join(step))

    def close(self, label: str, found: Memory, expected: torch.Tensor, share: float) -> None:
        """Require floats of `found` to be as expected, within a share of the largest of them."""
        expected = expected.float().contiguous()
        assert found.shape == expected.shape, (found.shape, expected.shape)
        tail = _number(found.numel()), struct.pack("<d", share)
        places = self._place(found), self._place(expected)
        self._steps.append(b"".join((_number(_CLOSE), _text(label), *places, *tail)))

    def same(self, label: str, found: Memory, expected: Memory) -> None:
        """Require the same bytes."""
        size = _span(found)[1]
        assert size == _span(expected)[1] > 0, label
        places = self._place(found), self._place(expected)
        self._steps.append(b"".join((_number(_SAME), _text(label), *places, _number(size))))

    def write(self, path: Path) -> None:
        """Write the script."""
        for _, _, memory in list(self._buffers):
            self._addresses(memory)  # which may make other memory known
        parts = [_number(len(self._buffers))]
        for start, size, memory in self._buffers:
            places = list(self._addresses(memory))
            parts += [
                _number(size + _SPARE),
                ctypes.string_at(start, size),
                bytes(_SPARE),
                _number(len(places)),
                *places,
            ]
        path.write_bytes(b"".join((*parts, _number(len(self._steps)), *self._steps)))

    def _find(self, address: int) -> tuple[int, int] | None:
        """The buffer that an address is in, and its place there."""
        for index, (start, size, _) in enumerate(self._buffers):
            if start <= address < start + size:
                return index, address - start
        return None

    def _place(self, memory: Memory) -> bytes:
        self.keep(memory)
        found = self._find(_span(memory)[0])
        assert found is not None, "memory of no bytes"
        return b"".join(map(_number, found))

    def _addresses(self, memory: Memory) -> Iterator[bytes]:
        """Where a structure points to: its own place, and that in a buffer."""
        if not isinstance(memory, ctypes.Structure | ctypes.Array):
            return
        raw = bytes(memory)
        for at in _pointers(type(memory)):
            (address,) = struct.unpack_from("<Q", raw, at)
            if address:
                found = self._find(address)
                assert found is not None, f"{type(memory).__name__} points to unknown memory at byte {at}"
                yield b"".join(map(_number, (at, *found)))


def _pointers(kind: Any, start: int = 0) -> Iterator[int]:
    """Where a type of ctypes holds addresses."""
    if kind is ctypes.c_void_p or issubclass(kind, ctypes._Pointer):
        yield start
    elif issubclass(kind, ctypes.Array):
        for index in range(kind._length_):
            yield from _pointers(kind._type_, start + index * ctypes.sizeof(kind._type_))
    elif issubclass(kind, ctypes.Structure):
        for name, field, *_ in kind._fields_:
            yield from _pointers(field, start + getattr(kind, name).offset)


def _span(memory: Memory) -> tuple[int, int]:
    """The address and the bytes of memory without gaps."""
    if isinstance(memory, torch.Tensor):
        assert memory.is_contiguous()
        return memory.data_ptr(), memory.nbytes
    if isinstance(memory, np.ndarray):
        assert memory.flags.c_contiguous
        return memory.__array_interface__["data"][0], memory.nbytes
    return ctypes.addressof(memory), ctypes.sizeof(memory)


def _number(value: int) -> bytes:
    return struct.pack("<q", value)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _number(len(encoded)) + encoded
