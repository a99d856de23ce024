"""Sampling with speculation on a CPU: replaces two faulty functions of vLLM
(https://github.com/vllm-project/vllm/issues/55005).

Before it verifies drafts, vLLM spreads each request's temperature, top-k and top-p over its drafted tokens. On a CPU
its kernel writes into a converted copy, so uninitialised memory is read: answers sampled with any kind of speculation
then do not follow the model's distribution.

In a step without drafts, such as each request's first, a request with top-k and without top-p crashes the engine: the
maximum of an empty tensor is taken.

In a vLLM without these faults the replacements compute the same.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def mend() -> None:
    """Replace both functions if a tested version of vLLM runs on a CPU; otherwise do nothing."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample import rejection_sampler as sampler

    if sampler.expand_batch_to_tokens is not expand:  # otherwise an earlier call has replaced both
        sampler.expand_batch_to_tokens = expand
        sampler.apply_sampling_constraints = unless_none(sampler.apply_sampling_constraints)


def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """Repeat each request's value for each of its tokens. Replaces vLLM's function of this signature.

    Args:
        x: [B].
        cu_num_tokens: [B], cumulative numbers of the requests' tokens.

    Returns:
        [T], of the dtype of `x`.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def unless_none(constrain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A version of `constrain` that returns logits [T, V] unchanged for T = 0."""

    @wraps(constrain)
    def constrained(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return constrain(logits, *args, **kwargs) if len(logits) else logits

    return constrained
