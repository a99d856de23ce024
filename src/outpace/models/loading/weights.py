"""Read a model's weights."""

from typing import TYPE_CHECKING

import torch

from outpace.lib.errors import ModelError, OutpaceError, first_line
from outpace.lib.stages import stage
from outpace.models.loading.block_model import fill_blocks, read_blocks
from outpace.models.loading.int4 import quantized, weights_of_model
from outpace.models.loading.precision import compute_dtype
from outpace.models.loading.registry import Location

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def stock_attention(config: "PretrainedConfig") -> str:
    """The attention that transformers uses by default: scaled-dot-product attention, except for a model that caps its
    scores, such as Gemma 2, which needs the eager path."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if capped else "sdpa"


@stage("reading weights")
def read_model(
    location: Location,
    config: "PretrainedConfig",
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    quantize: str = "none",
) -> "PreTrainedModel":
    """Read weights rounded to `dtype` without running code of the checkpoint; the model is in its `compute_dtype`.

    Args:
        location, config: of the weights, from `resolve` and `read_config`.
        dtype, device: of the model.
        attention: name of the implementation.
        quantize: "file" to multiply a GGUF file's blocks as they are, "int4" to quantise weights into such blocks.

    Raises:
        ModelError: nothing readable under that name, or weights that do not fit the config.
    """
    try:
        if quantize in ("file", "int4") and location.gguf is not None:
            return read_blocks(location.gguf, config, compute_dtype(dtype, device), attention, quantize)
        from outpace.models.loading.checkpoint import read_whole  # imports transformers, which takes three seconds

        model = read_whole(location, config, dtype, device, attention)
        if quantize == "int4":
            fill_blocks(model, quantized(model, weights_of_model(model)), model.dtype)
        return model
    except OutpaceError:
        raise
    except Exception as error:  # a config's values of another type, for example
        raise ModelError(f"{location.name}: cannot be loaded: {first_line(error)}") from error
