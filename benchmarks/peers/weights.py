"""Exports a model as a GGUF file, from the weights that this library loads."""

from pathlib import Path

from safetensors.torch import load_file

from benchmarks.peers.gguf_file import write_gguf
from outpace.models.export import READY, TENSORS
from outpace.models.loading.config import read_config
from outpace.models.loading.gguf import read_gguf
from outpace.models.loading.load import load_vocabulary_facts
from outpace.models.loading.registry import resolve


def export_gguf(exported: Path, precision: str) -> Path:
    """The path of a GGUF file of an exported folder, made once.

    Args:
        exported: a folder made by `export`.
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


def weight_bytes(file: Path) -> int:
    """Bytes of a GGUF file's tensors that each token reads: all except an embedding that is not also the head."""
    sizes = {name: tensor.data.nbytes for name, tensor in read_gguf(file).tensors.items()}
    return sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)
