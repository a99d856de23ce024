"""The guard of vLLM's sampling on a CPU, on samplers with and without the fault; the real one is in tests/vllm."""

import sys
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.vllm import cpu_sampling
from outpace.vllm.cpu_sampling import expand, guard, is_right, mend, takes_none


def unwritten(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """What vLLM's function does on a CPU: the kernel writes to a copy, and nobody to what is returned."""
    return x.new_empty(num_tokens)


def integers(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """A kernel for whole numbers alone, which makes 0 of a temperature of 0.7."""
    whole = expand(x.as_subclass(Tensor).to(torch.int64), cu_num_tokens, num_tokens, replace_from, replace_to)
    return whole.to(x.dtype)


def sampler(function: Any, is_deaf: bool = False) -> SimpleNamespace:
    """A module as vLLM's. `is_deaf`: whether what it makes of logits goes by that function whatever takes its place."""
    module = SimpleNamespace(expand_batch_to_tokens=function)

    def constrain(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
        spread = function if is_deaf else module.expand_batch_to_tokens
        count = logits.shape[0]
        logits = logits / spread(sampling_metadata.temperature, cu_num_draft_tokens, count, 0, 1)[:, None]
        order = logits.argsort(dim=-1, descending=True).argsort(dim=-1)
        return logits.masked_fill(
            order >= spread(sampling_metadata.top_k, cu_num_draft_tokens, count)[:, None], -torch.inf
        )

    module.apply_sampling_constraints = constrain
    return module


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sampling, "installed_version", lambda: "0.32.0")


def test_a_right_sampler_stays_as_it_is() -> None:
    """Guards against a mend that outlives the fault: vLLM's own function is back as soon as it is right."""

    def theirs(*args: Any) -> Tensor:
        return expand(*args)

    module = sampler(theirs)
    mend(module)
    assert module.expand_batch_to_tokens is theirs


@pytest.mark.parametrize("fault", [unwritten, integers])
def test_a_fault_is_seen_and_mended(fault: Any) -> None:
    """Guards against a probe that is content with whatever memory holds, or with whole numbers."""
    module = sampler(fault)
    assert not is_right(module)
    mend(module)
    assert module.expand_batch_to_tokens is expand
    assert is_right(module)


def test_a_mend_that_does_not_take_is_refused() -> None:
    """Guards against a vLLM that no longer goes by the function that is mended: no engine may speculate there."""
    with pytest.raises(RuntimeError, match=r"on a CPU .* mend does not take; leave out the speculative"):
        mend(sampler(unwritten, is_deaf=True))


def test_values_go_to_all_tokens_of_their_request() -> None:
    """Guards against requests without drafts that shift everybody else's values, and greedy ones divided by zero."""
    found = expand(torch.tensor([0.5, 2.0, 0.0]), torch.tensor([2, 2, 5], dtype=torch.int32), 5, 0, 1)
    assert found.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]


def test_steps_without_drafts_are_mended_where_they_end_the_engine() -> None:
    """Guards against an engine that one request with top-k ends."""
    module = sampler(expand)
    right = module.apply_sampling_constraints

    def faulty(logits: Tensor, counts: Tensor, metadata: Any) -> Tensor:
        metadata.top_k[: 0 if not len(logits) else None].max()
        return Tensor(right(logits, counts, metadata))

    module.apply_sampling_constraints = faulty
    assert not takes_none(module)
    mend(module)
    assert takes_none(module)
    assert is_right(module)
    mend(module)
    assert module.expand_batch_to_tokens is expand


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's modules as the guard finds them, on a CPU."""

    class RejectionSampler:
        def __init__(self) -> None:
            self.is_made = True

    platforms, module = ModuleType("vllm.platforms"), ModuleType("vllm.v1.sample.rejection_sampler")
    vars(platforms)["current_platform"] = SimpleNamespace(is_cpu=lambda: True)
    vars(module)["RejectionSampler"] = RejectionSampler
    parents = {name: ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.sample")}
    vars(parents["vllm.v1.sample"])["rejection_sampler"] = module
    for name, one in (parents | {platforms.__name__: platforms, module.__name__: module}).items():
        monkeypatch.setitem(sys.modules, name, one)
    monkeypatch.setattr(cpu_sampling, "missing_hooks", lambda hooks: [])
    monkeypatch.setattr(cpu_sampling, "is_tested", lambda: True)
    return module


def test_a_sampler_that_others_wrapped_is_looked_at(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against another plugin's wrapper that is taken for ours, after which nobody looks."""
    looked: list[Any] = []
    monkeypatch.setattr(cpu_sampling, "mend", looked.append)
    make = theirs.RejectionSampler.__init__

    @wraps(make)
    def wrapped(*args: Any) -> None:
        make(*args)

    theirs.RejectionSampler.__init__ = wrapped
    guard()
    guard()
    assert theirs.RejectionSampler().is_made
    assert looked == [theirs]


def test_an_untested_vllm_is_left_alone(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against engines that do not start because this package is installed beside them. In a vLLM that was tested
    functions that are missing end the start."""
    make = theirs.RejectionSampler.__init__
    monkeypatch.setattr(cpu_sampling, "missing_hooks", lambda hooks: ["m has no f"])
    with pytest.raises(RuntimeError, match="is unknown: m has no f"):
        guard()
    monkeypatch.setattr(cpu_sampling, "is_tested", lambda: False)
    guard()
    assert theirs.RejectionSampler.__init__ is make
