"""The header of a GGUF file, read within the bounds of the file before any library builds something of it.

Layout, version 2 and 3 (github.com/ggml-org/ggml, docs/gguf.md): "GGUF", a version, the numbers of tensors and of
values; values, each a key, a type and what it holds; tensors, each a name, sizes, a type and a place; then, aligned,
their numbers. All counts are 64 bits wide, so a few bytes can announce more than any memory holds.
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


# What the smallest value and the smallest tensor take: lengths of names, types, sizes and places.
_LEAST_VALUE, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8


_MOST_SIZES = 4  # of a tensor, in ggml


# Libraries keep an object for each entry of an array: a vocabulary of a million ids with ranks, kinds and merges.
_MOST_ENTRIES = 2**22


_DEFAULT_ALIGNMENT = 32


_INTEGERS = {kind for kind in GGMLQuantizationType if kind.name in ("I8", "I16", "I32", "I64")}


@dataclass(frozen=True)
class Header:
    """What a GGUF file says of itself.

    Attributes:
        values: numbers and texts by key; of arrays, their lengths.
        elements: how many weights each tensor has.
    """

    values: dict[str, object]
    elements: dict[str, int]


def read_header(path: Path) -> Header:
    """The header of a file, of which each count is held against what the file can hold.

    Raises:
        ModelError: another kind of file, one cut off, in parts or for other machines, or one that announces more than
            it holds.
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
    """A place in a file, that never leaves it."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self.size, self.place, self._entries = content, len(content), 0, 0

    def skip(self, count: int, what: str) -> int:
        """Where the next bytes begin, which are passed over."""
        if count > self.size - self.place:
            raise ValueError(f"{what} would take {count} bytes, and {self.size - self.place} are left")
        begin, self.place = self.place, self.place + count
        return begin

    def number(self, form: str, what: str) -> int | float:
        value: int | float = struct.unpack_from(form, self._content, self.skip(struct.calcsize(form), what))[0]
        return value

    def count(self, form: str, what: str, least: int) -> int:
        """A number of things that take at least so many bytes each."""
        count = int(self.number(form, what))
        if count * least > self.size - self.place:
            raise ValueError(f"{count} {what} are announced, and {self.size - self.place} bytes are left")
        return count

    def text(self, what: str) -> str:
        length = int(self.number("<Q", what))
        begin = self.skip(length, what)
        return self._content[begin : begin + length].decode("utf-8")

    def value(self, kind: int, key: str) -> object:
        """A number, a text, or the length of an array, which is passed over."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind == _STRING:
            return self.text(key)
        if kind != _ARRAY:
            raise ValueError(f"{key} is of type {kind}, which is none")
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
    end = 0  # of the tensors so far: each begins at the next aligned place behind the one before
    for _ in range(count):
        name = cursor.text("a tensor's name")
        if name in elements:
            raise ValueError(f"tensor {name} is there twice")
        sizes = cursor.count("<I", f"sizes of {name}", 8)
        if not 1 <= sizes <= _MOST_SIZES:
            raise ValueError(f"tensor {name} has {sizes} sizes; 1 to {_MOST_SIZES} are known")
        shape = [int(cursor.number("<Q", name)) for _ in range(sizes)]
        kind = GGMLQuantizationType(int(cursor.number("<I", name)))
        place = int(cursor.number("<Q", name))
        block, width = GGML_QUANT_SIZES[kind]
        if kind in _INTEGERS or prod(shape) < 1 or shape[0] % block:
            raise ValueError(f"tensor {name} is {kind.name} {shape[::-1]}, which are no weights")
        if place != _aligned(end, alignment):
            raise ValueError(f"tensor {name} is at {place}, and those before it end at {end}")
        elements[name], end = prod(shape), place + prod(shape) // block * width
    left = cursor.size - _aligned(cursor.place, alignment) - end
    if not 0 <= left < alignment:
        raise ValueError(f"behind its header {cursor.size - cursor.place} bytes are left, and its tensors take {end}")
    return elements


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
