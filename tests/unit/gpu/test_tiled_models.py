"""Whole models and drafters whose attention is one call per layer, against the CPU's own paths."""

import random
from unittest.mock import Mock

import pytest
import torch

from outpace.cache.slots import Rows
from outpace.drafters.net_slots import NetSlots, Sight
from outpace.gpu import tree_attention
from tests.unit.gpu.worlds import DEVICE, random_parents, target_of
from tests.unit.models.tiny import open_with, random_ids, random_tree


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt2"])  # some are capped, or have windows
@torch.inference_mode()
def test_a_batch_of_trees_has_the_logits_of_the_cpu_path(family: str) -> None:
    """Guards against layers whose window, cap or scale does not reach the kernel, and rows filed in the wrong slot."""
    logits = []
    for tiled in (True, False):
        heads = 3 if family == "gpt2" else 6  # which share no keys there: each is a program
        target = target_of(family, tiled, num_hidden_layers=2, num_attention_heads=heads)
        slots = [open_with(target, random_ids(length, length), slot=slot)[0] for slot, length in enumerate((30, 5, 41))]
        trees = [random_tree(random_parents(count, random.Random(count)), 1) for count in (1, 9, 20)]
        before = target.run_pass((), slots, trees)[1]
        target.commit(slots, [tree.topology.path(len(tree) - 1) for tree in trees])
        logits.append([each.logits for each in (*before, *target.run_pass((), slots, trees)[1])])
    for actual, expected in zip(*logits, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


@torch.inference_mode()
def test_one_call_per_layer_whatever_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a call per request and layer: 1,152 a round for 32 requests of 36 layers."""
    target, compute = target_of("llama"), Mock(wraps=tree_attention._by_kernel)
    monkeypatch.setattr(tree_attention, "_by_kernel", compute)
    slots = [open_with(target, random_ids(4, slot), slot=slot)[0] for slot in range(4)]
    compute.reset_mock()
    target.run_pass((), slots, [random_tree([-1, 0, 0], slot) for slot in slots])
    assert compute.call_count == target.config.num_hidden_layers


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_net_attends_to_its_slots_in_one_call(is_causal: bool) -> None:
    """Guards against blocks that do not see themselves whole, or see ahead where they must not, and against rows of two
    requests that are filed under one."""
    generator = torch.Generator().manual_seed(1)
    outputs = []
    fresh = torch.randn(3, 8, 4, 16, generator=generator).to(DEVICE)
    known = torch.randn(2, 7, 2, 16, generator=generator).to(DEVICE)
    for tiled in (True, False):
        slots = NetSlots(1, 3, 2, capacity=64, head_dim=16, dtype=torch.float32, device=DEVICE)
        slots.tiled = tiled
        slots.append(2, [(known[0], known[1])])
        parts = [Rows(2, torch.arange(5)), Rows(0, torch.arange(3))]
        attend = slots.attention(parts, [Sight(window=6, is_causal=is_causal)])
        outputs.append(attend(0, fresh[0], fresh[1, :, :2], fresh[2, :, :2]))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
