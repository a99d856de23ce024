"""A drafter net by the folder or hub id of its checkpoint, told apart by its config."""

import json
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from torch import nn

from outpace.drafters.kinds import kind_of_config, kinds
from outpace.lib.checkpoint import INDEX, MEDUSA_TORCH_WEIGHTS, TORCH_WEIGHTS, Checkpoint, read_checkpoint
from outpace.lib.errors import ModelError

_FILES = ("config.json", "*.safetensors", INDEX, TORCH_WEIGHTS, MEDUSA_TORCH_WEIGHTS)


def is_net(name: str) -> bool:
    """Whether a local folder holds a drafter net rather than a language model."""
    file = Path(name).expanduser() / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return False  # whoever reads it will say so
    return isinstance(config, dict) and kind_of_config(config) is not None


def load_net(name: str) -> nn.Module:
    """Read a drafter net; no code of the checkpoint is run.

    Args:
        name: a folder, or a hub id.

    Raises:
        ModelError: nothing there, another kind of checkpoint, or one that does not fit its config.
    """
    return read_net(read_checkpoint(locate(name, _FILES, "drafter")))


def locate(name: str, files: Sequence[str], field: str) -> Path:
    """The folder of a checkpoint; one on the hub is downloaded first.

    Args:
        name: a folder, or a hub id.
        files: names or patterns of the files that are wanted of it.
        field: what the name was given as, for errors.

    Raises:
        ModelError: neither a folder nor on the hub.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ModelError(f"{field}={name!r}: no such folder, and not found on the hub: {reason}") from error


def read_net(checkpoint: Checkpoint) -> nn.Module:
    """The net of a checkpoint of any known kind.

    Raises:
        ModelError: an unknown kind, or a checkpoint that does not fit its config.
    """
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
