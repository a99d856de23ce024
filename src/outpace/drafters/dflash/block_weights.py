"""Weights of DFlash and Domino: the disagreements that a shape alone does not explain are named first."""

import re
from collections.abc import Mapping

from torch import Tensor

from outpace.drafters.dflash.net import DFlashConfig
from outpace.lib.errors import ModelError

OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight")
REDUCED = ("d2t", "t2d")


def check_block_weights(config: DFlashConfig, tensors: Mapping[str, Tensor], name: str) -> None:
    """Refuse what a list of wrong shapes would only hint at.

    Raises:
        ModelError: tensors of the target's, or sizes that disagree with the config.
    """
    reduced = [key for key in REDUCED if key in tensors]
    if reduced:
        raise ModelError(f"{name}: holds {', '.join(reduced)}: a draft vocabulary of its own is not supported here")
    own = [key for key in tensors if key.removeprefix("model.") in OF_THE_TARGET]
    if own:
        raise ModelError(
            f"{name}: holds {', '.join(own)}, but embedding and LM head are the target's; "
            "delete them from the file if they are its copies"
        )
    complaints = []
    found = {int(match[1]) for key in tensors if (match := re.match(r"layers\.(\d+)\.", key))}
    if found and found != set(range(config.layers)):
        complaints.append(f"num_hidden_layers={config.layers}, but there are tensors of layers {sorted(found)}")
    query = tensors.get("layers.0.self_attn.q_proj.weight")
    if query is not None and query.ndim == 2 and query.shape[0] != config.heads * config.head_dim:
        complaints.append(
            f"num_attention_heads={config.heads} times head_dim={config.head_dim} is "
            f"{config.heads * config.head_dim}, but q_proj has {query.shape[0]} rows"
        )
    fuse, width = tensors.get("fc.weight"), len(config.target_layer_ids) * config.target_hidden_size
    if fuse is not None and fuse.ndim == 2 and fuse.shape[1] != width:
        complaints.append(
            f"target_layer_ids={list(config.target_layer_ids)} times target_hidden_size={config.target_hidden_size} "
            f"is {width}, but fc has {fuse.shape[1]} columns"
        )
    if complaints:
        raise ModelError(f"{name}: {'; '.join(complaints)}")
