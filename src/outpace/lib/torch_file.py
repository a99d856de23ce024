"""Torch files: plain tensors by name and nothing else, known from the file's own lists before anything is built."""

import io
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from outpace.lib.errors import ModelError

# What a dictionary of plain tensors is made of. Others make tensors without numbers, sparse, nested or quantised ones.
_BUILDERS = {"collections OrderedDict", "torch Size"} | {
    f"torch._utils _rebuild_{what}" for what in ("tensor_v2", "tensor_v3", "parameter", "parameter_with_state")
}
# Tensors may share memory, as an embedding and the head that is tied to it do; all of them together are no more than
# so many times the file.
_MOST_SHARED = 2
_OLD_PICKLES = 5  # magic, version, machine, tensors, names of their numbers


def read_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of a torch file by name, mapped where torch can map them: no code of the file is run.

    Raises:
        ModelError: anything else than a whole file of plain tensors; tensors that are larger than what it holds.
    """
    try:
        is_archive = zipfile.is_zipfile(path)
        _check_archive(path) if is_archive else _check_old(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:
        raise ModelError(
            f"{path}: cannot be read as tensors alone: {type(error).__name__}: {error}; save it as safetensors"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise ModelError(f"{path}: must hold a dictionary of tensors and nothing else")
    # Without attributes, which parameters may bring along, and which could stand in for methods.
    tensors = {str(name): Tensor.detach(tensor) for name, tensor in loaded.items()}
    if len(tensors) < len(loaded):
        raise ModelError(f"{path}: two of its tensors have the same name; save it as safetensors")
    _check_sizes(path, tensors)
    return tensors


def _check_archive(path: Path) -> None:
    """What torch would unpack and call, asked of the file's directory and of its pickle without running it."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        packed = [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]
        if packed or sum(member.file_size for member in members) > path.stat().st_size:
            raise ValueError("compressed or overlapping members, which torch does not write")
        for member in members:
            if member.filename.endswith(".pkl"):
                _check_pickle(io.BytesIO(archive.read(member)))


def _check_old(path: Path) -> None:
    """The same of a file as torch wrote before 1.6: pickles one after the other, then numbers."""
    with path.open("rb") as file:
        for _ in range(_OLD_PICKLES):
            _check_pickle(file)


def _check_pickle(file: IO[bytes]) -> None:
    for name in _globals(file):
        module, _, what = name.partition(" ")
        known = vars(torch).get(what) if module == "torch" else None
        is_kind = isinstance(known, torch.dtype) or (known is not None and what.endswith("Storage"))
        if name not in _BUILDERS and name != "torch.storage UntypedStorage" and not is_kind:
            raise ValueError(f"asks for {name.replace(' ', '.')}, which plain tensors do not need")


def _globals(file: IO[bytes]) -> Iterator[str]:
    """Every "module name" that a pickle asks for."""
    for code, argument, _ in pickletools.genops(file):
        if code.name in ("GLOBAL", "INST"):
            yield str(argument)
        elif code.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            raise ValueError(f"holds {code.name}, which torch does not write")


def _check_sizes(path: Path, tensors: dict[str, Tensor]) -> None:
    size, total = path.stat().st_size, 0
    for name, tensor in tensors.items():
        kind = _kind(tensor)
        if kind:
            raise ModelError(f"{path}: {name} is {kind}; save plain tensors, best as safetensors")
        declared = tensor.numel() * tensor.element_size()
        if declared > tensor.untyped_storage().nbytes():
            raise ModelError(
                f"{path}: {name} {list(tensor.shape)} declares {declared} bytes and the file holds "
                f"{tensor.untyped_storage().nbytes()} of them; save contiguous tensors, best as safetensors"
            )
        total += declared
    if total > _MOST_SHARED * size:
        raise ModelError(
            f"{path}: its tensors declare {total} bytes and the file has {size}; save tensors that share no memory, "
            "best as safetensors"
        )


def _kind(tensor: Any) -> str:
    """What keeps a tensor from being a plain one; nothing for plain ones."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype})"
    return f"a tensor on {tensor.device}" if tensor.device.type != "cpu" else ""
