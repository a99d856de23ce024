"""What replaces vLLM's sampling on a CPU, and where; answers of the real one are in tests/vllm."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.vllm.cpu_sampling import expand, mend, unless_none


def test_values_go_to_all_tokens_of_their_request() -> None:
    """Guards against requests without drafts that shift everybody else's values, greedy ones divided by zero, and
    whole numbers in the place of temperatures."""
    found = expand(torch.tensor([0.5, 2.0, 0.0]), torch.tensor([2, 2, 5], dtype=torch.int32), 5, 0, 1)
    assert found.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    top_k = expand(torch.tensor([3, 9], dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32), 3)
    assert (top_k.dtype, top_k.tolist()) == (torch.int32, [3, 9, 9])


def test_steps_without_drafts_pass() -> None:
    """Guards against an engine that one request with top-k ends."""

    def constrain(logits: Tensor, scale: float) -> Tensor:
        return logits / logits.max() * scale

    safe = unless_none(constrain)
    assert safe(torch.empty(0, 4), 2.0).shape == (0, 4)
    assert safe(torch.tensor([[1.0, 4.0]]), 2.0).tolist() == [[0.5, 2.0]]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module of sampling as the plugin finds it, on a CPU."""
    platforms, module = ModuleType("vllm.platforms"), ModuleType("vllm.v1.sample.rejection_sampler")
    vars(platforms)["current_platform"] = SimpleNamespace(is_cpu=lambda: True)
    vars(module).update(expand_batch_to_tokens=lambda x: x, apply_sampling_constraints=lambda logits: logits)
    parents = {name: ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.sample")}
    vars(parents["vllm.v1.sample"])["rejection_sampler"] = module
    for name, one in (parents | {platforms.__name__: platforms, module.__name__: module}).items():
        monkeypatch.setitem(sys.modules, name, one)
    return module


def test_both_functions_are_replaced_once(theirs: Any) -> None:
    """Guards against a wrapper around a wrapper with each process of vLLM's that loads plugins again."""
    constrain = theirs.apply_sampling_constraints
    mend()
    mend()
    assert theirs.expand_batch_to_tokens is expand
    assert theirs.apply_sampling_constraints.__wrapped__ is constrain
