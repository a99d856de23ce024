"""Which drafter a net is, in a word: for files that hold for one drafter alone."""

import hashlib
from typing import Any

import torch
from torch import nn

SAMPLED = 64
"""Values of each tensor, evenly apart: training moves them all, and reading all of them would take seconds."""


def fingerprint(net: nn.Module) -> str:
    """The net's kind, and a hash of its config and of a sample of every tensor.

    Layouts, file names and wider dtypes of the same values do not matter; a rounding does.

    Args:
        net: as it was read, in its file's dtype and with its own linear layers: packed ones hide their weights.

    Returns:
        As in "Eagle3Net-0f3a5c7e9b1d".
    """
    config: Any = net.config
    digest = hashlib.sha256(config.model_dump_json(exclude_defaults=True).encode())
    for name, weight in sorted(net.state_dict().items()):
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLED)].to("cpu", torch.float64)
        digest.update(f"{name}{list(weight.shape)}".encode() + sample.numpy().tobytes())
    return f"{type(net).__name__}-{digest.hexdigest()[:12]}"
