"""Read the header of a GGUF file, checking every count against the file's size before a library allocates memory.

Layout, version 2 and 3 (github.com/ggml-org/ggml, docs/gguf.md): "GGUF", the version, the numbers of tensors and of
values; values (key, type, content); tensors (name, shape, type, offset); then, aligned, the tensors' data. All counts
have 64 bits, so a damaged file can announce more than any memory holds.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from outpace.lib.errors import ModelError

_VERSIONS = (2, 3)


_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


_STRING, _ARRAY = 8, 9


# Bytes of the smallest value and of the smallest tensor.
_LEAST_VALUE, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8


_MOST_DIMENSIONS = 4


# Libraries build an object per array entry. Enough for a vocabulary of a million ids with scores, types and merges.
_MOST_ENTRIES = 2**22


_DEFAULT_ALIGNMENT = 32


_INTEGERS = {kind for kind in GGMLQuantizationType if kind.name in ("I8", "I16", "I32", "I64")}


@dataclass(frozen=True)
class Header:
    """A GGUF file's numbers and texts by key (of arrays, their lengths), and the number of weights of each tensor."""

    values: dict[str, object]
    elements: dict[str, int]


def read_header(path: Path) -> Header:
    """Read and check a header.

    Raises:
        ModelError: not a GGUF file, cut off, one of several parts, big-endian, or with counts that exceed the file.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _read(_Cursor(content))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not a complete GGUF file ({size} bytes): {error}; download it again") from error


class _Cursor:
    """A position in a file, which never leaves it."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self.size, self.place, self._entries = content, len(content), 0, 0

    def skip(self, count: int, what: str) -> int:
        """Move past `count` bytes; returns where they begin."""
        if count > self.size - self.place:
            raise ValueError(f"{what} would take {count} bytes, and {self.size - self.place} are left")
        begin, self.place = self.place, self.place + count
        return begin

    def number(self, form: str, what: str) -> int | float:
        value: int | float = struct.unpack_from(form, self._content, self.skip(struct.calcsize(form), what))[0]
        return value

    def count(self, form: str, what: str, least: int) -> int:
        """Read the number of items that take at least `least` bytes each."""
        count = int(self.number(form, what))
        if count * least > self.size - self.place:
            raise ValueError(f"{count} {what} are announced, and {self.size - self.place} bytes are left")
        return count

    def text(self, what: str) -> str:
        length = int(self.number("<Q", what))
        begin = self.skip(length, what)
        return self._content[begin : begin + length].decode("utf-8")

    def value(self, kind: int, key: str) -> object:
        """A number, a text, or the length of an array, whose entries are skipped."""
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
            for _ in range(length):
                self.skip(int(self.number("<Q", key)), key)
        else:
            self.skip(length * width, key)
        return length


def _read(cursor: _Cursor) -> Header:
    if cursor.number("<I", "its magic") != int.from_bytes(b"GGUF", "little"):
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("<I", "its version")
    if version in {value << 24 for value in _VERSIONS}:
        raise ModelError("a GGUF file for big-endian machines; take the one for little-endian machines")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}; 2 and 3 are known")
    tensors = cursor.count("<Q", "tensors", _LEAST_TENSOR)
    values: dict[str, object] = {}
    for _ in range(cursor.count("<Q", "values", _LEAST_VALUE)):
        key = cursor.text("a key")
        if key in values:
            raise ValueError(f"{key} is there twice")
        values[key] = cursor.value(int(cursor.number("<I", key)), key)
    if isinstance(parts := values.get("split.count"), int) and parts > 1:
        raise ModelError(f"one of {parts} parts of a GGUF file; join them with llama-gguf-split --merge")
    if not tensors:
        raise ValueError("it holds no weights")
    return Header(values, _read_tensors(cursor, tensors, values.get("general.alignment", _DEFAULT_ALIGNMENT)))


def _read_tensors(cursor: _Cursor, count: int, alignment: object) -> dict[str, int]:
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={alignment!r} must be a power of two")
    elements: dict[str, int] = {}
    end = 0  # of the tensors so far: each begins at the next aligned offset
    for _ in range(count):
        name = cursor.text("a tensor's name")
        if name in elements:
            raise ValueError(f"tensor {name} is there twice")
        sizes = cursor.count("<I", f"sizes of {name}", 8)
        if not 1 <= sizes <= _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {sizes} sizes; 1 to {_MOST_DIMENSIONS} are known")
        shape = [int(cursor.number("<Q", name)) for _ in range(sizes)]
        kind = GGMLQuantizationType(int(cursor.number("<I", name)))
        place = int(cursor.number("<Q", name))
        block, width = GGML_QUANT_SIZES[kind]
        if kind in _INTEGERS or prod(shape) < 1 or shape[0] % block:
            raise ValueError(f"tensor {name} is {kind.name} {shape[::-1]}, which are not weights")
        if place != _aligned(end, alignment):
            raise ValueError(f"tensor {name} is at {place}, and those before it end at {end}")
        elements[name], end = prod(shape), place + prod(shape) // block * width
    left = cursor.size - _aligned(cursor.place, alignment) - end
    if not 0 <= left < alignment:
        raise ValueError(f"after its header {cursor.size - cursor.place} bytes are left, and its tensors take {end}")
    return elements


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
