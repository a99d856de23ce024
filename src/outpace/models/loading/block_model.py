"""Build a model over the weights of a GGUF file as they are: its matrices stay in the file's formats.

Everything else, such as norms and biases, is small and becomes parameters in the model's dtype. Matrices are laid out
in panels at once, so no other copy of them is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from outpace.kernels.blocks import FORMATS, BlockEmbedding, BlockLinear, BlockWeight, Place, Slabs, in_memory
from outpace.kernels.formats import BlockFormat
from outpace.kernels.linear import KernelLinear, Kind
from outpace.lib.errors import ModelError
from outpace.lib.stages import advance, stage
from outpace.models.attention import register_attention
from outpace.models.layers.experts import PackedExperts
from outpace.models.layers.linear import SIBLINGS, SiblingLinear, is_conv1d
from outpace.models.loading.gguf import GgufFile
from outpace.models.loading.gguf_weights import Weight, weights_of
from outpace.models.loading.int4 import quantized
from outpace.models.plain_decoder import PlainConfig, PlainLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Formats of whole numbers, with the arithmetic that multiplies them without rounding.
_WHOLE = {BlockFormat.F32: Kind.FLOAT32, BlockFormat.F16: Kind.HALVES, BlockFormat.BF16: Kind.WIDENED}


def read_blocks(
    file: GgufFile, config: "PretrainedConfig", dtype: torch.dtype, attention: str, quantize: str = "file"
) -> "PreTrainedModel":
    """A model whose linear layers are `KernelLinear` over the file's weights.

    Args:
        file: of the weights.
        config: from `read_config`.
        dtype: of hidden states, norms and biases.
        attention: name of the implementation.
        quantize: "file", or "int4" to quantise them first.

    Raises:
        ModelError: tensors that are missing, left over, of another shape, of a type that is not known, or not finite.
    """
    weights = weights_of(file, config)
    model = _empty_model(config, dtype, attention)
    with file.opened() as place:
        fill_blocks(model, quantized(model, weights) if quantize == "int4" else weights, dtype, place)
    file.release()  # everything but the embedding's rows has been copied
    model.requires_grad_(False)
    model.eval()
    return model


def fill_blocks(
    model: "PreTrainedModel", weights: Mapping[str, Weight], dtype: torch.dtype, place: Place = in_memory
) -> None:
    """Give a model its weights, with layers of kernels in place of its own.

    Args:
        model: with or without data.
        weights: by the names of its parameters, all of them.
        dtype: of hidden states, norms and biases.
        place: as of `BlockLinear`.
    """
    with stage("packing weights", sum(prod(weight.shape) for weight in weights.values())):
        builder = _Builder(weights, dtype, place)
        builder.fill(model, "")
        head = model.get_output_embeddings()
        if isinstance(head, nn.Linear):  # the embedding's weight
            embedding = model.get_input_embeddings()
            name = next(name for name, module in model.named_modules() if module is embedding)
            layer = builder.linear([f"{name}.weight"], None)
            model.set_output_embeddings(layer)
            if isinstance(layer, BlockLinear) and isinstance(embedding, BlockEmbedding):
                (embedding.table,) = layer.weights


def _empty_model(config: Any, dtype: torch.dtype, attention: str) -> "PreTrainedModel":
    """A causal LM whose parameters have no data; a plain one, with the same methods, for a plain config."""
    if isinstance(config, PlainConfig):
        return PlainLM(config, dtype)  # type: ignore[return-value]
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    register_attention()
    model: PreTrainedModel
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return model


class _Builder:
    def __init__(self, weights: Mapping[str, Weight], dtype: torch.dtype, place: Place) -> None:
        self._weights, self._dtype, self._allocate, self._place = weights, dtype, Slabs(), place

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Give a module and all below it their weights."""
        for names in SIBLINGS:
            self._fill_siblings(module, prefix, names)
        for name, child in list(module.named_children()):
            path = f"{prefix}{name}"
            if isinstance(child, SiblingLinear | KernelLinear) or f"{path}.weight" not in self._weights:
                made = self._experts(child, path) if f"{path}.gate_up_proj" in self._weights else None
            elif type(child) is nn.Linear or is_conv1d(child):
                made = self.linear([f"{path}.weight"], self._bias([path]))
            else:
                made = self._embedding(child, path) if isinstance(child, nn.Embedding) else None
            if made is not None:
                setattr(module, name, made)
            elif not isinstance(child, SiblingLinear | KernelLinear):
                self.fill(child, f"{path}.")
        for name, _ in list(module.named_parameters(recurse=False)):
            if (path := f"{prefix}{name}") in self._weights:
                setattr(module, name, nn.Parameter(_floats(self._weights[path]).to(self._dtype), False))

    def linear(self, names: Sequence[str], bias: Tensor | None) -> KernelLinear:
        """A layer over matrices of the file, one after the other.

        Args:
            names: of parameters; several where all are blocks or have one arithmetic.
            bias: of all together.
        """
        return self._layer([self._weights[name] for name in names], bias)

    def _layer(self, weights: Sequence[Weight], bias: Tensor | None = None) -> KernelLinear:
        if _are_blocks(weights):
            matrices = [matrix for weight in weights for matrix in _matrices(weight)]
            layer: KernelLinear = BlockLinear(matrices, bias, self._dtype, self._allocate, self._place)
        else:
            kind = _arithmetic(weights[0])
            assert kind is not None, "a matrix in blocks cannot be joined with one of floats"
            together = torch.cat([_floats(one).T if one.is_transposed else _floats(one) for one in weights])
            layer = KernelLinear(together, bias, kind, self._dtype)
        advance(layer.inputs * layer.outputs)
        return layer

    def _fill_siblings(self, module: nn.Module, prefix: str, names: Sequence[str]) -> None:
        layers = [getattr(module, name, None) for name in names]
        paths = [f"{prefix}{name}" for name in names]
        if not all(type(layer) is nn.Linear for layer in layers):
            return
        weights = [self._weights[f"{path}.weight"] for path in paths]
        if not _are_blocks(weights) and len(set(map(_arithmetic, weights))) > 1:
            return
        together = self.linear([f"{path}.weight" for path in paths], self._bias(paths))
        sizes = [layer.out_features for layer in layers]  # type: ignore[union-attr]
        for index, name in enumerate(names):
            setattr(module, name, SiblingLinear(together, sizes, index))

    def _bias(self, paths: Sequence[str]) -> Tensor | None:
        names = [f"{path}.bias" for path in paths]
        if not any(name in self._weights for name in names):
            return None
        return torch.cat([_floats(self._weights[name]) for name in names])

    def _embedding(self, child: nn.Embedding, path: str) -> nn.Module | None:
        weight = self._weights[f"{path}.weight"]
        if not _are_blocks([weight]):
            return None  # becomes a parameter
        (table,) = _matrices(weight)
        return BlockEmbedding(table, self._dtype, getattr(child, "embed_scale", None))

    def _experts(self, child: nn.Module, path: str) -> nn.Module | None:
        stacks = [self._weights[f"{path}.{name}"] for name in ("gate_up_proj", "down_proj")]
        layers = [[self._layer([_expert(stack, index)]) for index in range(stack.shape[0])] for stack in stacks]
        return PackedExperts(child.act_fn, *layers)  # type: ignore[arg-type]


