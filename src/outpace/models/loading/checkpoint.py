"""From a name to a target: resolve, read, check, choose dtype and device."""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging as library
from transformers.utils.logging import EmptyTqdm, set_tqdm_hook

from outpace.lib.checkpoint import INDEX, TORCH_WEIGHTS, WEIGHTS, opened, weight_map
from outpace.lib.errors import ModelError
from outpace.lib.stages import advance, is_loading, restart, stage
from outpace.lib.torch_file import read_torch
from outpace.models.loading.config import check_sizes
from outpace.models.loading.precision import compute_dtype
from outpace.models.loading.registry import Source, find_file, first_line


@dataclass(frozen=True)
class Held:
    """What a header says of a tensor.

    Attributes:
        shape: its sizes.
        dtype: as its format calls it, such as "F32" or "torch.float32".
    """

    shape: tuple[int, ...]
    dtype: str


@stage("reading weights")
def read_model(
    source: Source, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, attention: str
) -> PreTrainedModel:
    """Read weights in a dtype without running any code of the checkpoint's; the model is in its `compute_dtype`.

    Args:
        source, config: of the weights, and what `read_config` says of it.
        dtype, device: of the model.
        attention: name of the implementation.

    Raises:
        ModelError: nothing readable under that name, or weights that are not those of its config.
    """
    options = source.options | {"attn_implementation": attention, "trust_remote_code": False}
    try:
        if source.header is None:
            check_complete(config, held_by(source.path, source.name), source.name)
        else:
            check_count(config, source.header.elements, source.name)
        with counted_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.path, config=config, dtype=dtype, output_loading_info=True, **options
            )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{source.name}: cannot be loaded: {first_line(error)}") from error
    model: PreTrainedModel = loaded[0]
    refuse_incomplete(loaded[1], source.name)
    model.to(device, compute_dtype(dtype, device))  # type: ignore[arg-type]
    refuse_infinite(model, source.name)
    model.eval()
    return model


_FLOATS = ("F64", "F32", "BF16", "F16", "torch.float64", "torch.float32", "torch.bfloat16", "torch.float16")


_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,9})\.(.+)")


_MOST_NAMED = 12


_SILENT = Lock()


# A GGUF file's tensors have other names, so their weights are counted: within this, what is missing is told by name.
_SLACK = 2


def check_complete(config: PretrainedConfig, held: Mapping[str, Held], name: str) -> None:
    """Refuse a checkpoint whose tensors are not those of its model: buffers, tied weights and known tables aside.

    Args:
        config: of the model.
        held: its tensors.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: tensors that are missing, left over, of other sizes or no floats; all of them are named.
    """
    weights = {key: one for key, one in held.items() if not TABLES.search(key)}
    check_sizes(config, max((max(one.shape, default=1) for one in weights.values()), default=0), name)
    kinds = {key: one.dtype for key, one in weights.items() if one.dtype not in _FLOATS}
    complaints = [f"{key} holds {dtype}, not floats" for key, dtype in kinds.items()]
    _refuse(_expert_complaints(weights, getattr(config.get_text_config(), "num_experts", None)), name)
    tensors = {key: torch.empty(one.shape, device="meta") for key, one in weights.items()}
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with _silence():
        _, report = family.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            device_map="meta",
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    refuse_incomplete(report, name, complaints)


def refuse_incomplete(report: Mapping[str, Any], name: str, complaints: Sequence[str] = ()) -> None:
    """Refuse what transformers' loader reports.

    Args:
        report: of `from_pretrained` with `output_loading_info`.
        name: of the checkpoint, for errors.
        complaints: more of them.

    Raises:
        ModelError: there are any; the first dozen is named.
    """
    said = [*complaints, *(f"missing {key}" for key in report["missing_keys"])]
    said += [f"unexpected {key}" for key in report["unexpected_keys"] if not TABLES.search(key)]
    for key, have, want in report["mismatched_keys"]:
        said.append(f"{key} has shape {list(have)}, its config says {list(want)}")
    _refuse([*said, *map(str, report["error_msgs"])], name)


def _refuse(complaints: Sequence[str], name: str) -> None:
    said = sorted(complaints)
    if said:
        more = f"; and {len(said) - _MOST_NAMED} more" if len(said) > _MOST_NAMED else ""
        raise ModelError(
            f"{name}: its weights do not fit its config: {'; '.join(said[:_MOST_NAMED])}{more}; download it again, "
            "correct its config, or remove what is left over from the file"
        )


