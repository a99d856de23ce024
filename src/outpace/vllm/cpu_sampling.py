"""Sampling with speculation on a CPU: detects and repairs a bug of vLLM's (#55005), or refuses to start.

Before it verifies drafts, vLLM spreads each request's temperature, top-k and top-p over its drafted tokens. On a CPU
the kernel for it was given a converted copy to write to, so uninitialised memory is read: answers sampled
with any kind of speculation then follow another distribution than the model's.

Where a step has no drafts at all, as each request's first, a request with top-k and without top-p ends the engine: the
maximum of no numbers is taken. So the sampler is tested with no tokens as well.
"""

import logging
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from outpace.vllm.versions import SAMPLING_HOOKS, installed_version, is_tested, missing_hooks

LOGGER = logging.getLogger("vllm.outpace")
ISSUE = "https://github.com/vllm-project/vllm/issues/55005"
_MARK = "_outpace_looks_at_sampling"


def guard() -> None:
    """Let no engine that speculates start on this CPU before its sampling was looked at. Elsewhere nothing is done.

    When a sampler is made vLLM has its kernels in place, and only engines that speculate make one.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not is_tested():  # another vLLM is as without this plugin
        return
    missing = missing_hooks(SAMPLING_HOOKS)
    if missing:
        raise RuntimeError(
            f"outpace: vLLM {installed_version()} on a CPU: whether sampling with speculation is right ({ISSUE}) "
            f"is unknown: {'; '.join(missing)}. Install another vLLM, or leave this plugin out: VLLM_PLUGINS=''"
        )
    from vllm.v1.sample import rejection_sampler

    make = rejection_sampler.RejectionSampler.__init__
    if hasattr(make, _MARK):  # by an earlier call
        return

    @wraps(make)
    def checked(*args: Any, **kwargs: Any) -> None:
        mend(rejection_sampler)
        make(*args, **kwargs)

    setattr(checked, _MARK, True)
    rejection_sampler.RejectionSampler.__init__ = checked


def mend(sampler: Any) -> None:
    """Mend a sampler that is at fault; one that is right stays as it is. `sampler`: the module
    `vllm.v1.sample.rejection_sampler`, its kernels in place."""
    if not takes_none(sampler):
        sampler.apply_sampling_constraints = _unless_none(sampler.apply_sampling_constraints)
    if is_right(sampler):
        return
    version = installed_version()
    sampler.expand_batch_to_tokens = expand
    if not is_right(sampler):
        raise RuntimeError(
            f"outpace: vLLM {version} samples wrongly on a CPU where it speculates ({ISSUE}), and the mend does not "
            "take; leave out the speculative config, or install another vLLM"
        )
    LOGGER.info("outpace mended sampling with speculation of vLLM %s on this CPU (%s)", version, ISSUE)


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


def takes_none(sampler: Any) -> bool:
    """Whether a sampler can do with a step without drafts whose requests have top-k."""
    asked = {"all_greedy": False, "all_random": True, "temperature": torch.ones(1), "top_k": torch.ones(1).int()}
    try:
        metadata = SimpleNamespace(**asked, top_p=None)
        return len(sampler.apply_sampling_constraints(torch.empty(0, 4), torch.zeros(1).int(), metadata)) == 0
    except RuntimeError:
        return False


def _unless_none(constrain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of logits [T, V] that leaves those of no tokens as they are."""

    @wraps(constrain)
    def constrained(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return constrain(logits, *args, **kwargs) if len(logits) else logits

    return constrained


def is_right(sampler: Any) -> bool:
    """Whether a sampler's values arrive where they belong: by its function alone, then by the logits that it makes."""
    counts = torch.tensor([2, 5, 6], dtype=torch.int32)
    owners = torch.tensor([0, 0, 1, 1, 1, 2])
    for scale in (1.0, 2.0, 4.0):  # uninitialised memory may hold the right values of the last time
        for values in (torch.tensor([0.7, 0.0, 1.3]) * scale, torch.tensor([3, 0, 9], dtype=torch.int32) * int(scale)):
            wanted = torch.where(values == 0, torch.full_like(values, 5), values)[owners]
            found = sampler.expand_batch_to_tokens(values.as_subclass(_Poisoned), counts, 6, 0, 5)
            if not torch.equal(found.as_subclass(Tensor), wanted):
                return False
    return _constrains(sampler, counts, owners)


def _constrains(sampler: Any, counts: Tensor, owners: Tensor) -> bool:
    """Whether logits are divided by temperatures and cut to top-k and top-p, request by request."""
    temperatures, top_k = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 4, 1], dtype=torch.int32)
    asked = {"all_greedy": False, "all_random": False, "temperature": temperatures, "top_k": top_k}
    metadata = SimpleNamespace(**asked, top_p=torch.ones(3))
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).expand(6, -1).contiguous()
    wanted = logits / torch.where(temperatures == 0, 1.0, temperatures)[owners, None]
    kept = logits.argsort(dim=-1, descending=True).argsort(dim=-1) < top_k[owners, None]
    found = sampler.apply_sampling_constraints(logits.clone(), counts, metadata)
    return torch.allclose(found, wanted.masked_fill(~kept, -torch.inf))


class _Poisoned(Tensor):
    """Values whose `new_empty` holds numbers that are certainly wrong, so that what is not written shows."""

    def new_empty(self, *size: Any, **options: Any) -> Tensor:
        plain = self.as_subclass(Tensor).new_empty(*size, **options)
        return plain.fill_(-77)
