"""Write a model as a folder that other libraries read, from the weights that this one loads."""

import copy
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor

from outpace import __version__
from outpace.lib.checkpoint import read_checkpoint, write_checkpoint, write_index
from outpace.lib.errors import ModelError
from outpace.lib.int8 import FIELD as QUANTIZATION
from outpace.lib.tensor_file import save_tensors
from outpace.models.loading.config import EMBEDDING, VOCABULARY, is_bare, read_config
from outpace.models.loading.load import load_vocabulary_facts
from outpace.models.loading.registry import Location, folder_of, resolve
from outpace.models.loading.weights import read_model, stock_attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig

READY = "ready.json"
TENSORS = "model.safetensors"


def export(model: str, folder: Path) -> Path:
    """A folder in transformers' format, with weights in bfloat16; written once.

    Args:
        model: as for `outpace.load`.
        folder: of all exports.

    Raises:
        ModelError: as `outpace.load`.
    """
    location = resolve(model)
    made, identity = folder / "hf", _identity(location)
    if _is_ready(made, identity):
        return made
    config = read_config(location)
    codec, _, ends = load_vocabulary_facts(model)
    loaded = read_model(location, config, torch.bfloat16, torch.device("cpu"), stock_attention(config))
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in loaded.state_dict().items()}
    if loaded.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    with _in_place(made, identity) as new:
        _write(new, loaded.config, weights)
        if loaded.generation_config is not None:
            if location.gguf is not None:  # its metadata name one EOS id; a turn's ends are found among its tokens
                loaded.generation_config.eos_token_id = list(ends) or None
            loaded.generation_config.save_pretrained(new)
        codec.tokenizer.save_pretrained(new)
    return made


def export_draft(draft: str, target: Path, folder: Path) -> Path:
    """A draft model in transformers' format; one without an embedding gets the target's.

    Args:
        draft: folder or hub id.
        target: of `export`.
        folder: of all exports.

    Raises:
        ModelError: nothing readable under that name.
    """
    location = resolve(draft)
    config = read_config(location)
    if not is_bare(config, draft):
        return export(draft, folder / "draft")
    made = folder / "draft" / "hf"
    identity = _identity(location) | {"target": (target / READY).read_text()}
    if _is_ready(made, identity):
        return made
    file = Path(folder_of(location, TENSORS), TENSORS)
    if not file.is_file():
        raise ModelError(f"drafter={draft!r}: no {TENSORS} there; train or copy it again")
    given = load_file(target / TENSORS)
    weights = {f"model.{name}": tensor for name, tensor in load_file(file).items()}
    # It uses the target's embedding and head, which may be the same tensor.
    borrowed = ("model.embed_tokens.weight", "lm_head.weight")
    weights |= {name: given[name] for name in borrowed if name in given}
    config.tie_word_embeddings, config.architectures = "lm_head.weight" not in given, None
    with _in_place(made, identity) as new:
        _write(new, config, weights)
    return made


def export_drafter(drafter: Path, folder: Path, also: str) -> Path:
    """A drafter whose matrices are in 8 bits, with all weights in bfloat16.

    Args:
        drafter: its folder.
        folder: of all exports.
        also: a file that is copied if it is there.
    """
    made, identity = folder / drafter.name / "plain", _identity(Location(str(drafter), str(drafter)))
    if _is_ready(made, identity):
        return made
    read = read_checkpoint(drafter)
    config = {name: value for name, value in read.config.items() if name != QUANTIZATION}
    tensors = {name: one.bfloat16() if one.is_floating_point() else one for name, one in read.tensors.items()}
    with _in_place(made, identity) as new:
        write_checkpoint(new, config, tensors)
        write_index(new)
        if (drafter / also).is_file():
            shutil.copyfile(drafter / also, new / also)
    return made


@contextmanager
def _in_place(made: Path, identity: dict[str, str]) -> Iterator[Path]:
    """A folder to write an export into, which is moved to `made` when it is complete: servers that start together, as
    on nodes with a shared home, may export the same model."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent, prefix=f".{made.name}-") as scratch:
        new = Path(scratch, made.name)
        new.mkdir()
        yield new
        (new / READY).write_text(json.dumps(identity))
        if not _is_ready(made, identity):  # else another process was faster, and its export is in use
            shutil.rmtree(made, ignore_errors=True)
            new.rename(made)


def _write(folder: Path, config: "PretrainedConfig", weights: dict[str, Tensor]) -> None:
    plain = copy.deepcopy(config)
    for ours in (QUANTIZATION, EMBEDDING, VOCABULARY):  # these do not describe the written weights
        vars(plain).pop(ours, None)
    plain.dtype = torch.bfloat16
    plain.save_pretrained(folder)
    save_tensors(folder / TENSORS, weights, {"format": "pt"})


def _is_ready(folder: Path, identity: dict[str, str]) -> bool:
    """Whether an export is complete, and of the same model."""
    record = folder / READY
    try:
        return record.is_file() and json.loads(record.read_text()) == identity
    except ValueError:  # a record that a power failure emptied
        return False


def _identity(location: Location) -> dict[str, str]:
    """The exported model, a file or folder and its time of change, or the folder of a revision on the hub, to which
    reading adds files; and the version that reads it, because later ones may read a file's tokenizer, EOS ids or
    rotations otherwise."""
    path = Path(location.path) if location.gguf is None else location.gguf.path
    model = str(path) if path.exists() else folder_of(location)
    files = [path, *path.glob("*")] if path.is_dir() else [path]
    changed = max((one.stat().st_mtime_ns for one in files if one.exists()), default=0)
    return {"model": model, "changed": str(changed), "outpace": __version__}
