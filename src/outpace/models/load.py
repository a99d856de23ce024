"""From a name to a target: resolve, read, check, choose dtype and device."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import CONFIG_NAME

from outpace.gpu.backend import runs_triton
from outpace.kernels.build import kernels_remedy, loaded_kernels, why_none
from outpace.kernels.linear import QUANTIZATIONS
from outpace.lib.checkpoint import read_object
from outpace.lib.checks import is_int
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.paths import path_of
from outpace.lib.stages import stage
from outpace.models.attention import ATTENTION_NAME
from outpace.models.bare import refuse_bare
from outpace.models.complete import check_complete, check_count, refuse_incomplete, refuse_infinite
from outpace.models.config_bounds import check_fields, read_head_size
from outpace.models.families import check_supported
from outpace.models.gguf_header import Header, read_header
from outpace.models.held import find_file, held_by
from outpace.models.hub import ask_hub, first_line
from outpace.models.library_bars import counted_bars
from outpace.models.linear import can_pack
from outpace.models.registry import BUILT_IN, pulled
from outpace.models.target import TransformersTarget
from outpace.models.text import TextCodec

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# The short names that vLLM and common usage accept for the same dtypes.
DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
DEFAULT_MAX_LENGTH = 4096


@dataclass(frozen=True)
class Source:
    """Where a model is read from: arguments for transformers' `from_pretrained`, and a GGUF file's header."""

    name: str
    path: str
    options: dict[str, Any]
    header: Header | None = None


def resolve(name: str) -> Source:
    """Find a model by name: a local folder or GGUF file, then a model pulled before, then the hub.

    Raises:
        ModelError: a built-in model that was not pulled yet, a local path that does not exist, a GGUF cut off.
    """
    path = path_of(name)
    if path.is_dir():
        return Source(name, str(path), {})
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{name}: no such GGUF file")
        return Source(name, str(path.parent), {"gguf_file": path.name}, read_header(path))
    if name in pulled():
        return Source(name, str(pulled()[name]), {})
    if name in BUILT_IN:
        raise ModelError(f"{name} is not on this machine yet: run `outpace models pull {name}`")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"{name}: no such folder or GGUF file")
    return Source(name, name, {})


def choose_device(device: str) -> torch.device:
    """The device to use; "auto" takes a GPU when there is one.

    Raises:
        InvalidRequest: the device does not exist here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InvalidRequest(f"device={device!r}: not a device; use 'auto', 'cpu' or 'cuda'") from error
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device={device!r}: not supported; use 'auto', 'cpu' or 'cuda'")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InvalidRequest(f"device={device!r}: no such GPU is visible to this build of torch; use 'cpu' or 'auto'")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of weights; "auto" takes bfloat16 where the hardware computes in it, and on CPUs without instructions
    for it where compiled kernels read it: half the bytes, widened to float32 on the way. Else float32.

    Raises:
        InvalidRequest: the name is not one of DTYPES or "auto".
    """
    dtype = DTYPE_ALIASES.get(dtype, dtype)
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise InvalidRequest(f"dtype={dtype!r}: use 'auto', {', '.join(map(repr, DTYPES))}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if can_pack(torch.bfloat16, device) or loaded_kernels() is not None else torch.float32


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What a device computes in with weights of a dtype: a CPU takes float32 for halves that it has no kernels for.

    The weights are as they were rounded; products are exact in float32 and faster than halves made of other
    instructions.
    """
    is_half = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_half and device.type == "cpu" and not can_pack(dtype, device) else dtype


def check_quantization(quantize: str, dtype: torch.dtype, device: torch.device) -> None:
    """Whether a model can be quantised so here.

    Raises:
        InvalidRequest: not a way to quantise, not on this device, not with this dtype, or without the kernels for it.
    """
    if quantize not in QUANTIZATIONS:
        raise InvalidRequest(f"quantize={quantize!r}: use one of {', '.join(map(repr, QUANTIZATIONS))}")
    if quantize == "none":
        return
    if device.type != "cpu":
        raise InvalidRequest(f"quantize={quantize!r}: its kernels are for CPUs; use device='cpu' or quantize='none'")
    if not can_pack(dtype, device):
        raise InvalidRequest(f"quantize={quantize!r}: not beside {dtype}; use dtype='float32' or 'bfloat16'")
    if loaded_kernels() is None:
        raise InvalidRequest(f"quantize={quantize!r}: its kernels are not there: {why_none()}; {kernels_remedy()}")


