"""Reading the config.json of somebody else: every field by its name in the file, nothing guessed."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from outpace.core.errors import ModelError
from outpace.nets.fusion import FusionConfig
from outpace.nets.layers import fill_with_nan

SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "max_positions": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
"""Our names of the sizes that every config states, and the file's."""

NOWHERE = torch.empty(0, device="meta")  # stands in for a tensor that is missing, until `fill` names it

C = TypeVar("C", bound=BaseModel)
N = TypeVar("N", bound=nn.Module)


def need(fields: Mapping[str, Any], key: str, name: str) -> Any:
    """The value of a field.

    Raises:
        ModelError: the file does not have it, or has null.
    """
    if fields.get(key) is None:
        raise ModelError(f"{name}: config.json has no {key}")
    return fields[key]


def count(fields: Mapping[str, Any], key: str, name: str, absent: int | None = None) -> int:
    """A size.

    Args:
        fields: of the file.
        key: its name there.
        name: of the checkpoint, for errors.
        absent: the size of files that do not state it; None if they must.

    Raises:
        ModelError: something else than a positive whole number, or nothing where it must be stated.
    """
    value = need(fields, key, name) if absent is None else fields.get(key)
    if value is None:
        value = absent
    if type(value) is not int or value < 1:
        raise ModelError(f"{name}: {key}={value!r} must be a whole number from 1 on")
    return value


def flag(key: str, name: str, *places: Mapping[str, Any]) -> bool | None:
    """A yes or no that may stand in several places of a file; None if it stands in none.

    Raises:
        ModelError: something else than true or false, or places that disagree.
    """
    said = {place[key] for place in places if place.get(key) is not None}
    if len(said) > 1 or not all(isinstance(value, bool) for value in said):
        raise ModelError(
            f"{name}: {key} must be true or false, the same wherever it stands, not {sorted(map(str, said))}"
        )
    return said.pop() if said else None


def rope(fields: Mapping[str, Any], name: str, absent: float | None) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which transformers 5 keeps in `rope_parameters`.

    Args:
        fields: of the file.
        name: of the checkpoint, for errors.
        absent: the base where the layout has one for files that state none.

    Raises:
        ModelError: two bases, or none.
    """
    parameters = dict(fields.get("rope_parameters") or {})
    scaling = dict(fields.get("rope_scaling") or {}) or parameters
    said = {float(place["rope_theta"]) for place in (fields, parameters) if place.get("rope_theta") is not None}
    if len(said) > 1:
        raise ModelError(f"{name}: rope_theta and rope_parameters.rope_theta disagree: {sorted(said)}")
    if not said and absent is None:
        raise ModelError(f"{name}: config.json has no rope_theta, and this layout has no base that goes without saying")
    scaling = {key: value for key, value in scaling.items() if key != "rope_theta"}
    plain = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    return {"rope_theta": said.pop() if said else absent, "rope_scaling": None if plain else scaling}


def sizes(fields: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """The sizes of a one-layer drafter, by our names, `head_dim` checked against the weights.

    Raises:
        ModelError: a field is missing, head sizes disagree, or a feature is used that our nets do not have.
    """
    found: dict[str, Any] = {ours: count(fields, theirs, name) for ours, theirs in SIZES.items()}
    found["rms_eps"] = need(fields, "rms_norm_eps", name)
    found["kv_heads"] = count(fields, "num_key_value_heads", name, found["heads"])
    head_dim, source = count(fields, "head_dim", name, found["hidden_size"] // found["heads"]), "head_dim"
    if fields.get("head_dim") is None:
        source = "hidden_size / num_attention_heads"
    query = tensors.get("midlayer.self_attn.q_proj.weight")
    if query is not None and query.dim() == 2 and query.shape[0] != found["heads"] * head_dim:
        raise ModelError(
            f"{name}: {source} is {head_dim}, so {found['heads']} heads have {found['heads'] * head_dim} rows, "
            f"but q_proj has {query.shape[0]}; if the weights are right, config.json should say "
            f"head_dim={query.shape[0] // found['heads']}"
        )
    if fields.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{name}: hidden_act={fields['hidden_act']!r} is not supported; only 'silu' is")
    if fields.get("mlp_bias"):
        raise ModelError(f"{name}: mlp_bias=true is not supported")
    if fields.get("use_sliding_window") or set(fields.get("layer_types") or ()) - {"full_attention"}:
        raise ModelError(f"{name}: sliding windows are not supported: {fields.get('layer_types')}")
    bias = flag("attention_bias", name, fields)
    return found | {"head_dim": head_dim, "bias": bool(bias)}


def joined_features(taps: tuple[int, ...] | None, width: int, tensors: Mapping[str, Tensor], name: str) -> None:
    """Check the number of features against the columns of `fc`.

    Raises:
        ModelError: they disagree.
    """
    count, fc = 3 if taps is None else len(taps), tensors.get("fc.weight")
    if fc is not None and fc.dim() == 2 and fc.shape[1] != count * width:
        told = "no layer ids are stated, which means 3 features" if taps is None else f"the layer ids are {taps}"
        raise ModelError(
            f"{name}: fc has {fc.shape[1]} columns, but {told} of target_hidden_size={width}: {count * width}"
        )


def make(kind: type[C], name: str, **values: Any) -> C:
    """A config of ours from values of a file.

    Raises:
        ModelError: values that do not fit each other or the fields.
    """
    names = (
        SIZES | {"kv_heads": "num_key_value_heads", "rms_eps": "rms_norm_eps"} if issubclass(kind, FusionConfig) else {}
    )
    try:
        return kind(**values)
    except ValidationError as error:
        complaints = []
        for one in error.errors():
            ours = ".".join(map(str, one["loc"]))
            said = f"{names.get(ours, ours)}={one['input']!r}: " if ours else ""
            complaints.append(said + one["msg"].removeprefix("Value error, "))
        raise ModelError(f"{name}: config.json: {'; '.join(complaints)}") from error


def empty(build: Callable[[], N], like: Tensor) -> N:
    """A net full of NaN in the dtype and on the device of a tensor of its file, without initialising it first."""
    with torch.device("meta"):
        net = build()
    dtype = like.dtype if like.is_floating_point() else torch.float32  # `fill` names weights that are whole numbers
    return fill_with_nan(net.to(dtype).to_empty(device=like.device))
