"""Read a checkpoint's tensors into a model, after checking from the files' headers that they fit its config.

Transformers fills missing tensors with random numbers and ignores the rest, with a warning. Here its loader first runs
over tensors without data, so that names are matched by its rules; whatever it reports is an error.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as library
from transformers.utils.logging import EmptyTqdm, set_tqdm_hook

from outpace.lib.checkpoint import TORCH_WEIGHTS, WEIGHTS, read_files, read_torch, weight_map
from outpace.lib.errors import ModelError
from outpace.lib.stages import advance, is_loading, restart
from outpace.lib.tensor_file import opened
from outpace.models.attention import register_attention
from outpace.models.loading.config import check_sizes
from outpace.models.loading.gguf import GgufFile
from outpace.models.loading.gguf_weights import weights_of
from outpace.models.loading.precision import compute_dtype
from outpace.models.loading.registry import Location, folder_of
from outpace.models.plain_decoder import stock_config

# Files of all weights, each with a pattern of it and its shards. Only the first that exist are downloaded.
_PATTERNS = {WEIGHTS: "model*.safetensors", TORCH_WEIGHTS: "pytorch_model*.bin"}
# Tables that models compute, which old checkpoints contain or list.
_TABLES = re.compile(
    r"(^|\.)(rotary_emb(_local)?\.((original_)?inv_freq|(cos|sin)_cached)|(attn|attention)\.(masked_)?bias|position_ids)$"
)
_FLOATS = ("F64", "F32", "BF16", "F16", "torch.float64", "torch.float32", "torch.bfloat16", "torch.float16")
_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,9})\.(.+)")
_MOST_NAMED = 12
_SILENT = Lock()


@dataclass(frozen=True)
class TensorInfo:
    """A tensor by its file's header: its shape, and its dtype as the format writes it ("F32", "torch.float32")."""

    shape: tuple[int, ...]
    dtype: str


def read_whole(
    location: Location, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, attention: str
) -> PreTrainedModel:
    """As `weights.read_model`, by transformers."""
    register_attention()
    config = stock_config(config)
    if location.gguf is None:
        model = _read_folder(location, config, dtype, attention)
    else:
        model = _read_gguf(location.gguf, config, dtype, device, attention)
    model.to(device, compute_dtype(dtype, device))  # type: ignore[arg-type]
    _refuse_infinite(model, location.name)
    model.eval()
    return model


def _read_folder(location: Location, config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    folder = Path(folder_of(location))
    for whole, files in _PATTERNS.items():
        if not _is_complete(folder, whole, f"{whole}.index.json"):
            folder_of(location, files, revision=folder.name)
        if any(folder.glob(files)):
            break
    found = read_files(folder, _PATTERNS, _read_header, location.name, _TABLES.search)
    _check_tensors(config, found, location.name)
    with _counted_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model: PreTrainedModel = loaded[0]
    _refuse(_reported(loaded[1]), location.name)
    return model


def _is_complete(folder: Path, whole: str, index: str) -> bool:
    """Whether a folder has a layout's weights, all shards included: an interrupted download leaves some of them out."""
    if (folder / whole).is_file() or not (folder / index).is_file():
        return (folder / whole).is_file()
    return all((folder / shard).is_file() for shard in set(weight_map(folder, index).values()))


def _read_gguf(
    file: GgufFile, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, attention: str
) -> PreTrainedModel:
    """A model of a GGUF file's weights as plain numbers."""
    weights, computed = weights_of(file, config), compute_dtype(dtype, device)
    restart(len(weights))
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=computed)
    for name, weight in weights.items():
        module, _, leaf = name.rpartition(".")
        made = nn.Parameter(weight.tensor(dtype, computed, device), requires_grad=False)
        setattr(model.get_submodule(module), leaf, made)
        advance()
    model.tie_weights()
    whole: PreTrainedModel = model
    return whole


def _read_header(file: Path) -> dict[str, TensorInfo]:
    if file.suffix != ".safetensors":
        return {key: TensorInfo(tuple(one.shape), str(one.dtype)) for key, one in read_torch(file).items()}
    with opened(file) as content:
        parts = {key: content.get_slice(key) for key in content.keys()}  # noqa: SIM118
        return {key: TensorInfo(tuple(one.get_shape()), one.get_dtype()) for key, one in parts.items()}


