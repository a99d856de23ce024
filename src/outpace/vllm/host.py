"""What our proposers need of the vLLM that runs them, and refuse to start without."""

from typing import Any

import torch

from outpace.lib.errors import InvalidRequest, ModelError
from outpace.vllm.cpu_sampling import mend
from outpace.vllm.versions import installed_version, refusal


def check_host() -> None:
    """Refuse a vLLM that this was not tested with, and mend its sampling on CPUs, also where plugins are turned off."""
    reason = refusal(installed_version())
    if reason is not None:
        raise ModelError(f"outpace's proposers: {reason}")
    mend()


def check_parallel(config: Any) -> None:
    """Refuse pipelines: a rank of one sees neither the first hidden states nor the last."""
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise InvalidRequest(
            f"pipeline_parallel_size={stages}: our proposers need the whole model on a rank; use tensor_parallel_size"
        )


def check_graphs(config: Any) -> None:
    """Refuse graphs of whole passes: they are replayed without calling the model, and cannot be recorded while its
    passes are looked at."""
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    if mode is not None and torch.cuda.is_available() and mode.has_full_cudagraphs():
        raise InvalidRequest(
            f"cudagraph_mode={mode.name}: our proposers observe passes, which full graphs hide; run with "
            '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
        )


def ending_ids(config: Any) -> tuple[int, ...]:
    """Behind which nothing is drafted: the EOS ids of a model's config."""
    found = getattr(config, "eos_token_id", None)
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (int(found),)
