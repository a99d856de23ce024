"""From a name to a target: resolve, read, check, choose dtype and device."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    PretrainedConfig,
)
from transformers.utils import CONFIG_NAME

from outpace.lib.checkpoint import read_object
from outpace.lib.checks import is_number
from outpace.lib.errors import ModelError
from outpace.lib.stages import stage
from outpace.models.loading.registry import Source, ask_hub, find_file, first_line


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


# Least and most of whole numbers. Transformers makes something for each layer, and for each label of a classifier.
MOST_LAYERS = 1024


_COUNTS = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "block_count"), (1, MOST_LAYERS)) | {
    "num_labels": (0, 10_000),
    "max_position_embeddings": (1, 2**40),
    "n_positions": (1, 2**40),
    "context_length": (1, 2**40),
}


_ALIKE = ("gpt2", "gpt_neox")  # families with as many heads of keys as of queries


_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layer_norm_rms_epsilon")


_DIVISORS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")


_NUMBERS = dict.fromkeys(_EPSILONS, (0.0, 1.0)) | dict.fromkeys(_DIVISORS, (1e-6, 1e6))


_HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")  # a GGUF file's


_REFUSED = {
    "quantization_config": "its weights are not plain floats; take the unquantised checkpoint, with quantize='int8', "
    "or a GGUF file",
    "transformers_weights": "names other files; rename them to model.safetensors",
    "fusion_config": "would patch the library's layers; remove it",
}


def check_fields(config: Mapping[str, Any], name: str) -> None:
    """Refuse fields that would cost time or memory without end, or change what is read.

    Args:
        config: of config.json or of a GGUF file's header, as it was written.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: naming field, value and remedy.
    """
    for key, value in _fields(config):
        if value is None:
            continue
        if key in _REFUSED:
            raise ModelError(f"{name}: {key}: {_REFUSED[key]}")
        field = key.rpartition(".")[2]
        if field in _COUNTS and not (type(value) is int and _COUNTS[field][0] <= value <= _COUNTS[field][1]):
            least, most = _COUNTS[field]
            raise ModelError(f"{name}: {key}={value!r}: must be a whole number from {least} to {most}; correct it")
        if field in _NUMBERS and not (is_number(value) and _NUMBERS[field][0] <= value <= _NUMBERS[field][1]):
            low, high = _NUMBERS[field]
            raise ModelError(f"{name}: {key}={value!r}: must be a number from {low:g} to {high:g}; correct it")


def read_head_size(config: PretrainedConfig, header: Mapping[str, Any], name: str) -> None:
    """Take the width of heads from a GGUF file: transformers reads it for some families only, and for others assumes
    128, hidden_size / num_attention_heads or the width of the rotary embedding.

    Args:
        config: of the model, whose head_dim is set.
        header: values of the file's header.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: keys, values and rotary embeddings of different widths.
    """
    keys = [f"{header.get('general.architecture')}.{part}" for part in _HEAD_SIZES]
    found = {key: header[key] for key in keys if key in header}
    if not any(key in found for key in keys[:2]):
        return
    if len(set(found.values())) > 1:
        given = ", ".join(f"{key}={value!r}" for key, value in found.items())
        raise ModelError(f"{name}: {given}: different widths are not supported; use a model in which they are equal")
    config.head_dim = found.popitem()[1]


def check_sizes(config: PretrainedConfig, largest: int, name: str) -> None:
    """Refuse sizes that no tensor has, or that do not go together: they cost memory before tensors are compared.

    Args:
        config: of the model.
        largest: size of a tensor in the file, along any dimension.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: naming field, value and remedy.
    """
    text = config.get_text_config()
    heads, experts = text.num_attention_heads, getattr(text, "num_experts", None)
    limits = {"hidden_size": largest, "head_dim": largest, "num_attention_heads": largest}
    limits |= {"num_key_value_heads": heads} | ({} if experts is None else {"num_experts_per_tok": experts})
    for field, most in limits.items():
        value = getattr(text, field, None)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            raise ModelError(f"{name}: {field}={value!r}: must be from 1 to {most} here; correct its config")
    own_keys = getattr(text, "num_key_value_heads", None) or heads
    if heads % own_keys or (own_keys != heads and text.model_type in _ALIKE):
        raise ModelError(f"{name}: num_key_value_heads={own_keys}: does not go with {heads} heads; correct its config")


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every field, those of objects inside as well."""
    rest = [config]
    while rest:
        for key, value in rest.pop().items():
            yield key, value
            if isinstance(value, Mapping):
                rest.append(value)


# Fields of config.json beside the family's own: whose the embedding and the head are, and which tokens the ids mean.
EMBEDDING, VOCABULARY = "outpace_embedding", "outpace_vocabulary"
TARGETS = "target"


def is_bare(config: PretrainedConfig, name: str) -> bool:
    """Whether a config describes such a draft model.

    Args:
        config: of a language model's text part.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: the embedding is said to be something else than the target's.
    """
    said = getattr(config, EMBEDDING, None)
    if said not in (None, TARGETS):
        raise ModelError(
            f"{name}: config.json: {EMBEDDING}={said!r} is not known; write {TARGETS!r}, or leave it out where the "
            "checkpoint has an embedding"
        )
    return said is not None


def refuse_bare(config: PretrainedConfig, name: str) -> None:
    """Refuse such a draft model where a whole model is needed.

    Raises:
        ModelError: it is one.
    """
    if is_bare(config.get_text_config(), name):
        raise ModelError(
            f"{name}: is a drafter without an embedding ({EMBEDDING}={TARGETS!r}) and says nothing by itself; load "
            f"the target it was trained for, with drafter={name!r}"
        )
