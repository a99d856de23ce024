"""Whether a checkpoint's weights are those its config asks for, known before memory is asked for or a weight is read.

Transformers makes what is missing from random numbers and passes over what is left, with a warning. Here its own loader
runs once over tensors without numbers, so that names are matched by its rules, and what it reports is refused.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as library

from outpace.lib.errors import ModelError
from outpace.models.config_bounds import check_sizes
from outpace.models.held import TABLES, Held

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
