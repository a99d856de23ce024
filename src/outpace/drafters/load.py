"""Drafters by the folder or hub id of their checkpoint, and a fingerprint of what was read."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.drafters.kinds import kind_of_config, kinds
from outpace.drafters.method import LANGUAGE_MODEL
from outpace.lib.checkpoint import INDEX, MEDUSA_TORCH_WEIGHTS, TORCH_WEIGHTS, Checkpoint, read_checkpoint, read_object
from outpace.lib.checks import path_of
from outpace.lib.errors import ModelError, first_line
from outpace.models.loading.registry import pulled, resolve

FILES = ("config.json", "*.safetensors", INDEX, TORCH_WEIGHTS, MEDUSA_TORCH_WEIGHTS)
"""Names and patterns of the files in a checkpoint's folder that hold the drafter."""
PROVENANCE = "provenance.json"  # of a drafter's training


def is_net(name: str) -> bool:
    """Whether a local folder holds a drafter net rather than a language model."""
    file = Path(name).expanduser() / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return False  # reading it raises the error
    return isinstance(config, dict) and kind_of_config(config) is not None


def provenance_of(folder: Path | None) -> dict[str, Any]:
    """The provenance that `outpace train` wrote into a folder, with a training `run`; empty where none can be read."""
    try:
        found = json.loads((folder / PROVENANCE).read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("run"), dict) else {}


def load_net(name: str) -> nn.Module:
    """Read a drafter net; no code of the checkpoint is run."""
    return read_net(read_checkpoint(locate(name, FILES, "drafter")))


def locate(name: str, files: Sequence[str], field: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint: a local one, a pulled model's, or one on the hub, which is downloaded first. `files`:
    names or patterns of the files to download. `revision`: on the hub; None for the latest."""
    path = path_of(name)
    if path.is_dir():
        return path
    if name in (folders := pulled()):
        return folders[name]
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except Exception as error:
        raise ModelError(f"{field}={name!r}: no such folder, and not found on the hub: {first_line(error)}") from error


def kind_at(name: str) -> str:
    """What kind of drafter a folder, pulled name or hub id holds, by its config.json; a language model if it describes
    no net, or is a GGUF file."""
    location = resolve(name)
    if location.gguf is not None:
        return LANGUAGE_MODEL
    kind = kind_of_config(read_object(locate(location.path, ("config.json",), "drafter") / "config.json"))
    return LANGUAGE_MODEL if kind is None else kind.name


def read_net(checkpoint: Checkpoint) -> nn.Module:
    """The net of a checkpoint of any known kind."""
    kind = kind_of_config(checkpoint.config)
    if kind is None or kind.read is None:
        named = {key: checkpoint.config.get(key) for key in ("architectures", "speculators_model_type", "model_type")}
        stated = ", ".join(f"{key}={value!r}" for key, value in named.items() if value is not None)
        known = ", ".join(row.name for row in kinds().values() if row.read is not None)
        raise ModelError(
            f"{checkpoint.name}: config.json describes no known drafter ({stated or 'no architecture'}); known kinds "
            f"are {known}"
        )
    return kind.read(checkpoint)


SAMPLED = 64
"""Number of evenly spaced values of each tensor that are hashed: training changes all values, and reading all would
take seconds."""


def fingerprint(net: nn.Module) -> str:
    """The net's kind, and a hash of its config and of a sample of every tensor. Layouts, file names and wider dtypes of
    the same values do not matter; rounding does. `net`: as read, in its file's dtype and before its linear layers are
    packed, which hides their weights. Returns a name such as "Eagle3Net-0f3a5c7e9b1d"."""
    config: Any = net.config
    return fingerprint_of(type(net).__name__, config.model_dump_json(exclude_defaults=True), net.state_dict())


def fingerprint_of(kind: str, config: str, tensors: Mapping[str, Tensor]) -> str:
    """As `fingerprint`, from a kind, a config and tensors."""
    digest = hashlib.sha256(config.encode())
    for name, weight in sorted(tensors.items()):
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLED)].to("cpu", torch.float64)
        digest.update(f"{name}{list(weight.shape)}".encode() + sample.numpy().tobytes())
    return f"{kind}-{digest.hexdigest()[:12]}"