def _floats(weight: Weight) -> Tensor:
    """A parameter's values in float32, after a check that they are finite."""
    values = torch.from_numpy(np.array(weight.floats()))
    if not bool(values.isfinite().all()):
        raise ModelError(f"{weight.tensors[0].name}: has weights that are NaN or infinite; download the file again")
    return values


def _arithmetic(weight: Weight) -> Kind | None:
    """The arithmetic of a matrix; None for blocks that the kernels multiply."""
    return None if _are_blocks([weight]) else _WHOLE.get(weight.tensors[0].kind, Kind.FLOAT32)


def _are_blocks(weights: Sequence[Weight]) -> bool:
    """Whether the kernels multiply all of these weights as the file stores them, with the same operand."""
    return all(tensor.kind in FORMATS and not weight.add for weight in weights for tensor in weight.tensors)


def _matrices(weight: Weight) -> list[BlockWeight]:
    order = None if weight.rows is None else weight.rows.astype(np.int64)
    return [BlockWeight(tensor.kind, tensor.data, tensor.shape[-1], order, tensor.name) for tensor in weight.tensors]


def _expert(stack: Weight, index: int) -> Weight:
    """One expert's matrix of a stack."""
    return replace(
        stack, tensors=tuple(replace(one, shape=one.shape[1:], data=one.data[index]) for one in stack.tensors)
    )
