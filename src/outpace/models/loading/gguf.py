"""Read a GGUF file once: its values, arrays included, and its tensors as views of the memory-mapped file.

Layout, version 2 and 3 (github.com/ggml-org/ggml, docs/gguf.md): "GGUF", the version, the numbers of tensors and of
values; values (key, type, content); tensors (name, shape, type, offset); then, aligned, the tensors' data. All counts
have 64 bits, so a damaged file can announce more than any memory holds: every count is checked against the bytes left.
"""

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from os.path import samestat
from pathlib import Path
from typing import Any

import numpy as np

from outpace.kernels.formats import BlockFormat, bytes_of, is_whole
from outpace.lib.errors import ModelError

_VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
# Bytes of the smallest value and of the smallest tensor.
_LEAST_VALUE, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8
_MOST_DIMENSIONS = 4
# Each text of an array becomes an object. Enough for a vocabulary of a million ids with scores, types and merges.
_MOST_ENTRIES = 2**22
_DEFAULT_ALIGNMENT = 32
_INTEGERS = {kind for kind in BlockFormat if kind.name in ("I8", "I16", "I32", "I64")}
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_REMOVED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
"""Types that GGUF no longer has."""


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """A tensor as the file stores it.

    Attributes:
        shape: outermost dimension first, [out, in] of a matrix; the file lists sizes the other way round.
        kind: the format of its blocks.
        data: bytes [..., out, bytes per row], a view of the memory-mapped file.
    """

    name: str
    shape: tuple[int, ...]
    kind: BlockFormat
    data: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, eq=False)
class GgufFile:
    """A GGUF file, which stays mapped as long as this or one of its tensors is used.

    Attributes:
        values: by key; an array of texts is a list, an array of numbers a NumPy array.
        tensors: by name.
        content: the mapped file.
        status: of the file when it was mapped.
    """

    path: Path
    values: dict[str, Any]
    tensors: dict[str, GgufTensor]
    content: mmap.mmap
    status: os.stat_result

    @contextmanager
    def opened(self) -> Iterator[Callable[[np.ndarray[Any, Any]], tuple[int, int]]]:
        """Open the file to read what its mapping shows: yields a function that returns, for a view of the mapping, the
        descriptor of the file and where the view begins in it, and (-1, 0) for another array.

        Raises:
            ModelError: the file is gone, or another one has taken its name.
        """
        whole = np.frombuffer(self.content, np.uint8)
        begin, end = whole.ctypes.data, whole.ctypes.data + len(whole)
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be read again: {error}") from error
        with file:
            if not samestat(os.fstat(file.fileno()), self.status):
                raise ModelError(f"{self.path}: was replaced by another file while it was loaded; load it again")

            def place(data: np.ndarray[Any, Any]) -> tuple[int, int]:
                address = data.ctypes.data
                return (file.fileno(), address - begin) if begin <= address < end else (-1, 0)

            yield place

    def release(self) -> None:
        """Take the file's pages out of the process's memory; those that are read again come back."""
        if hasattr(self.content, "madvise"):  # not on Windows
            self.content.madvise(mmap.MADV_DONTNEED)


def read_gguf(path: Path) -> GgufFile:
    """Map, read and check a GGUF file.

    Raises:
        ModelError: it cannot be opened; not a GGUF file, cut off, one of several parts, big-endian, of a type that is
            not known, or with counts that exceed the file.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _read(_Cursor(content), path, status)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except OSError as error:  # the file itself may be intact
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}; check its permissions") from error
    except ValueError as error:
        raise ModelError(f"{path}: not a complete GGUF file ({size} bytes): {error}; download it again") from error


class _Cursor:
    """A read position that stays inside the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.size, self.place, self._entries = content, len(content), 0, 0

    def skip(self, count: int, what: str) -> int:
        """Move past `count` bytes; returns where they begin."""
        if count > self.size - self.place:
            raise ValueError(f"{what} would take {count} bytes, and {self.size - self.place} are left")
        begin, self.place = self.place, self.place + count
        return begin

    def number(self, form: str, what: str) -> int | float:
        value: int | float = struct.unpack_from(form, self.content, self.skip(struct.calcsize(form), what))[0]
        return value

    def count(self, form: str, what: str, least: int) -> int:
        """Read the number of items that take at least `least` bytes each."""
        count = int(self.number(form, what))
        if count * least > self.size - self.place:
            raise ValueError(f"{count} {what} are declared, and {self.size - self.place} bytes are left")
        return count

    def text(self, what: str) -> str:
        length = int(self.number("<Q", what))
        begin = self.skip(length, what)
        return self.content[begin : begin + length].decode("utf-8")

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind == _STRING:
            return self.text(key)
        if kind != _ARRAY:
            raise ValueError(f"{key} is of type {kind}, which does not exist")
        inner = int(self.number("<I", key))
        if inner not in _SCALARS and inner != _STRING:
            raise ValueError(f"{key} is an array of type {inner}, which cannot be read")
        width = 8 if inner == _STRING else struct.calcsize(_SCALARS[inner])
        length = self.count("<Q", f"entries of {key}", width)
        self._entries += length
        if self._entries > _MOST_ENTRIES:
            raise ValueError(f"arrays up to {key} have {self._entries} entries, more than {_MOST_ENTRIES}")
        if inner == _STRING:
            return self._texts(length, key)
        begin = self.skip(length * width, key)
        return np.frombuffer(self.content, np.dtype(_SCALARS[inner]), length, begin)

    def _texts(self, count: int, key: str) -> list[str]:
        """Read many texts at 0.3 microseconds each, in one loop over local names."""
        content, size, unpack, place = self.content, self.size, _LENGTH.unpack_from, self.place
        texts = []
        for _ in range(count):
            begin = place + 8
            place = begin + unpack(content, place)[0] if begin <= size else begin
            if place > size:
                raise ValueError(f"the texts of {key} extend beyond the file")
            texts.append(content[begin:place].decode("utf-8"))
        self.place = place
        return texts