@stage("reading the configuration")
def read_config(source: Source) -> PretrainedConfig:
    """Read a model's configuration.

    Raises:
        ModelError: there is none under that name, or the hub cannot be asked.
    """
    if not Path(source.path).exists():
        ask_hub(source.name)
    try:
        if source.header is not None:
            check_fields(source.header.values, source.name)
        elif (file := find_file(source.path, CONFIG_NAME)) is not None:
            check_fields(read_object(file), source.name)
        config: PretrainedConfig = AutoConfig.from_pretrained(source.path, trust_remote_code=False, **source.options)
        if source.header is not None:
            read_head_size(config, source.header.values, source.name)
        if not isinstance(text := config.get_text_config(), PretrainedConfig):
            raise ModelError(f"{source.name}: text_config={text!r}: must be an object; correct config.json")
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{source.name}: no model found: {first_line(error)}") from error
    return config


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


@stage("building the tokenizer")
def read_tokenizer(source: Source) -> TextCodec:
    """Read the tokenizer that belongs to a model.

    Raises:
        ModelError: there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=False, **source.options)
    except Exception as error:
        raise ModelError(f"{source.name}: its tokenizer cannot be loaded: {error}") from error
    return TextCodec(tokenizer, source.name)


def check_exact(device: torch.device) -> None:
    """Whether exact mode can be had on a GPU.

    Raises:
        InvalidRequest: its attention is a Triton kernel, and Triton is not there.
    """
    if device.type == "cuda" and not runs_triton(device):
        raise InvalidRequest(
            "exact=True: its attention needs Triton, which is not installed; install it or leave it out"
        )


def load_target(
    name: str,
    dtype: str,
    device: str,
    max_model_len: int | None,
    max_num_seqs: int,
    quantize: str = "none",
    exact: bool = False,
) -> tuple[TransformersTarget, TextCodec]:
    """Load a model and its tokenizer.

    Args:
        name: folder, GGUF file, pulled name or hub id.
        dtype, device: "auto" or a name.
        max_model_len: tokens per request, prompt and answer; None takes the model's limit up to 4096.
        max_num_seqs: requests at a time.
        quantize: "none", or "int8" on a CPU.
        exact: passes of fixed shapes, on a GPU; see `models.exactness` for CPUs.

    Raises:
        ModelError, UnsupportedModel, InvalidRequest: see `resolve`, `refuse_bare`, `check_supported` and the options'
            checks.
    """
    if max_num_seqs < 1:
        raise InvalidRequest(f"max_num_seqs={max_num_seqs}: must be at least 1")
    where = choose_device(device)
    chosen_dtype = choose_dtype(dtype, where)
    check_quantization(quantize, compute_dtype(chosen_dtype, where), where)
    if exact:
        check_exact(where)
    source = resolve(name)
    config = read_config(source)
    refuse_bare(config, name)
    check_supported(config)
    limit = config.get_text_config().max_position_embeddings
    if max_model_len is not None and not 1 <= max_model_len <= limit:
        raise InvalidRequest(f"max_model_len={max_model_len}: {name} has positions for 1 to {limit} tokens")
    model = read_model(source, config, chosen_dtype, where, ATTENTION_NAME)
    codec = read_tokenizer(source)
    eos = _eos_token_ids(model.generation_config, model.config, codec)
    length = max_model_len or min(limit, DEFAULT_MAX_LENGTH)
    target = TransformersTarget(
        model, length, max_num_seqs, eos, rounded_to=chosen_dtype, quantize=quantize, exact=exact
    )
    return target, codec


def load_vocabulary_facts(name: str) -> tuple[TextCodec, int, tuple[int, ...]]:
    """A model's tokenizer, the size of its vocabulary and its EOS ids, without its weights.

    Raises:
        ModelError: nothing readable under that name, or a drafter without an embedding.
    """
    source = resolve(name)
    config, codec = read_config(source), read_tokenizer(source)
    refuse_bare(config, name)
    try:
        generation = GenerationConfig.from_pretrained(source.path)
    except OSError:
        generation = None  # many models have none
    return codec, config.get_text_config().vocab_size, _eos_token_ids(generation, config, codec)


def _eos_token_ids(generation: GenerationConfig | None, config: PretrainedConfig, codec: TextCodec) -> tuple[int, ...]:
    found = generation.eos_token_id if generation else None
    for ids in (found, config.get_text_config().eos_token_id, codec.tokenizer.eos_token_id):
        if ids is not None:
            listed = tuple(ids) if isinstance(ids, list | tuple) else (ids,)
            if all(is_int(one) and one >= -1 for one in listed):
                return tuple(one for one in listed if one >= 0)  # transformers' -1 ends nothing
            raise ModelError(f"{codec.name}: eos_token_id={ids!r}: must be ids; correct its generation_config.json")
    return ()
