"""Read a model's weights."""

from typing import TYPE_CHECKING

import torch

from outpace.lib.stages import stage
from outpace.models.loading.block_model import read_blocks
from outpace.models.loading.precision import compute_dtype
from outpace.models.loading.registry import Source

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@stage("reading weights")
def read_model(
    source: Source,
    config: "PretrainedConfig",
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    quantize: str = "none",
) -> "PreTrainedModel":
    """Read weights rounded to `dtype` without running code of the checkpoint; the model is in its `compute_dtype`.

    Args:
        source, config: of the weights, from `resolve` and `read_config`.
        dtype, device: of the model.
        attention: name of the implementation.
        quantize: "file" to multiply a GGUF file's blocks as they are.

    Raises:
        ModelError: nothing readable under that name, or weights that do not fit the config.
    """
    if quantize == "file" and source.gguf is not None:
        return read_blocks(source.gguf, config, compute_dtype(dtype, device), attention)
    from outpace.models.loading.checkpoint import read_whole  # imports transformers, which takes three seconds

    return read_whole(source, config, dtype, device, attention)