def _check_tensors(config: PretrainedConfig, found: Mapping[str, TensorInfo], name: str) -> None:
    """Refuse tensors that are missing, left over, of another shape or not floats; the errors name all of them."""
    weights = {key: info for key, info in found.items() if not _TABLES.search(key)}
    check_sizes(config, max((max(info.shape, default=1) for info in weights.values()), default=0), name)
    _refuse(_expert_complaints(weights, getattr(config.get_text_config(), "num_experts", None)), name)
    kinds = {key: info.dtype for key, info in weights.items() if info.dtype not in _FLOATS}
    tensors = {key: torch.empty(info.shape, device="meta") for key, info in weights.items()}
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with _silence():
        _, report = family.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            device_map="meta",
            dtype=torch.float32,
            attn_implementation="eager",  # not the config's, which may be a package that is absent or code on the hub
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _refuse([*(f"{key} holds {dtype}, not floats" for key, dtype in kinds.items()), *_reported(report)], name)


def _expert_complaints(names: Iterable[str], count: int | None) -> list[str]:
    """Experts that are missing or beyond the last: transformers stacks those in the file, whatever their numbers."""
    found: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_EXPERT.match, names)):
        found.setdefault((match[1], match[3]), set()).add(int(match[2]))
    return [
        f"{first}.*.{last} is there for experts {sorted(numbers)[:_MOST_NAMED]}, its config has {count}"
        for (first, last), numbers in found.items()
        if numbers != set(range(count or 0))
    ]


def _reported(report: Mapping[str, Any]) -> list[str]:
    """The errors that transformers' loader reports with `output_loading_info`, without those about known tables."""
    return [
        *(f"missing {key}" for key in report["missing_keys"]),
        *(f"unexpected {key}" for key in report["unexpected_keys"] if not _TABLES.search(key)),
        *(
            f"{key} has shape {list(have)}, its config says {list(want)}"
            for key, have, want in report["mismatched_keys"]
        ),
        *map(str, report["error_msgs"]),
    ]


def _refuse(complaints: Sequence[str], name: str) -> None:
    if complaints:
        more = f"; and {len(complaints) - _MOST_NAMED} more" if len(complaints) > _MOST_NAMED else ""
        raise ModelError(
            f"{name}: its weights do not fit its config: {'; '.join(sorted(complaints)[:_MOST_NAMED])}{more}; download "
            "it again, correct its config, or remove what is left over from the file"
        )


def _refuse_infinite(model: nn.Module, name: str) -> None:
    """Refuse weights that are NaN or infinite, by one sum over each: 1 % of the time of loading."""
    # float16 is summed in float32, because a sum in float16 can overflow; the others have the range of float32.
    wide = {torch.float16: torch.float32}
    sums = {key: one.detach().sum(dtype=wide.get(one.dtype)).float() for key, one in model.named_parameters()}
    if sums and not bool(torch.stack([one.cpu() for one in sums.values()]).isfinite().all()):
        wrong = [key for key, one in sums.items() if not bool(one.isfinite())]
        raise ModelError(
            f"{name}: has weights that are NaN or infinite in {next(iter(model.parameters())).dtype}: "
            f"{', '.join(wrong[:_MOST_NAMED])}; download it again, or load with dtype='float32'"
        )


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress the messages and progress bars of transformers."""
    with _SILENT:  # verbosity is a global of the library
        verbosity, had_bars = library.get_verbosity(), library.is_progress_bar_enabled()
        library.set_verbosity(logging.CRITICAL)
        library.disable_progress_bar()
        try:
            yield
        finally:
            library.set_verbosity(verbosity)
            if had_bars:
                library.enable_progress_bar()


class _Counted(EmptyTqdm):  # type: ignore[misc]  # transformers has no types for it
    """An iterable in place of a progress bar: each item is a tensor of the current stage of loading."""

    def __init__(self, items: Collection[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(items)  # type: ignore[no-untyped-call]
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        restart(len(self._items))
        for item in self._items:
            yield item
            advance()


def _bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The library's own bar where this thread is not loading a model of ours, or where nothing is iterated."""
    is_counted = is_loading() and args and isinstance(args[0], Collection)
    return _Counted(*args) if is_counted else factory(*args, **kwargs)


@contextmanager
def _counted_bars() -> Iterator[None]:
    """Count the tensors that transformers reads."""
    before = set_tqdm_hook(_bar)
    try:
        yield
    finally:
        set_tqdm_hook(before)
