"""Reading and writing drafter checkpoints: every name, shape and dtype accounted for, no code executed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outpace.lib.errors import ModelError
from outpace.lib.torch_file import read_torch

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
TORCH_WEIGHTS = "pytorch_model.bin"
MEDUSA_WEIGHTS, MEDUSA_TORCH_WEIGHTS = "medusa_lm_head.safetensors", "medusa_lm_head.pt"


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
    return Checkpoint(str(folder), read_object(path / "config.json"), _read_tensors(path))


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


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if (path / INDEX).is_file():
        listed = weight_map(path)
        tensors = _read_safetensors(path, sorted(set(listed.values())))
        if absent := sorted(listed.keys() - tensors.keys()):  # an optional one would be missed without a word
            raise ModelError(f"{path / INDEX}: lists {', '.join(absent)}, which no shard holds; download it again")
        return tensors
    for file in (WEIGHTS, MEDUSA_WEIGHTS):
        if (path / file).is_file():
            return _read_safetensors(path, [file])
    for file in (TORCH_WEIGHTS, MEDUSA_TORCH_WEIGHTS):
        if (path / file).is_file():
            return read_torch(path / file)
    raise ModelError(f"{path}: no {WEIGHTS}, {INDEX} or {TORCH_WEIGHTS} there; save the weights as safetensors")


def weight_map(path: Path, index: str = INDEX) -> dict[str, str]:
    """The shard of each tensor, from the index in a folder."""
    shards = read_object(path / index).get("weight_map")
    # A shard is a file of this folder: an index that points elsewhere is damaged, or not meant well.
    if not isinstance(shards, dict) or any(Path(str(file)).name != file for file in shards.values()):
        raise ModelError(f"{path / index}: weight_map must give a file name of this folder for each tensor")
    return shards


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, of which only the tensors that are asked for are read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read, maybe cut off: {error}; download it again") from error


def write_index(folder: str | Path) -> None:
    """List the tensors of a folder's weights file, so that a reader takes no other safetensors file there for weights,
    as vLLM and SGLang do without a list."""
    path = Path(folder)
    with opened(path / WEIGHTS) as file:
        names = sorted(file.keys())
    size = (path / WEIGHTS).stat().st_size
    listed = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(names, WEIGHTS)}
    (path / INDEX).write_text(json.dumps(listed, indent=2) + "\n")


def _read_safetensors(path: Path, files: Sequence[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in files:
        with opened(path / name) as file:
            for key in file.keys():  # noqa: SIM118
                if key in tensors:
                    raise ModelError(f"{path / name}: holds {key}, and so does another shard; download it again")
                tensors[key] = file.get_tensor(key)
    return tensors


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
