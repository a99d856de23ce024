"""What files of EAGLE-3 and DART share: the sizes of one layer, checked against its weights."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from outpace.drafters.fields import SIZES, Fields, check_activation, flag
from outpace.lib.errors import ModelError


def read_sizes(fields: Fields, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The sizes of a one-layer drafter, by our names, `head_dim` checked against the weights.

    Raises:
        ModelError: a field is missing, head sizes disagree, or a feature is used that our nets do not have.
    """
    heads, width = fields.count("num_attention_heads"), fields.count("hidden_size")
    usual = {"num_key_value_heads": heads, "head_dim": width // heads}
    found: dict[str, Any] = {
        ours: fields.count(theirs, usual.get(theirs)) for ours, theirs in SIZES.items() if ours != "rms_eps"
    }
    rows, query = heads * found["head_dim"], tensors.get("midlayer.self_attn.q_proj.weight")
    if query is not None and query.dim() == 2 and query.shape[0] != rows:
        source = "hidden_size / num_attention_heads" if fields.get("head_dim") is None else "head_dim"
        raise ModelError(
            f"{fields.where}: {source} is {found['head_dim']}, so {heads} heads have {rows} rows, but q_proj has "
            f"{query.shape[0]}; if the weights are right, it should say head_dim={query.shape[0] // heads}"
        )
    check_activation(fields)
    if fields.get("mlp_bias"):
        raise ModelError(f"{fields.where}: mlp_bias=true is not supported")
    if fields.get("use_sliding_window") or set(fields.words("layer_types")) - {"full_attention"}:
        raise ModelError(f"{fields.where}: sliding windows are not supported: {fields.get('layer_types')}")
    return found | {"rms_eps": fields.need("rms_norm_eps"), "bias": bool(flag("attention_bias", fields))}


def check_features(taps: tuple[int, ...] | None, width: int, tensors: Mapping[str, Tensor], where: str) -> None:
    """Check the number of features against the columns of `fc`.

    Raises:
        ModelError: they disagree.
    """
    count, fc = 3 if taps is None else len(taps), tensors.get("fc.weight")
    if fc is not None and fc.dim() == 2 and fc.shape[1] != count * width:
        told = "no layer ids are stated, which means 3 features" if taps is None else f"the layer ids are {taps}"
        raise ModelError(
            f"{where}: fc has {fc.shape[1]} columns, but {told} of target_hidden_size={width}: {count * width}"
        )
