"""What files of EAGLE-3 and DART share: sizes of one layer, and reduced vocabularies.

Draft id i of a reduced vocabulary stands for target id i + d2t[i] (FR-Spec, arXiv 2502.14856).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.fields import SIZES, Fields, check_activation, flag
from outpace.lib.errors import ModelError


def read_sizes(fields: Fields, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The sizes of a one-layer drafter, by our names, `head_dim` checked against the weights."""
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
            f"{query.shape[0]}; if the weights are right, it should state head_dim={query.shape[0] // heads}"
        )
    check_activation(fields)
    if fields.get("mlp_bias"):
        raise ModelError(f"{fields.where}: mlp_bias=true is not supported")
    if fields.get("use_sliding_window") or set(fields.words("layer_types")) - {"full_attention"}:
        raise ModelError(f"{fields.where}: sliding windows are not supported: {fields.get('layer_types')}")
    return found | {"rms_eps": fields.need("rms_norm_eps"), "bias": bool(flag("attention_bias", fields))}


def check_features(taps: tuple[int, ...] | None, width: int, tensors: Mapping[str, Tensor], where: str) -> None:
    """Check the number of features against the columns of `fc`."""
    count, fc = 3 if taps is None else len(taps), tensors.get("fc.weight")
    if fc is not None and fc.dim() == 2 and fc.shape[1] != count * width:
        stated = "no layer ids are stated, which means 3 features" if taps is None else f"the layer ids are {taps}"
        raise ModelError(
            f"{where}: fc has {fc.shape[1]} columns, but {stated} of target_hidden_size={width}: {count * width}"
        )


def check_offsets(d2t: Tensor, t2d: Tensor | None, draft_size: int, size: int, name: str) -> None:
    """Check that offsets name different target ids, in ascending order, inside the vocabulary. `d2t`: offsets, int64
    [draft_size]. `t2d`: which target ids are in the draft vocabulary, bool [size]; None if the file has none."""
    if d2t.dtype != torch.int64 or d2t.shape != (draft_size,):
        raise ModelError(
            f"{name}: d2t is {d2t.dtype} {list(d2t.shape)}; draft_vocab_size={draft_size} asks for int64 [{draft_size}]"
        )
    ids = d2t + torch.arange(draft_size)  # [draft_size]
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise ModelError(f"{name}: d2t leads to target ids {low} to {high}, outside vocab_size={size}")
    wrong = torch.nonzero(ids[1:] <= ids[:-1]).flatten()
    if wrong.numel():
        at = int(wrong[0])
        raise ModelError(
            f"{name}: d2t must lead to ascending target ids, each once, but draft ids {at} and {at + 1} lead to "
            f"{int(ids[at])} and {int(ids[at + 1])}; is it a list of ids instead of offsets?"
        )
    if t2d is None:
        return
    if t2d.dtype != torch.bool or t2d.shape != (size,):
        raise ModelError(f"{name}: t2d is {t2d.dtype} {list(t2d.shape)}; vocab_size={size} asks for bool [{size}]")
    if not torch.equal(t2d, membership(d2t, size)):
        raise ModelError(f"{name}: t2d and d2t disagree on which target ids are in the draft vocabulary")


def membership(d2t: Tensor, size: int) -> Tensor:
    """t2d, bool [size]: which target ids are in the draft vocabulary, from offsets d2t [draft_size]."""
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    return torch.zeros(size, dtype=torch.bool, device=d2t.device).index_fill(0, ids, True)
