"""What a config may say before transformers makes something of it: sizes that can be, no other files, no patches."""

from collections.abc import Iterator, Mapping
from typing import Any

from outpace.core.errors import ModelError
from outpace.nets.layers import MOST_LAYERS

# Least and most of whole numbers. Transformers makes something for each layer, and for each label of a classifier.
_COUNTS = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "block_count"), (1, MOST_LAYERS)) | {
    "num_labels": (0, 10_000),
    "max_position_embeddings": (1, 2**40),
    "n_positions": (1, 2**40),
    "context_length": (1, 2**40),
}
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layer_norm_rms_epsilon")
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
        if field in _EPSILONS and not (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1):
            raise ModelError(f"{name}: {key}={value!r}: must be a number from 0 to 1; correct it")


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every field, those of objects inside as well."""
    rest = [config]
    while rest:
        for key, value in rest.pop().items():
            yield key, value
            if isinstance(value, Mapping):
                rest.append(value)
