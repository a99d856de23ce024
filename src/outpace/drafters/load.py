"""A drafter net by the folder or hub id of its checkpoint, told apart by its config."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from torch import nn

from outpace.drafters.dart.files import ARCHITECTURE as DART
from outpace.drafters.dart.files import read_dart
from outpace.drafters.dflash.files import read_dflash
from outpace.drafters.domino.files import is_domino, read_domino
from outpace.drafters.eagle3.files import read_eagle3
from outpace.drafters.medusa.files import read_medusa
from outpace.lib.checkpoint import INDEX, MEDUSA_TORCH_WEIGHTS, TORCH_WEIGHTS, Checkpoint, read_checkpoint
from outpace.lib.errors import ModelError

_FILES = ("config.json", "*.safetensors", INDEX, TORCH_WEIGHTS, MEDUSA_TORCH_WEIGHTS)
_EAGLE = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
_DFLASH = ("DFlashDraftModel", "DominoDraftModel", "DFlashSpeculator")


def _read_block(checkpoint: Checkpoint) -> nn.Module:
    return read_domino(checkpoint) if is_domino(checkpoint) else read_dflash(checkpoint)


READERS: dict[str, Callable[[Checkpoint], nn.Module]] = {
    "eagle3": read_eagle3,
    "dflash": _read_block,
    "medusa": read_medusa,
    "dart": read_dart,
}
"""The kinds of drafter nets; Domino's are DFlash's with more fields."""


def kind_of(config: Mapping[str, object]) -> str | None:
    """What a config.json describes: a key of READERS, or None where it is no drafter net that is known here."""
    named = config.get("architectures")
    architectures = named if isinstance(named, list) else []
    said = config.get("speculators_model_type")
    if said is not None:  # other kinds of that library have fields that look like these
        return str(said) if said in ("eagle3", "dflash") else None
    if DART in architectures:  # before EAGLE-3, whose fields it has too
        return "dart"
    if any(name in _EAGLE for name in architectures) or "draft_vocab_size" in config:
        return "eagle3"
    if any(name in _DFLASH for name in architectures) or "dflash_config" in config:
        return "dflash"
    if "MedusaModel" in architectures or config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    return None


def is_net(name: str) -> bool:
    """Whether a local folder holds a drafter net rather than a language model."""
    file = Path(name).expanduser() / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return False  # whoever reads it will say so
    return isinstance(config, dict) and kind_of(config) is not None


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
    kind = kind_of(checkpoint.config)
    if kind is None:
        named = {key: checkpoint.config.get(key) for key in ("architectures", "speculators_model_type", "model_type")}
        stated = ", ".join(f"{key}={value!r}" for key, value in named.items() if value is not None)
        raise ModelError(
            f"{checkpoint.name}: config.json describes no drafter net that is known here "
            f"({stated or 'no architecture'}); known are EAGLE-3, DFlash, Domino, Medusa and DART"
        )
    return READERS[kind](checkpoint)
