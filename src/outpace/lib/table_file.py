"""Files of tables counted in texts for one vocabulary: written once, checked when read."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outpace.lib.checks import path_of
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.tensor_file import opened, save_tensors


@dataclass(frozen=True)
class TableKind:
    """What kind of table a file holds.

    Attributes:
        option: the method's option that names such a file.
        what: the kind in words, with its article.
        command: the command that makes one.
        names: names of the tensors that it must hold.
        optional: names of further tensors that it may hold.
    """

    option: str
    what: str
    command: str
    names: frozenset[str]
    optional: frozenset[str] = frozenset()

    @property
    def format(self) -> str:
        """The format in the file's metadata."""
        return f"outpace.{self.option}"


def as_ids(ids: Sequence[int], vocab_size: int) -> Tensor:
    """[T] int64 ids of a text."""
    found = torch.as_tensor(ids, dtype=torch.int64)
    if len(found) and (int(found.min()) < 0 or int(found.max()) >= vocab_size):
        raise InvalidRequest(f"ids {int(found.min())} to {int(found.max())}: the vocabulary ends at {vocab_size}")
    return found


def new_file(file: str | Path) -> Path:
    """The path of a new file; InvalidRequest if it exists or cannot be written."""
    path = path_of(file)
    if path.exists() or not path.parent.is_dir():
        raise InvalidRequest(f"{path}: exists already, or its folder does not; name a new file")
    if not os.access(path.parent, os.W_OK):
        raise InvalidRequest(f"{path}: its folder cannot be written; name a file in another")
    return path


def save_table(
    file: str | Path,
    kind: TableKind,
    tensors: Mapping[str, Tensor],
    vocab_size: int,
    about: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as a safetensors file, with the size of the target's vocabulary."""
    said = {**(about or {}), "format": kind.format, "vocab_size": str(vocab_size)}
    save_tensors(new_file(file), tensors, said)


def load_table(file: str | Path, kind: TableKind, vocab_size: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors that `save_table` wrote, by name, whose contents the caller checks, and the file's metadata.

    Raises:
        ModelError: no such file, another kind of file, or one for another vocabulary than the target's.
    """
    path, remedy = path_of(file), f"make one with `outpace {kind.command}`"
    named = f"{kind.option}={path}"
    with opened(path, remedy, named) as content:
        about, names = content.metadata() or {}, set(content.keys())
        if about.get("format") != kind.format or not kind.names <= names <= kind.names | kind.optional:
            raise ModelError(f"{named}: not {kind.what}; {remedy}")
        tensors = {name: content.get_tensor(name) for name in names}
    made_for = about.get("vocab_size")
    if made_for != str(vocab_size):
        raise ModelError(f"{named}: made for {made_for} ids, and the target has {vocab_size}")
    return tensors, about
