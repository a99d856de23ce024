"""Which drafter a net is, in a word: for files that hold for one drafter alone."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
    return fingerprint_of(type(net).__name__, config.model_dump_json(exclude_defaults=True), net.state_dict())


def fingerprint_of(kind: str, config: str, tensors: Mapping[str, Tensor]) -> str:
    """The same of whatever has a kind, a config and tensors."""
    digest = hashlib.sha256(config.encode())
    for name, weight in sorted(tensors.items()):
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLED)].to("cpu", torch.float64)
        digest.update(f"{name}{list(weight.shape)}".encode() + sample.numpy().tobytes())
    return f"{kind}-{digest.hexdigest()[:12]}"
