"""Reading and writing drafter checkpoints: every name, shape and dtype accounted for, no code executed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from outpace.core.errors import ModelError

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
TORCH_WEIGHTS = "pytorch_model.bin"
MEDUSA_WEIGHTS, MEDUSA_TORCH_WEIGHTS = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Checkpoint:
    """A folder as it was read.

    Attributes:
        name: the folder, for errors.
        config: config.json.
        tensors: all tensors by their names in the file.
    """

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
    return Checkpoint(str(folder), _read_object(path / "config.json"), _read_tensors(path))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must hold an object, not {type(content).__name__}")
    return content


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if (path / INDEX).is_file():
        shards = _read_object(path / INDEX).get("weight_map")
        # A shard is a file of this folder: an index that points elsewhere is damaged, or not meant well.
        if not isinstance(shards, dict) or any(Path(str(file)).name != file for file in shards.values()):
            raise ModelError(f"{path / INDEX}: weight_map must give a file name of this folder for each tensor")
        return _read_safetensors(path, sorted(set(shards.values())))
    for file in (WEIGHTS, MEDUSA_WEIGHTS):
        if (path / file).is_file():
            return _read_safetensors(path, [file])
    for file in (TORCH_WEIGHTS, MEDUSA_TORCH_WEIGHTS):
        if (path / file).is_file():
            return _read_torch(path / file)
    raise ModelError(f"{path}: no {WEIGHTS}, {INDEX} or {TORCH_WEIGHTS} there")


def _read_safetensors(path: Path, files: list[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(path / file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path / file}: cannot be read, maybe cut off: {error}; download it again") from error
    return tensors


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:
        raise ModelError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise ModelError(f"{path}: must hold a dictionary of tensors and nothing else")
    return {str(name): tensor for name, tensor in loaded.items()}


def fill(net: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Put tensors into a net's parameters and persistent buffers, by the net's own names.

    Floating-point dtypes may differ from the net's; kinds may not.

    Args:
        net: its parameters are overwritten.
        tensors: one for each parameter and buffer, no more.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: names that are missing or left over, shapes or kinds that differ; all of them are named.
    """
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
    if complaints:
        raise ModelError(f"{name}: does not fit its config: {'; '.join(sorted(complaints))}")
    with torch.no_grad():
        for key, weight in wanted.items():
            weight.copy_(tensors[key])


def write_checkpoint(
    folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = WEIGHTS
) -> None:
    """Write config.json and the weights as safetensors.

    Raises:
        ModelError: the folder already holds a checkpoint; a weight is NaN, which is how nets mark what was never set.
    """
    path = Path(folder)
    unset = [name for name, tensor in tensors.items() if tensor.is_floating_point() and bool(tensor.isnan().any())]
    if unset:
        raise ModelError(f"{folder}: not written, weights are NaN: {', '.join(sorted(unset))}")
    if (path / "config.json").exists():
        raise ModelError(f"{folder}: already holds a checkpoint; choose an empty folder")
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