def _read(cursor: _Cursor, path: Path, status: os.stat_result) -> GgufFile:
    if cursor.number("<I", "its magic") != int.from_bytes(b"GGUF", "little"):
        raise ModelError(
            "not a GGUF file; of a model in another format give the folder with its config.json, or download it again"
        )
    version = cursor.number("<I", "its version")
    if version in {value << 24 for value in _VERSIONS}:
        raise ModelError("a GGUF file for big-endian machines; take the one for little-endian machines")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}; 2 and 3 are known")
    tensors = cursor.count("<Q", "tensors", _LEAST_TENSOR)
    values: dict[str, Any] = {}
    for _ in range(cursor.count("<Q", "values", _LEAST_VALUE)):
        key = cursor.text("a key")
        if key in values:
            raise ValueError(f"{key} appears twice")
        values[key] = cursor.value(int(cursor.number("<I", key)), key)
    if isinstance(parts := values.get("split.count"), int) and parts > 1:
        raise ModelError(f"one of {parts} parts of a GGUF file; join them with llama-gguf-split --merge")
    if not tensors:
        raise ValueError("it holds no weights")
    found = _read_tensors(cursor, tensors, values.get("general.alignment", _DEFAULT_ALIGNMENT))
    return GgufFile(path, values, found, cursor.content, status)


def _read_tensors(cursor: _Cursor, count: int, alignment: object) -> dict[str, GgufTensor]:
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={alignment!r} must be a power of two")
    places: dict[str, tuple[int, tuple[int, ...], BlockFormat]] = {}
    end = 0  # of the tensors so far: each begins at the next aligned offset
    for _ in range(count):
        name = cursor.text("a tensor's name")
        if name in places:
            raise ValueError(f"tensor {name} appears twice")
        sizes = cursor.count("<I", f"sizes of {name}", 8)
        if not 1 <= sizes <= _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {sizes} sizes; 1 to {_MOST_DIMENSIONS} are known")
        shape = tuple(int(cursor.number("<Q", name)) for _ in range(sizes))[::-1]
        kind = _kind(int(cursor.number("<I", name)), name)
        place = int(cursor.number("<Q", name))
        if kind in _INTEGERS or prod(shape) < 1 or not is_whole(kind, shape[-1]):
            raise ValueError(f"tensor {name} is {kind.name} {list(shape)}, which are not weights")
        if place != _aligned(end, alignment):
            raise ValueError(f"tensor {name} is at {place}, and those before it end at {end}")
        places[name], end = (place, shape, kind), place + bytes_of(kind, prod(shape))
    base = _aligned(cursor.place, alignment)
    if not 0 <= cursor.size - base - end < alignment:
        raise ValueError(f"after its header {cursor.size - cursor.place} bytes are left, and its tensors take {end}")
    content = np.frombuffer(cursor.content, np.uint8)
    found = {}
    for name, (place, shape, kind) in places.items():
        rows = (*shape[:-1], bytes_of(kind, shape[-1]))
        found[name] = GgufTensor(name, shape, kind, content[base + place :][: prod(rows)].reshape(rows))
    return found


def _kind(number: int, name: str) -> BlockFormat:
    try:
        return BlockFormat(number)
    except ValueError:
        called = _REMOVED.get(number, f"{number}, which is not known")
        raise ModelError(
            f"tensor {name} is of type {called}; take a file of a common type, as Q4_K_M or Q8_0, or make one with "
            "llama-quantize"
        ) from None


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
