"""Choose formats for a model's weights by llama.cpp's recipe Q4_K_M, and quantise the weights into them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from outpace.kernels.formats import BlockFormat, bytes_of
from outpace.kernels.quantize import chosen_format, quantize
from outpace.lib.stages import advance, stage
from outpace.models.layers.linear import is_conv1d
from outpace.models.loading.gguf import GgufTensor
from outpace.models.loading.gguf_weights import AT_ONCE, Weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KINDS = {torch.float32: BlockFormat.F32, torch.bfloat16: BlockFormat.BF16}
# Matrices that get more bits in some layers: values, fused ones among them, and the last product of an MLP, also of
# packed experts.
_SENSITIVE = re.compile(
    r".*\.(\d+)\..*(v_proj|qkv_proj|c_attn|query_key_value|down_proj|mlp\.c_proj|4h_to_h|experts\.down\.\d+)(\.weight)?"
)


def weights_of_model(model: "PreTrainedModel") -> dict[str, Weight]:
    """A model's parameters as if they were in a GGUF file."""
    transposed = {f"{path}.weight" for path, module in model.named_modules() if is_conv1d(module)}
    found = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        values = (values.T if name in transposed else values).contiguous()
        found[name] = Weight((_tensor(name, values),), is_transposed=name in transposed)
    return found


def _tensor(name: str, values: Tensor) -> GgufTensor:
    return GgufTensor(name, tuple(values.shape), _KINDS[values.dtype], values.view(torch.uint8).numpy())


def quantized(model: "PreTrainedModel", weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Weights whose matrices have about 4 bits; those of the embedding and the LM head have 6.

    A matrix keeps its format if that takes no more bytes, or if the length of its rows is not a multiple of 32.

    Args:
        model: whose parameters they are, with or without data.
        weights: by the names of parameters.
    """
    chosen = [name for name in _matrices(model) if name in weights]
    layers = model.config.get_text_config().num_hidden_layers
    sizes = [tensor.data.size for name in chosen for tensor in weights[name].tensors]
    found = dict(weights)
    with stage("quantizing weights", sum(sizes)):
        for name in chosen:
            tensors = (_quantized(tensor, is_sensitive(name, layers)) for tensor in weights[name].tensors)
            found[name] = replace(weights[name], tensors=tuple(tensors))
    return found


def is_sensitive(name: str, layers: int) -> bool:
    """Whether a parameter gets more bits: the embedding, the LM head, and some matrices of the first eighth of the
    layers, of the last eighth and of every third between."""
    if (match := _SENSITIVE.fullmatch(name)) is None:
        return re.search(r"\.\d+\.", name) is None
    layer, eighth = int(match[1]), layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _matrices(model: "PreTrainedModel") -> Iterator[str]:
    embedding = model.get_input_embeddings()
    for path, module in model.named_modules():
        if type(module) is nn.Linear or is_conv1d(module) or module is embedding:
            yield f"{path}.weight"
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):  # experts
            yield from (f"{path}.gate_up_proj", f"{path}.down_proj")


def _quantized(tensor: GgufTensor, sensitive: bool) -> GgufTensor:
    to = chosen_format(tensor.shape[-1], sensitive)
    advance(tensor.data.size)
    if to is None:
        return tensor
    if tensor.data.shape[-1] <= bytes_of(to, tensor.shape[-1]):
        return tensor
    weight, count = Weight((tensor,)), tensor.shape[0]
    step = max(AT_ONCE * count // prod(tensor.shape), 1)
    parts = [quantize(weight.floats(begin, begin + step), to) for begin in range(0, count, step)]
    return replace(tensor, kind=to, data=np.concatenate(parts))
