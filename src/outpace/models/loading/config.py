"""Read a model's config, and refuse values that transformers would turn into endless work or other files' content."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.lib.checkpoint import read_object
from outpace.lib.checks import is_number
from outpace.lib.errors import ModelError, first_line
from outpace.lib.stages import stage
from outpace.models.loading.gguf_config import config_of
from outpace.models.loading.registry import Location, folder_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Bounds of whole numbers. Transformers builds something for each layer and for each label of a classifier, and the
# check of a file's tensors lists every expert.
MOST_LAYERS, MOST_EXPERTS = 1024, 4096
_COUNTS = (
    dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "block_count"), (1, MOST_LAYERS))
    | dict.fromkeys(("max_position_embeddings", "n_positions", "context_length"), (1, 2**40))
    | dict.fromkeys(("num_experts", "num_local_experts", "expert_count"), (0, MOST_EXPERTS))
    | {"num_labels": (0, 10_000)}
)
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layer_norm_rms_epsilon")
_DIVISORS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
_NUMBERS = dict.fromkeys(_EPSILONS, (0.0, 1.0)) | dict.fromkeys(_DIVISORS, (1e-6, 1e6))
_REFUSED = {
    "quantization_config": "its weights are not plain floats; take the unquantised checkpoint, with quantize='int8', "
    "or a GGUF file",
    "transformers_weights": "names other files; rename them to model.safetensors",
    "fusion_config": "would patch the library's layers; remove it",
}
CONFIG_NAME, ADAPTER = "config.json", "adapter_config.json"
_MULTI_HEAD = ("gpt2", "gpt_neox")  # families with as many key heads as query heads

# Fields of config.json beyond the family's own: which embedding a draft model uses, and for which tokenizer.
EMBEDDING, VOCABULARY = "outpace_embedding", "outpace_vocabulary"
TARGETS = "target"


@stage("reading the configuration")
def read_config(location: Location, for_weights: bool = True) -> "PretrainedConfig":
    """Read a model's configuration.

    Args:
        for_weights: whether its weights are read here; else they may be in any format, such as another engine's.

    Raises:
        ModelError: there is none under that name, a field out of bounds, or the hub cannot be reached.
    """
    path = folder_of(location)
    config: Any
    try:
        if location.gguf is not None:
            _check_fields(location.gguf.values, location.name)
            config = config_of(location.gguf, location.name)
        else:
            from transformers import AutoConfig

            _check_folder(Path(path), location.name)
            if (file := Path(path, CONFIG_NAME)).is_file():
                _check_fields(read_object(file), location.name, _REFUSED if for_weights else {})
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        if not hasattr(text := config.get_text_config(), "model_type"):
            raise ModelError(f"{location.name}: text_config={text!r}: must be an object; correct config.json")
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{location.name}: no model found: {first_line(error)}") from error
    return config  # type: ignore[no-any-return]


def _check_folder(folder: Path, name: str) -> None:
    """Refuse a folder of an adapter, or of GGUF files alone."""
    if (adapter := folder / ADAPTER).is_file():
        base = read_object(adapter).get("base_model_name_or_path")
        raise ModelError(
            f"{name}: {ADAPTER}: is an adapter of {base!r}, and adapters are not applied; merge both (peft's "
            f"merge_and_unload), save the whole model and load its folder, without {ADAPTER}"
        )
    files = sorted(file.name for file in folder.glob("*.gguf"))
    if files and not (folder / CONFIG_NAME).is_file():
        raise ModelError(f"{name}: no {CONFIG_NAME} there; load a file of this folder by its path: {', '.join(files)}")


def check_sizes(config: "PretrainedConfig", largest: int, name: str) -> None:
    """Refuse sizes that exceed the tensors or contradict each other, before memory is allocated for them.

    Args:
        config: of the model.
        largest: the largest dimension of any tensor in the file.
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
    if heads % own_keys or (own_keys != heads and text.model_type in _MULTI_HEAD):
        raise ModelError(f"{name}: num_key_value_heads={own_keys}: does not go with {heads} heads; correct its config")


def is_bare(config: "PretrainedConfig", name: str) -> bool:
    """Whether a config describes a draft model without an embedding and a head of its own (`models.draft`).

    Args:
        config: of a language model's text part.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: its embedding is not the target's.
    """
    embedding = getattr(config, EMBEDDING, None)
    if embedding not in (None, TARGETS):
        raise ModelError(
            f"{name}: config.json: {EMBEDDING}={embedding!r} is not known; write {TARGETS!r}, or leave it out where "
            "the checkpoint has an embedding"
        )
    return embedding is not None


def refuse_bare(config: "PretrainedConfig", name: str) -> None:
    """Refuse a draft model without an embedding where a whole model is needed.

    Raises:
        ModelError: it is one.
    """
    if is_bare(config.get_text_config(), name):
        raise ModelError(
            f"{name}: is a drafter without an embedding ({EMBEDDING}={TARGETS!r}) and cannot generate; load the "
            f"target it was trained for, with drafter={name!r}"
        )


def _check_fields(config: Mapping[str, Any], name: str, refused: Mapping[str, str] = _REFUSED) -> None:
    """Check the raw fields of config.json or of a GGUF header. `refused`: reasons by field."""
    for key, value in _fields(config):
        if value is None:
            continue
        if key in refused:
            raise ModelError(f"{name}: {key}: {refused[key]}")
        field = key.rpartition(".")[2]
        if field in _COUNTS and not (type(value) is int and _COUNTS[field][0] <= value <= _COUNTS[field][1]):
            least, most = _COUNTS[field]
            raise ModelError(f"{name}: {key}={value!r}: must be a whole number from {least} to {most}; correct it")
        if field in _NUMBERS and not (is_number(value) and _NUMBERS[field][0] <= value <= _NUMBERS[field][1]):
            low, high = _NUMBERS[field]
            raise ModelError(f"{name}: {key}={value!r}: must be a number from {low:g} to {high:g}; correct it")


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All fields, those of nested objects included. A stack, because nesting can be deeper than Python's recursion."""
    rest = [config]
    while rest:
        for key, value in rest.pop().items():
            yield key, value
            if isinstance(value, Mapping):
                rest.append(value)
