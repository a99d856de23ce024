"""Tensors of a checkpoint into a net, with the disagreements that a shape alone does not explain named first."""

import re
from collections.abc import Mapping
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from outpace.core.errors import ModelError
from outpace.nets.checkpoint import fill
from outpace.nets.dflash import DFlashConfig, DFlashNet

N = TypeVar("N", bound=DFlashNet)
OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight")
REDUCED = ("d2t", "t2d")


def load_net(kind: type[N], config: DFlashConfig, tensors: Mapping[str, Tensor], name: str) -> N:
    """A net of a kind with the tensors of a file, in their dtype, where they are (meta tensors stay meta).

    Args:
        kind: DFlashNet or DominoNet.
        config: of that net.
        tensors: by the net's own names.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: tensors that do not fit the config.
    """
    _explain(config, tensors, name)
    # Smaller floats than these are left for `fill` to refuse: they are quantised and mean nothing without scales.
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point() and tensor.element_size() > 1}
    dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32  # wide enough to round nothing
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    with device:
        net = kind(config).to(dtype)
    fill(net, tensors, name)
    return net


def _explain(config: DFlashConfig, tensors: Mapping[str, Tensor], name: str) -> None:
    """Refuse what a list of wrong shapes would only hint at."""
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
    if query is not None and query.shape[0] != config.heads * config.head_dim:
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


def net_tensors(net: DFlashNet) -> dict[str, Tensor]:
    """The parameters of a net by its own names."""
    return {key: tensor.detach() for key, tensor in net.state_dict().items()}
