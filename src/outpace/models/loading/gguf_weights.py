"""Which tensors of a GGUF file make which parameters of a model, and how their values differ.

The names and changes are those of llama.cpp's converter: it orders the rows of Llama's queries and keys for a rotation
of neighbouring dimensions (transformers rotates dimensions half a head apart), separates GPT-NeoX's fused queries, keys
and values, stores GPT-2's matrices transposed, and adds 1 to Gemma's norms.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from outpace.kernels.blocks import FORMATS, BlockWeight
from outpace.kernels.build import loaded_kernels
from outpace.kernels.formats import BlockFormat
from outpace.lib.errors import ModelError
from outpace.models.loading.config import check_sizes
from outpace.models.loading.gguf import GgufFile, GgufTensor
from outpace.models.plain_decoder import PlainConfig, PlainLM

if TYPE_CHECKING:
    from gguf import TensorNameMap
    from transformers import PretrainedConfig

_SHIFTED_NORMS = ("gemma2", "gemma3_text")  # whose norms multiply by 1 + weight
_NEIGHBOURS = ("llama", "smollm3")  # GGUF architectures that rotate neighbouring dimensions
_SETTINGS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors that are part of the config."""
_IMAGES = ("v.", "mm.")
"""How tensors of an image encoder begin, which Ollama keeps in the file of its Gemma 3."""
_MOST_NAMED = 12
AT_ONCE = 2**20
"""Weights that are converted at once: larger parts leave gaps in the heap."""


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter as it is in a GGUF file: `(tensors joined)[rows] + add`.

    Attributes:
        tensors: joined along their output rows (the last dimension but one), in this order; usually one.
        rows: of the tensor, in the parameter's order; None for the same order.
        add: to every value.
        is_transposed: the parameter is the tensor's transpose [in, out], as GPT-2's.
    """

    tensors: tuple[GgufTensor, ...]
    rows: np.ndarray[Any, np.dtype[np.intp]] | None = None
    add: float = 0.0
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        first = self.tensors[0].shape
        if len(self.tensors) > 1:
            first = (*first[:-2], sum(tensor.shape[-2] for tensor in self.tensors), first[-1])
        return first[::-1] if self.is_transposed else first

    def floats(self, begin: int = 0, end: int | None = None) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The parameter in float32, or the tensors' rows from `begin` to `end`; may be a view of the file.

        Raises:
            ModelError: a type that cannot be converted.
        """
        taken = slice(begin, end) if self.rows is None else self.rows[begin:end]
        parts = [_floats(tensor, taken) for tensor in self.tensors]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2)
        if self.add:
            values = values + np.float32(self.add)
        return values.T if self.is_transposed else values

    def tensor(self, dtype: torch.dtype, computed: torch.dtype, device: torch.device) -> Tensor:
        """The parameter, rounded to `dtype` and stored in `computed`. It is converted in parts, so that it is never in
        memory twice."""
        made = torch.empty(self.shape, dtype=computed, device=device)
        inner = made.T if self.is_transposed else made
        step = max(AT_ONCE * len(inner) // inner.numel(), 1)
        for begin in range(0, len(inner), step):
            values = self.floats(begin, begin + step)
            part = torch.from_numpy(values if values.flags.writeable else values.copy()).to(dtype)
            inner[begin : begin + step] = part.T if self.is_transposed else part
        return made


def weights_of(file: GgufFile, config: "PretrainedConfig") -> dict[str, Weight]:
    """The weights of a file by the names of `AutoModelForCausalLM`'s parameters.

    Raises:
        ModelError: tensors that are missing, left over or of another shape; the error names them.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    check_sizes(config, max(max(tensor.shape) for tensor in file.tensors.values()), str(file.path))
    architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == file.values["general.architecture"])
    known = get_tensor_name_map(architecture, config.num_hidden_layers)
    found, complaints, used = {}, [], set(_SETTINGS)
    for name, parameter in _parameters(config):
        names = _tensor_names(name, known)
        used.update(names)
        if not names or any(one not in file.tensors for one in names):
            complaints.append(f"{name} is missing ({' and '.join(names) or 'known for no GGUF file'})")
            continue
        weight = _weight(tuple(file.tensors[one] for one in names), name, config, file)
        if weight.shape != tuple(parameter.shape):
            complaints.append(f"{' and '.join(names)} has shape {list(weight.shape)}, not {list(parameter.shape)}")
        found[name] = weight
    complaints += [f"{name} is left over" for name in file.tensors if name not in used and not name.startswith(_IMAGES)]
    if complaints:
        more = f"; and {len(complaints) - _MOST_NAMED} more" if len(complaints) > _MOST_NAMED else ""
        raise ModelError(
            f"{file.path}: its tensors do not fit its config: {'; '.join(complaints[:_MOST_NAMED])}{more}; download "
            "the file again, or convert the model with a current llama.cpp"
        )
    return found


def _parameters(config: Any) -> Iterable[tuple[str, nn.Parameter]]:
    """The parameters of a config's model, without data."""
    if isinstance(config, PlainConfig):
        return PlainLM(config, torch.float32).named_parameters()
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.named_parameters()


def _tensor_names(parameter: str, known: "TensorNameMap") -> tuple[str, ...]:
    """The tensors that make a parameter; none for a parameter that no GGUF file has."""
    base = parameter.removesuffix("gate_up_proj")
    parts = [parameter]
    if base.endswith(".experts."):  # experts' parameters have no suffix
        parts = [f"{base}gate_proj.weight", f"{base}up_proj.weight"]
    elif parameter.endswith(".experts.down_proj"):
        parts = [f"{parameter}.weight"]
    found = [name for part in parts if (name := known.get_name(part, (".weight", ".bias"))) is not None]
    return tuple(found) if len(found) == len(parts) else ()


def _weight(tensors: tuple[GgufTensor, ...], name: str, config: Any, file: GgufFile) -> Weight:
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", None)}
    module, _, kind = name.rpartition(".")
    part, size = module.rpartition(".")[2], tensors[0].shape[0]
    rows = None
    if file.values["general.architecture"] in _NEIGHBOURS and part in heads:
        rows = _order(size, (heads[part], -1, 2), (0, 2, 1))
    elif part == "query_key_value":
        rows = _order(size, (3, heads["q_proj"], -1), (1, 0, 2))
    is_shifted = config.model_type in _SHIFTED_NORMS and name.endswith("norm.weight")
    is_transposed = config.model_type == "gpt2" and kind == "weight" and part.startswith("c_")
    return Weight(tensors, rows, -1.0 if is_shifted else 0.0, is_transposed)


def _order(size: int, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.intp]] | None:
    """Rows 0 to size in another order; None if they cannot be arranged so, which a check of shapes reports."""
    if size % abs(prod(shape)):
        return None
    return np.arange(size, dtype=np.intp).reshape(shape).transpose(axes).reshape(-1)


def _floats(tensor: GgufTensor, taken: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows of a tensor in float32. The kernels make the same numbers as the gguf package in a fraction of its time."""
    data = tensor.data if len(tensor.shape) == 1 else tensor.data[taken]
    numbers: np.ndarray[Any, np.dtype[np.float32]]
    if tensor.kind in FORMATS and loaded_kernels() is not None:
        rows = BlockWeight(tensor.kind, data.reshape(-1, data.shape[-1]), tensor.shape[-1])
        numbers = rows.dequantized().numpy().reshape(*data.shape[:-1], tensor.shape[-1])
        return numbers[taken] if len(tensor.shape) == 1 else numbers
    if tensor.kind is BlockFormat.F32:
        numbers = data.view(np.float32)
        return numbers[taken] if len(tensor.shape) == 1 else numbers
    from gguf.quants import dequantize

    try:
        values: np.ndarray[Any, np.dtype[np.float32]] = dequantize(data, tensor.kind)
    except NotImplementedError as error:
        raise ModelError(f"tensor {tensor.name} is of type {tensor.kind.name}, which cannot be read") from error
    return values[taken] if len(tensor.shape) == 1 else values
