"""Sampling with speculation on a CPU: replaces two functions of vLLM's that are at fault there
(https://github.com/vllm-project/vllm/issues/55005).

Before it verifies drafts, vLLM spreads each request's temperature, top-k and top-p over its drafted tokens. On a CPU
the kernel for it was given a converted copy to write to, so uninitialised memory is read: answers sampled
with any kind of speculation then follow another distribution than the model's.

Where a step has no drafts at all, as each request's first, a request with top-k and without top-p ends the engine: the
maximum of no numbers is taken.

In a vLLM without these faults the replacements compute the same.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def mend() -> None:
    """Replace both functions where vLLM, of a tested version, runs on a CPU; elsewhere nothing is done."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample import rejection_sampler as sampler

    if sampler.expand_batch_to_tokens is not expand:  # else an earlier call has replaced both
        sampler.expand_batch_to_tokens = expand
        sampler.apply_sampling_constraints = unless_none(sampler.apply_sampling_constraints)


def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """A value of each request for each of its tokens, in place of vLLM's function of this signature.

    Args:
        x: [B].
        cu_num_tokens: [B], tokens of the requests up to each one, itself included.

    Returns:
        [T], of the dtype of `x`.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def unless_none(constrain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of logits [T, V] that leaves those of no tokens as they are."""

    @wraps(constrain)
    def constrained(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return constrain(logits, *args, **kwargs) if len(logits) else logits

    return constrained
