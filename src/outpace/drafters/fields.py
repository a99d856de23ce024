"""Read fields of a drafter's config.json: values that occur twice must agree, and errors name the field."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from torch import Tensor

from outpace.drafters.layers import LARGEST_SIZE
from outpace.lib.errors import ModelError
from outpace.models.loading.config import MOST_LAYERS

# Our names of the sizes that every Hugging Face decoder config holds, and the names there.
SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "layers": "num_hidden_layers",
    "rms_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
NAMES = SIZES | {"target_layers": "num_target_layers"}  # for errors
# Qwen3's own default: layers below it are full where a config gives no layer types.
DEFAULT_MAX_WINDOW_LAYERS = 28

C = TypeVar("C", bound=BaseModel)
Exported = tuple[dict[str, Any], dict[str, Tensor]]
"""A drafter in a public layout: its config.json, and its tensors by their names there."""


class Fields:
    """One JSON object of a config; null counts as absent, as Hugging Face writes it for defaults. `where`: the file and
    the object's place in it, for errors."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{where}: must be an object, not {values!r}")
        self.values, self.where = values, where

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """A required field."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.where}: {key} is missing; state it there")
        return value

    def count(self, key: str, absent: int | None = None) -> int:
        """A size. `absent`: default for files that leave it out; None if it is required."""
        value = self.need(key) if absent is None else self.get(key, absent)
        if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
            raise ModelError(f"{self.where}: {key}={value!r} must be a whole number from 1 to {LARGEST_SIZE}")
        return value

    def words(self, key: str) -> list[str]:
        """A list of names; empty when absent."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ModelError(f"{self.where}: {key}={value!r} must be a list of names")
        return value

    def inside(self, key: str) -> "Fields":
        """An object in this one; empty when absent."""
        return Fields(self.get(key, {}), f"{self.where}, {key}")


def architectures(config: Mapping[str, Any]) -> list[Any]:
    """The architectures that a config.json names; none in a file of speculators, which names a model type instead."""
    named = config.get("architectures")
    return named if isinstance(named, list) and config.get("speculators_model_type") is None else []


def agreed(key: str, *places: Fields) -> Any:
    """A field that may be in any of the places; None if it is in none. ModelError if two places disagree."""
    found = [(place, place.get(key)) for place in places if place.get(key) is not None]
    for place, value in found[1:]:
        if value != found[0][1]:
            raise ModelError(
                f"{found[0][0].where}: {key}={found[0][1]!r}, but {place.where}: {key}={value!r}; the two disagree"
            )
    return found[0][1] if found else None


def needed(key: str, *places: Fields) -> Any:
    """A field that must be in at least one of the places."""
    value = agreed(key, *places)
    return places[-1].need(key) if value is None else value


def flag(key: str, *places: Fields) -> bool | None:
    """A boolean that may be in several places; None if it is in none."""
    value = agreed(key, *places)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{places[0].where}: {key}={value!r}: {key} must be true or false")
    return value


def as_tuple(value: Any) -> Any:
    """A JSON list as the tuple that configs hold; any other value unchanged, for validation to refuse."""
    return tuple(value) if isinstance(value, list) else value


def build(kind: type[C], values: Mapping[str, Any], where: str) -> C:
    """A config of a kind from values read from a file."""
    try:
        return kind(**values)
    except ValidationError as error:
        complaints = []
        for problem in error.errors():
            place = ".".join(NAMES.get(str(part), str(part)) for part in problem["loc"])
            message = problem["msg"].removeprefix("Value error, ")
            complaints.append(f"{place}={problem['input']!r}: {message}" if place else message)
        raise ModelError(f"{where}: {'; '.join(complaints)}") from error


def check_activation(fields: Fields) -> None:
    """Refuse another activation than silu, which is what drafter layers compute."""
    if fields.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{fields.where}: hidden_act={fields.get('hidden_act')!r}: drafter layers compute silu only")


def rope(fields: Fields, absent: float | None = None) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, both of which transformers 5 keeps in `rope_parameters`. `absent`: the base
    where the layout has one for files that state none."""
    rotation, scaling = fields.inside("rope_parameters"), fields.inside("rope_scaling")
    if agreed("partial_rotary_factor", fields, rotation, scaling) not in (None, 1):
        raise ModelError(f"{fields.where}: partial_rotary_factor: drafter layers rotate whole heads only")
    theta = agreed("rope_theta", fields, rotation, scaling)
    if theta is None:
        theta = fields.need("rope_theta") if absent is None else absent
    kind = {key: value for key, value in (dict(rotation.values) | dict(scaling.values)).items() if key != "rope_theta"}
    plain = kind.get("rope_type", kind.get("type", "default")) == "default"
    return {"rope_theta": theta, "rope_scaling": None if plain else kind}


def read_decoder(fields: Fields) -> dict[str, Any]:
    """Sizes, rotary positions and attention kinds of a Hugging Face style decoder config, by our names."""
    check_activation(fields)
    values = {ours: fields.need(theirs) for ours, theirs in SIZES.items()} | rope(fields)
    return values | _read_windows(fields) | {"attention_bias": fields.get("attention_bias", False)}


def _read_windows(fields: Fields) -> dict[str, Any]:
    window, types = fields.get("sliding_window"), tuple(fields.words("layer_types"))
    if not types:  # Qwen3's rule: the first layers are full
        count, full = fields.need("num_hidden_layers"), fields.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
        if type(count) is not int or type(full) is not int or count > MOST_LAYERS:
            raise ModelError(
                f"{fields.where}: num_hidden_layers={count!r}, max_window_layers={full!r} must be whole numbers, "
                f"{MOST_LAYERS} layers at most"
            )
        if not (flag("use_sliding_window", fields) and window):
            full = count
        types = tuple("full_attention" if index < full else "sliding_attention" for index in range(count))
    sliding = "sliding_attention" in types
    if sliding and flag("use_sliding_window", fields) is False:
        raise ModelError(f"{fields.where}: use_sliding_window=false, but layer_types={list(types)}; the two disagree")
    return {"layer_types": types, "sliding_window": window if sliding else None}


def write_sizes(config: BaseModel) -> dict[str, Any]:
    """The fields that every Hugging Face style config of a drafter has, from a config of ours."""
    values = config.model_dump()
    return {theirs: values[ours] for ours, theirs in SIZES.items()} | {
        "hidden_act": "silu",
        "rope_theta": values["rope_theta"],
        "rope_scaling": values["rope_scaling"],
        "tie_word_embeddings": False,
    }


def write_decoder(config: BaseModel) -> dict[str, Any]:
    """The Hugging Face style fields of a drafter of several layers; the inverse of `read_decoder`."""
    values = config.model_dump()
    types = list(values["layer_types"] or ["full_attention"] * values["layers"])
    return write_sizes(config) | {
        "model_type": "qwen3",
        "layer_types": types,
        "use_sliding_window": "sliding_attention" in types,
        "sliding_window": values["sliding_window"],
        "attention_bias": values["attention_bias"],
        "attention_dropout": 0.0,
    }


def dtype_name(tensor: Tensor) -> str:
    """The dtype of a tensor as configs write it."""
    return str(tensor.dtype).removeprefix("torch.")
