"""One model in the formats that contenders read, all from the weights that this library loads."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.bench.peers.gguf_file import write_gguf
from outpace.models.bare import EMBEDDING, VOCABULARY, is_bare
from outpace.models.load import load_vocabulary_facts, read_config, read_model, read_tokenizer, resolve

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
    said = {"model": source.path}
    if _is_ready(made, said):
        return made
    loaded = read_model(source, read_config(source), torch.bfloat16, torch.device("cpu"), "sdpa")
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in loaded.state_dict().items()}
    config = loaded.config
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    _write(made, config, weights)
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
    said = {"model": source.path, "target": json.loads((target / READY).read_text())["model"]}
    if _is_ready(made, said):
        return made
    weights = {f"model.{name}": tensor for name, tensor in load_file(Path(source.path) / TENSORS).items()}
    weights["model.embed_tokens.weight"] = load_file(target / TENSORS)["model.embed_tokens.weight"]
    config.tie_word_embeddings, config.architectures = True, None
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    _write(made, config, weights)
    (made / READY).write_text(json.dumps(said))
    return made


def export_gguf(exported: Path, precision: str) -> Path:
    """A GGUF of an exported folder, made once.

    Args:
        exported: of `export`.
        precision: a key of `gguf_file.FORMATS`.

    Raises:
        InvalidRequest: an architecture that cannot be written.
    """
    path = exported.parent / f"{precision}.gguf"
    record = exported / READY
    if path.is_file() and path.stat().st_mtime >= record.stat().st_mtime:
        return path
    _, _, eos = load_vocabulary_facts(str(exported))
    scratch = path.with_suffix(".tmp")
    config, weights = read_config(resolve(str(exported))), load_file(exported / TENSORS)
    write_gguf(scratch, config, weights, exported / "tokenizer.json", precision, eos[0] if eos else 0)
    scratch.replace(path)
    return path


def _write(folder: Path, config: Any, weights: dict[str, Tensor]) -> None:
    plain = copy.deepcopy(config)
    for ours in ("quantization_config", EMBEDDING, VOCABULARY):  # neither is true of this file
        vars(plain).pop(ours, None)
    plain.dtype = torch.bfloat16
    plain.save_pretrained(folder)
    save_file(weights, folder / TENSORS, metadata={"format": "pt"})


def _is_ready(folder: Path, said: dict[str, str]) -> bool:
    record = folder / READY
    return record.is_file() and json.loads(record.read_text()) == said
