"""What a checkpoint's weights are by their files' headers: names, sizes, kinds of numbers. No weight is read."""

import re
from dataclasses import dataclass
from pathlib import Path

from transformers.utils.hub import cached_file

from outpace.lib.checkpoint import INDEX, TORCH_WEIGHTS, WEIGHTS, opened, weight_map
from outpace.lib.errors import ModelError
from outpace.lib.torch_file import read_torch

TORCH_INDEX = "pytorch_model.bin.index.json"
# What old checkpoints hold beside weights, or list: tables that models work out by themselves.
TABLES = re.compile(
    r"(^|\.)(rotary_emb(_local)?\.((original_)?inv_freq|(cos|sin)_cached)|(attn|attention)\.(masked_)?bias|position_ids)$"
)


@dataclass(frozen=True)
class Held:
    """What a header says of a tensor.

    Attributes:
        shape: its sizes.
        dtype: as its format calls it, such as "F32" or "torch.float32".
    """

    shape: tuple[int, ...]
    dtype: str


def held_by(path: str, name: str) -> dict[str, Held]:
    """The tensors of a checkpoint, in the files that transformers would read.

    Args:
        path: a folder or hub id.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: no weights there; a file that is damaged, or declares more than it holds; a tensor in two files, or
            in none that an index names.
    """
    listed, files = _files(path, name)
    held: dict[str, Held] = {}
    for file in files:
        for key, one in _read(file).items():
            if key in held:
                raise ModelError(f"{file}: holds {key}, and so does another shard; download it again")
            held[key] = one
    if absent := sorted(key for key in listed - held.keys() if not TABLES.search(key)):
        raise ModelError(f"{name}: its index lists {', '.join(absent)}, which no shard holds; download it again")
    return held


def _files(path: str, name: str) -> tuple[set[str], list[Path]]:
    """The names that an index lists, and all files."""
    for whole, index in ((WEIGHTS, INDEX), (TORCH_WEIGHTS, TORCH_INDEX)):
        if (file := find_file(path, whole)) is not None:
            return set(), [file]
        if (file := find_file(path, index)) is not None:
            listed = weight_map(file.parent, index)
            shards = {shard: find_file(path, shard) for shard in sorted(set(listed.values()))}
            if absent := [shard for shard, found in shards.items() if found is None]:
                raise ModelError(f"{name}: {', '.join(absent)} cannot be read, and {index} names it; download it again")
            return set(listed), [found for found in shards.values() if found is not None]
    raise ModelError(f"{name}: no {WEIGHTS}, {INDEX} or {TORCH_WEIGHTS} there; save the weights as safetensors")


def find_file(path: str, file: str) -> Path | None:
    """A file of a folder or hub id; None where there is none."""
    try:
        found = cached_file(path, file)
    except OSError:
        return None
    return None if found is None else Path(found)


def _read(file: Path) -> dict[str, Held]:
    if file.suffix != ".safetensors":
        return {key: Held(tuple(one.shape), str(one.dtype)) for key, one in read_torch(file).items()}
    with opened(file) as content:
        parts = {key: content.get_slice(key) for key in content.keys()}  # noqa: SIM118
        return {key: Held(tuple(one.get_shape()), one.get_dtype()) for key, one in parts.items()}
