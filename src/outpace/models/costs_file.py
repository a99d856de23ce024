"""The file that keeps measured times of a model's passes, named by all that they depend on."""

import hashlib
from itertools import chain
from pathlib import Path

import torch
from platformdirs import user_cache_path

from outpace.kernels.build import build, loaded_kernels, threads
from outpace.kernels.instructions import cpu_flags
from outpace.kernels.linear import KernelLinear
from outpace.models.target import PackedTarget

# Passes of smaller models are measured in every process: it takes no time.
_SMALL = 20_000_000


def identity(target: PackedTarget) -> str:
    """A short name of all that the times of a model's passes depend on: its config and precision, and the machine."""
    is_on_gpu = target.device.type == "cuda"
    where = torch.cuda.get_device_name(target.device) if is_on_gpu else (cpu_flags(), threads())
    on_cpu = loaded_kernels() is not None and target.compiled is not None
    how = (target.captures, target.exact) if is_on_gpu else on_cpu
    layers = chain(target.decoder.modules(), target.head.layer.modules())
    formats = [getattr(one, "formats", one.kind) for one in layers if isinstance(one, KernelLinear)]  # vary in a file
    kinds = str(target.dtype), target.quantize, target.kv_cache_dtype
    parts = (target.config.to_json_string(), *kinds, formats, where, how, torch.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def costs_file(target: PackedTarget) -> Path | None:
    """The file of a model on this machine, with these kernels; None for a model so small that its times are not
    kept."""
    config = target.config
    if (
        config.hidden_size * config.num_hidden_layers * config.hidden_size + target.vocab_size * config.hidden_size
        < _SMALL
    ):
        return None
    kernels = "none" if loaded_kernels() is None else build().path.stem
    return user_cache_path("outpace") / "costs" / f"{identity(target)}-{kernels}.json"