def refuse_infinite(model: nn.Module, name: str) -> None:
    """Refuse weights that are no numbers, by one sum over each: a hundredth of the time of loading.

    Args:
        model: as it was read.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: naming the first dozen.
    """
    # A sum in float16 has the range of float16; the others are as wide as their weights, and faster as they are.
    wide = {torch.float16: torch.float32}
    sums = {key: one.detach().sum(dtype=wide.get(one.dtype)).float() for key, one in model.named_parameters()}
    if sums and not bool(torch.stack([one.cpu() for one in sums.values()]).isfinite().all()):
        wrong = [key for key, one in sums.items() if not bool(one.isfinite())]
        raise ModelError(
            f"{name}: has weights that are NaN or infinite in {next(iter(model.parameters())).dtype}: "
            f"{', '.join(wrong[:_MOST_NAMED])}; download it again, or load with dtype='float32'"
        )


def check_count(config: PretrainedConfig, elements: Mapping[str, int], name: str) -> None:
    """Refuse a config that asks for far more weights than a file holds.

    Args:
        config: of the model.
        elements: weights of each tensor of the file.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: it does. What is missing of fewer is told by name when they are read.
    """
    check_sizes(config, max(elements.values()), name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = sum(weight.numel() for weight in model.parameters())
    there = sum(elements.values())
    if wanted > _SLACK * there:
        raise ModelError(f"{name}: its config asks for {wanted} weights and the file holds {there}; download it again")


def _expert_complaints(names: Iterable[str], count: int | None) -> list[str]:
    """Experts that are missing or beyond the last: the loader stacks those that there are, whatever their numbers."""
    found: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_EXPERT.match, names)):
        found.setdefault((match[1], match[3]), set()).add(int(match[2]))
    wanted = set(range(count or 0))
    return [
        f"{first}.*.{last} is there for experts {sorted(numbers)[:_MOST_NAMED]}, its config has {count}"
        for (first, last), numbers in found.items()
        if numbers != wanted
    ]


@contextmanager
def _silence() -> Iterator[None]:
    """What transformers would print of a run over tensors without numbers."""
    with _SILENT:  # the library has one verbosity for all threads
        said, draws = library.get_verbosity(), library.is_progress_bar_enabled()
        library.set_verbosity(logging.CRITICAL)
        library.disable_progress_bar()
        try:
            yield
        finally:
            library.set_verbosity(said)
            if draws:
                library.enable_progress_bar()


TORCH_INDEX = "pytorch_model.bin.index.json"


# What old checkpoints hold beside weights, or list: tables that models work out by themselves.
TABLES = re.compile(
    r"(^|\.)(rotary_emb(_local)?\.((original_)?inv_freq|(cos|sin)_cached)|(attn|attention)\.(masked_)?bias|position_ids)$"
)


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


def _read(file: Path) -> dict[str, Held]:
    if file.suffix != ".safetensors":
        return {key: Held(tuple(one.shape), str(one.dtype)) for key, one in read_torch(file).items()}
    with opened(file) as content:
        parts = {key: content.get_slice(key) for key in content.keys()}  # noqa: SIM118
        return {key: Held(tuple(one.get_shape()), one.get_dtype()) for key, one in parts.items()}


class _Counted(EmptyTqdm):  # type: ignore[misc]  # transformers has no types for it
    """An iterable in place of a bar."""

    def __init__(self, items: Collection[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(items)  # type: ignore[no-untyped-call]
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        restart(len(self._items))
        for item in self._items:
            yield item
            advance()


def _bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The library's own bar where this thread loads nothing by this package, or where it iterates over nothing."""
    is_counted = is_loading() and args and isinstance(args[0], Collection)
    return _Counted(*args) if is_counted else factory(*args, **kwargs)


@contextmanager
def counted_bars() -> Iterator[None]:
    """Count tensors that transformers reads. Its reader of GGUF files has a bar that no hook reaches."""
    gguf: Any = modeling_gguf_pytorch_utils
    before, stock = set_tqdm_hook(_bar), gguf.tqdm
    gguf.tqdm = lambda *args, **kwargs: _bar(stock, args, kwargs)
    try:
        yield
    finally:
        set_tqdm_hook(before)
        gguf.tqdm = stock
