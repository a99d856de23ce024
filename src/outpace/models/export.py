"""A model as a folder that other libraries read, made from the weights that this one loads."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.hub import cached_file

from outpace.lib.errors import ModelError
from outpace.models.loading.checkpoint import read_model
from outpace.models.loading.config import EMBEDDING, VOCABULARY, is_bare, read_config
from outpace.models.loading.registry import Source, resolve
from outpace.models.tokenizer import read_tokenizer

READY = "ready.json"
TENSORS = "model.safetensors"


def export(model: str, folder: Path) -> Path:
    """A folder as transformers reads it, its weights rounded to bfloat16 as ours are; made once.

    Args:
        model: as for `outpace.load`.
        folder: where exports lie.

    Raises:
        ModelError: as `outpace.load`.
    """
    source = resolve(model)
    made = folder / "hf"
    said = _identity(source)
    if is_ready(made, said):
        return made
    loaded = read_model(source, read_config(source), torch.bfloat16, torch.device("cpu"), "sdpa")
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in loaded.state_dict().items()}
    config = loaded.config
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    write_folder(made, config, weights)
    if loaded.generation_config is not None:
        loaded.generation_config.save_pretrained(made)
    read_tokenizer(source).tokenizer.save_pretrained(made)
    (made / READY).write_text(json.dumps(said))
    return made


def export_draft(draft: str, target: Path, folder: Path) -> Path:
    """A draft model as a folder that stock transformers reads: one without an embedding gets the target's.

    Args:
        draft: folder or hub id.
        target: of `export`.
        folder: where exports lie.

    Raises:
        ModelError: nothing readable under that name.
    """
    source = resolve(draft)
    config = read_config(source)
    if not is_bare(config, draft):
        return export(draft, folder / "draft")
    made = folder / "draft" / "hf"
    said = _identity(source) | {"target": json.loads((target / READY).read_text())["model"]}
    if is_ready(made, said):
        return made
    try:
        own = load_file(str(cached_file(str(source.path), TENSORS)))
    except OSError as error:
        raise ModelError(f"drafter={draft!r}: no {TENSORS} there: {error}") from error
    given = load_file(target / TENSORS)
    weights = {f"model.{name}": tensor for name, tensor in own.items()}
    # It reads the target's embedding and speaks through its head, which may be the same.
    borrowed = ("model.embed_tokens.weight", "lm_head.weight")
    weights |= {name: given[name] for name in borrowed if name in given}
    config.tie_word_embeddings, config.architectures = "lm_head.weight" not in given, None
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    write_folder(made, config, weights)
    (made / READY).write_text(json.dumps(said))
    return made


def write_folder(folder: Path, config: Any, weights: dict[str, Tensor]) -> None:
    """Config and weights as transformers reads them."""
    plain = copy.deepcopy(config)
    for ours in ("quantization_config", EMBEDDING, VOCABULARY):  # neither is true of this file
        vars(plain).pop(ours, None)
    plain.dtype = torch.bfloat16
    plain.save_pretrained(folder)
    save_file(weights, folder / TENSORS, metadata={"format": "pt"})


def is_ready(folder: Path, said: dict[str, str]) -> bool:
    """Whether an export was finished, and of the same model."""
    record = folder / READY
    return record.is_file() and json.loads(record.read_text()) == said


def _identity(source: Source) -> dict[str, str]:
    """What an export is of: a file or folder, and when it last changed; a hub id as it is."""
    where = Path(source.path, source.options.get("gguf_file", ""))
    files = [where, *where.glob("*")] if where.is_dir() else [where]
    changed = max((one.stat().st_mtime_ns for one in files if one.exists()), default=0)
    return {"model": str(where), "changed": str(changed)}
