"""Reading and writing drafter checkpoints: every name, shape and dtype accounted for, no code executed.

Torch files may hold plain tensors by name and nothing else; this is checked in their pickles before anything is built.
"""

import io
import json
import pickletools
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor, nn

from outpace.lib.errors import ModelError
from outpace.lib.int8 import attach, int8_of, is_quantized, widened
from outpace.lib.tensor_file import opened, save_tensors

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
TORCH_WEIGHTS = "pytorch_model.bin"
MEDUSA_WEIGHTS, MEDUSA_TORCH_WEIGHTS = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_FILES = (WEIGHTS, MEDUSA_WEIGHTS, TORCH_WEIGHTS, MEDUSA_TORCH_WEIGHTS)
R = TypeVar("R")


@dataclass(frozen=True)
class Checkpoint:
    """A folder as it was read."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Read config.json and the weights: safetensors, sharded or not, else a torch file read with weights_only.

    Raises:
        ModelError: no such folder, a missing or malformed file, a file cut off.
    """
    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json there; give the folder of a drafter checkpoint")
    config, tensors = read_object(path / "config.json"), read_files(path, _FILES, _read_tensors, str(path))
    return Checkpoint(str(folder), config, widened(tensors, str(folder)) if is_quantized(config) else tensors)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and nesting as deep
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must hold an object, not {type(content).__name__}")
    return content


def read_files(
    folder: Path,
    files: Iterable[str],
    read: Callable[[Path], dict[str, R]],
    name: str,
    may_lack: Callable[[str], object] | None = None,
) -> dict[str, R]:
    """What a function reads of each tensor in a folder.

    Args:
        files: names of files of all weights; the first that is there is read, or the shards that its index lists.
        read: gets a file, and returns what it reads by the names of tensors.
        name: of the checkpoint, for errors.
        may_lack: whether no file need hold a tensor of the index; None for no tensor.

    Raises:
        ModelError: no weights; a damaged file; a tensor in two files, or listed in the index and in no file.
    """
    for whole in files:
        if (folder / whole).is_file():
            return read(folder / whole)
        if not (folder / (index := f"{whole}.index.json")).is_file():
            continue
        listed, found = weight_map(folder, index), dict[str, R]()
        for shard in sorted(set(listed.values())):
            own = read(folder / shard)
            if twice := sorted(own.keys() & found.keys()):
                raise ModelError(f"{folder / shard}: holds {twice[0]}, and so does another shard; download it again")
            found |= own
        if absent := sorted(key for key in listed.keys() - found.keys() if not (may_lack and may_lack(key))):
            raise ModelError(f"{folder / index}: lists {', '.join(absent)}, which no shard holds; download it again")
        return found
    raise ModelError(f"{name}: no {WEIGHTS}, {INDEX} or {TORCH_WEIGHTS} there; save the weights as safetensors")


def _read_tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix != ".safetensors":
        return read_torch(file)
    with opened(file) as content:
        return {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118


def weight_map(path: Path, index: str = INDEX) -> dict[str, str]:
    """The shard of each tensor, from the index in a folder."""
    shards = read_object(path / index).get("weight_map")
    # A shard is a file of this folder: an index that points elsewhere is damaged or malicious.
    if not isinstance(shards, dict) or any(Path(str(file)).name != file for file in shards.values()):
        raise ModelError(f"{path / index}: weight_map must give a file name of this folder for each tensor")
    return shards


def write_index(folder: str | Path) -> None:
    """Write an index of a folder's weights file. Without one, vLLM and SGLang would also read other safetensors files
    there as weights."""
    path = Path(folder)
    with opened(path / WEIGHTS) as file:
        names = sorted(file.keys())
    size = (path / WEIGHTS).stat().st_size
    listed = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(names, WEIGHTS)}
    (path / INDEX).write_text(json.dumps(listed, indent=2) + "\n")


def write_checkpoint(
    folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = WEIGHTS
) -> None:
    """Write config.json and the weights as safetensors.

    Raises:
        ModelError: the folder already holds a checkpoint, or cannot be written; a weight is NaN, with which nets mark
            weights that were never set.
    """
    path = Path(folder)
    unset = [name for name, tensor in tensors.items() if tensor.is_floating_point() and bool(tensor.isnan().any())]
    if unset:
        raise ModelError(f"{folder}: not written, weights are NaN: {', '.join(sorted(unset))}")
    if (path / "config.json").exists():
        raise ModelError(f"{folder}: already holds a checkpoint; choose an empty folder")
    path.mkdir(parents=True, exist_ok=True)
    save_tensors(path / file, tensors, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")


# Names in the pickle of plain tensors. Other builders make sparse, nested or quantised tensors, or ones without data.
_BUILDERS = {"collections OrderedDict", "torch Size"} | {
    f"torch._utils _rebuild_{what}" for what in ("tensor_v2", "tensor_v3", "parameter", "parameter_with_state")
}
# Tensors may share memory, such as an embedding and the head tied to it; together they may declare at most this many
# times the file's bytes.
_MOST_SHARED = 2
_OLD_PICKLES = 5  # magic, version, machine, tensors, names of their numbers


def read_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of a torch file by name, mapped where torch can map them: no code of the file is run.

    Raises:
        ModelError: the file is incomplete, holds more than plain tensors, or has less data than its tensors declare.
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
    # Without the attributes of loaded tensors, which could replace methods.
    tensors = {str(name): Tensor.detach(tensor) for name, tensor in loaded.items()}
    if len(tensors) < len(loaded):
        raise ModelError(f"{path}: two of its tensors have the same name; save it as safetensors")
    _check_sizes(path, tensors)
    return tensors


def _check_archive(path: Path) -> None:
    """Refuse (ValueError) compressed or overlapping members, and pickles that need more than plain tensors do; run
    nothing."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        packed = [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]
        if packed or sum(member.file_size for member in members) > path.stat().st_size:
            raise ValueError("compressed or overlapping members, which torch does not write")
        for member in members:
            if member.filename.endswith(".pkl"):
                _check_pickle(io.BytesIO(archive.read(member)))


def _check_old(path: Path) -> None:
    """`_check_archive` for the format before torch 1.6: pickles one after the other, then data."""
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
    """Every global that a pickle imports, as "module name"."""
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
    """What a tensor is if not a plain one, such as "a nested tensor"; empty for plain ones."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype})"
    return f"a tensor on {tensor.device}" if tensor.device.type != "cpu" else ""


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
    check_fit(net, tensors, name)  # before memory is allocated: a damaged config may need any amount
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in floats))  # wide enough to round nothing
    net = net.to(dtype).to_empty(device=floats[0].device)
    with torch.no_grad():
        for key, weight in net.state_dict(keep_vars=True).items():
            weight.copy_(tensors[key])
            attach(weight, int8_of(tensors[key]))
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
