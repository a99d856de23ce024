"""Frequencies of rotary positions: plain, and scaled for long contexts (linear, Llama 3, YaRN)."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from outpace.lib.checks import is_number

Parameters = Mapping[str, Any]
"""As `rope_parameters` of a config: rope_type, rope_theta, and what the type needs."""
_MOST_POSITIONS = 2**40  # a damaged config may extend them by any factor


def extended(positions: int, parameters: Parameters) -> int:
    """A config's positions, or as many as YaRN extends them to: one that was extended as Qwen's model cards say keeps
    the original `max_position_embeddings`."""
    original: Any = parameters.get("original_max_position_embeddings")
    factor: Any = parameters.get("factor")
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind != "yarn" or not (is_number(original) and is_number(factor)):
        return positions
    most = original * factor
    return int(most) if original <= positions < most <= _MOST_POSITIONS else positions


def frequencies(parameters: Parameters, size: int) -> tuple[Tensor, float]:
    """Frequencies [size/2] in float32, with transformers' order of operations, and the factor of cosines and sines.

    Args:
        parameters: of the rotation.
        size: rotated dimensions of a head.

    Raises:
        KeyError: an unknown type, or a parameter that its type needs.
    """
    return _KINDS[parameters["rope_type"]](parameters, size)


def _plain(parameters: Parameters, size: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(parameters, size), 1.0


def _wavelengths(parameters: Parameters, size: int) -> Tensor:
    """Positions per radian."""
    even = torch.arange(0, size, 2, dtype=torch.float32, device="cpu")  # a model on "meta" needs its frequencies too
    found: Tensor = parameters["rope_theta"] ** (even / size)
    return found


def _linear(parameters: Parameters, size: int) -> tuple[Tensor, float]:
    return _plain(parameters, size)[0] / parameters["factor"], 1.0


def _llama3(parameters: Parameters, size: int) -> tuple[Tensor, float]:
    """Long wavelengths are stretched by the factor, short ones kept, and those between interpolated."""
    factor, low, high = (parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = parameters["original_max_position_embeddings"]
    plain, _ = _plain(parameters, size)
    length = 2 * math.pi / plain
    smooth = (original / length - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    ends = torch.where(length > original / low, plain / factor, plain)
    is_between = (length >= original / high) & (length <= original / low)
    return torch.where(is_between, between, ends), 1.0


def _yarn(parameters: Parameters, size: int) -> tuple[Tensor, float]:
    """As `_llama3`, with bounds in numbers of turns and a ramp over dimensions (arXiv 2309.00071)."""
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    wavelengths = _wavelengths(parameters, size)

    def dimension(turns: float) -> float:
        ratio = math.log(original / (turns * 2 * math.pi))
        return size * ratio / (2 * math.log(parameters["rope_theta"]))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(size // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    found = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return found, _yarn_factor(parameters, factor)


def _yarn_factor(parameters: Parameters, factor: float) -> float:
    def sharpness(scale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    scale, all_scale = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return sharpness(scale) / sharpness(all_scale) if scale and all_scale else sharpness()


_KINDS: dict[str, Callable[[Parameters, int], tuple[Tensor, float]]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
SCALED = ("linear", "llama3", "yarn")
