"""Keyed Gumbel noise: sampling that speculation cannot change.

The target's draw at absolute position t of sample i of a request with seed s is argmax(log p + g), where g depends
on (s, i, t, token id) alone. Every draw at that position gives the same token: in plain decoding or at any node of any
tree, alone or in a batch. The bits come from an integer hash of 32-bit words, so that another backend can reproduce
them.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from outpace.core.protocols import SamplingContext

_MIX_1, _MIX_2 = 0x7FEB352D, 0x846CA68B - 2**32
_TOKEN_STEP = 0x9E3779B9 - 2**32
_WORD = 2**32 - 1
_LARGEST = 1.0 - 2.0**-24


class Purpose(IntEnum):
    """The use of a noise value. Using the same noise twice would correlate decisions that must be independent."""

    TARGET = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def noise_key(seed: int, sample_index: int, position: int, purpose: Purpose = Purpose.TARGET) -> tuple[int, int]:
    """Two signed 32-bit words that key all noise of one decision."""
    packed = struct.pack("<QIIB", seed, sample_index, position, purpose)
    first, second = struct.unpack("<ii", hashlib.blake2b(packed, digest_size=8).digest())
    return first, second


def draw_key(context: SamplingContext, depth: int, purpose: Purpose = Purpose.TARGET) -> tuple[int, int]:
    """The key of a request's decision after a node at a depth of its tree."""
    return noise_key(context.seed, context.sample_index, context.first_position + depth, purpose)


def _mix(bits: Tensor) -> Tensor:
    """A 32-bit finaliser (multiply-xorshift); int32 arithmetic wraps, shifts are made logical by masking."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * _MIX_1
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * _MIX_2
    return bits ^ ((bits >> 16) & 0xFFFF)


def noise_bits(keys: Sequence[tuple[int, int]], token_ids: Tensor) -> Tensor:
    """[R, M] int32 hash of each key with each token id."""
    words = torch.tensor(keys, dtype=torch.int32, device=token_ids.device)  # [R, 2]
    bits = _mix(token_ids.to(torch.int32) * _TOKEN_STEP + words[:, :1])
    return _mix(bits ^ words[:, 1:])


def uniform(keys: Sequence[tuple[int, int]], token_ids: Tensor) -> Tensor:
    """[R, M] float32 in (0, 1), with 2**-32 resolution near 0."""
    bits = noise_bits(keys, token_ids)
    # Read as unsigned: small values convert to float32 exactly, which keeps the fine resolution near 0.
    values = bits.to(torch.float32) + (bits < 0) * 2.0**32
    return ((values + 0.5) * 2.0**-32).clamp_(max=_LARGEST)


def gumbel(keys: Sequence[tuple[int, int]], token_ids: Tensor) -> Tensor:
    """[R, M] standard Gumbel noise, -log(-log1p(-u)): fine-grained in the upper tail, where the argmax lives."""
    return uniform(keys, token_ids).neg_().log1p_().neg_().log_().neg_()


def bits_of(key: tuple[int, int], token_id: int) -> int:
    """The hash of one id, an unsigned word: `noise_bits` without tensors, whose calls cost more than a few hashes."""
    first, second = key
    return _mix_word(_mix_word(token_id * _TOKEN_STEP + first & _WORD) ^ second & _WORD)


def gumbel_of(key: tuple[int, int], token_id: int) -> float:
    """`gumbel` for one id, in float64: no step is rounded to float32."""
    return -math.log(-math.log1p(-min((bits_of(key, token_id) + 0.5) * 2.0**-32, _LARGEST)))


def _mix_word(bits: int) -> int:
    """`_mix` in unbounded integers, reduced to 32 bits."""
    bits = (bits ^ bits >> 16) * _MIX_1 & _WORD
    bits = (bits ^ bits >> 15) * _MIX_2 & _WORD
    return bits ^ bits >> 16
