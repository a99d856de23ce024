"""A drafter net by the folder or hub id of its checkpoint, told apart by its config."""

import json
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from torch import nn

from outpace.core.errors import ModelError
from outpace.nets.checkpoint import Checkpoint, read_checkpoint
from outpace.nets.layouts.dart import ARCHITECTURE as DART
from outpace.nets.layouts.dart import read_dart
from outpace.nets.layouts.dflash import read_dflash
from outpace.nets.layouts.domino import is_domino, read_domino
from outpace.nets.layouts.eagle3 import read_eagle3
from outpace.nets.layouts.medusa import count_heads, read_medusa

_FILES = ("config.json", "*.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "medusa_lm_head.pt")
_EAGLE = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
_DFLASH = ("DFlashDraftModel", "DominoDraftModel", "DFlashSpeculator")


def kind_of(config: dict[str, object]) -> str | None:
    """What a config.json describes: "eagle3", "dart", "medusa", "dflash" (Domino's too, with more fields), or None."""
    named = config.get("architectures")
    architectures = named if isinstance(named, list) else []
    said = config.get("speculators_model_type")
    if said in ("eagle3", "dflash"):
        return str(said)
    if "MedusaModel" in architectures or "medusa_num_heads" in config:
        return "medusa"
    if DART in architectures or "draft_length" in config:
        return "dart"
    if any(name in _EAGLE for name in architectures) or "draft_vocab_size" in config:
        return "eagle3"
    if any(name in _DFLASH for name in architectures) or "dflash_config" in config:
        return "dflash"
    return None


def is_net(name: str) -> bool:
    """Whether a local folder holds a drafter net rather than a language model."""
    file = Path(name).expanduser() / "config.json"
    try:
        config = json.loads(file.read_text()) if file.is_file() else {}
    except json.JSONDecodeError:
        return False  # whoever reads it will say so
    return isinstance(config, dict) and kind_of(config) is not None


def load_net(name: str) -> nn.Module:
    """Read a drafter net; no code of the checkpoint is run.

    Args:
        name: a folder, or a hub id.

    Raises:
        ModelError: nothing there, another kind of checkpoint, or one that does not fit its config.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        try:
            path = Path(snapshot_download(name, allow_patterns=list(_FILES)))
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise ModelError(f"drafter={name!r}: no such folder, and not found on the hub: {reason}") from error
    checkpoint = read_checkpoint(path)
    kind = kind_of(checkpoint.config)
    if kind is None:
        raise ModelError(f"drafter={name!r}: its config.json describes no drafter net that is known here")
    readers: dict[str, Callable[[Checkpoint], nn.Module]] = {
        "dart": read_dart,
        "eagle3": read_eagle3,
        # Published files hold more heads than their config counts.
        "medusa": lambda found: read_medusa(found, count_heads(found)),
        "dflash": read_domino if kind == "dflash" and is_domino(checkpoint) else read_dflash,
    }
    return readers[kind](checkpoint)
