"""What a config may say before transformers makes something of it: sizes that can be, no other files, no patches."""

from collections.abc import Iterator, Mapping
from typing import Any

from outpace.core.errors import ModelError
from outpace.nets.layers import MOST_LAYERS

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "block_count")
# Transformers writes a name for each label of a classifier; decoders have none.
_MOST_LABELS = 10_000
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
        if key.rpartition(".")[2] in _LAYERS and not (type(value) is int and 1 <= value <= MOST_LAYERS):
            raise ModelError(f"{name}: {key}={value!r}: must be from 1 to {MOST_LAYERS}; download it again")
        if key == "num_labels" and not (type(value) is int and 0 <= value <= _MOST_LABELS):
            raise ModelError(f"{name}: {key}={value!r}: must be from 0 to {_MOST_LABELS}; remove it")


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every field, those of objects inside as well."""
    rest = [config]
    while rest:
        for key, value in rest.pop().items():
            yield key, value
            if isinstance(value, Mapping):
                rest.append(value)
