"""DFlash 2: its convolutions and its selector by their equations, and its public checkpoints."""

import math

import pytest
import torch

from outpace.drafters.dflash.files import export_dflash, read_dflash
from outpace.drafters.dflash2.files import NAMES, export_dflash2, read_dflash2
from outpace.drafters.dflash2.net import DFlash2Layer
from outpace.lib.checkpoint import Checkpoint
from tests.unit.drafters.net.block_nets import SLIDING, draft, requests, small_dflash, small_dflash2
from tests.unit.drafters.net.small import randn, relative_error
from tests.unit.drafters.net.test_dflash_layout import Edit, assert_refused, both, in_memory, put, rename


@pytest.mark.parametrize("taps", [1, 2, 3, 7])
def test_convolutions_are_their_equation(taps: int) -> None:
    """Guards against taps that read later rows or another block's, and corrections of the wrong group or side."""
    net = small_dflash2(conv_kernel_size=taps)
    layer = next(layer for _, layer in net.each_layer())
    assert isinstance(layer, DFlash2Layer)
    convolution, rows, outputs = layer.attention_conv, randn(10, 24), randn(10, 24, seed=2)
    before, corrections = convolution.before(rows)
    after = convolution.after(outputs, corrections)
    projected = rows @ convolution.kernel_projection.weight.T  # [T, 2 * taps * groups]
    for side, (entering, found) in enumerate(((rows, before), (outputs, after))):
        for row in range(10):
            for channel in range(24):
                expected = 0.0
                for offset in range(min(taps, row % 5 + 1)):  # blocks of five rows
                    place = (side * taps + offset) * 6 + channel // 4  # six groups of four channels
                    kernel = convolution.base_kernel[side, offset, channel] + projected[row, place]
                    expected += float(kernel * entering[row - offset, channel])
                assert found[row, channel].item() == pytest.approx(expected)


def test_convolutions_stand_around_both_sublayers() -> None:
    """Guards against convolutions left out or applied twice: with kernels of one they change nothing, else they do."""
    net, plain = small_dflash2(), small_dflash()
    shared = {key: weight for key, weight in net.state_dict().items() if key in plain.state_dict()}
    plain.load_state_dict(shared)
    batch = requests([3, 7], torch.float64)
    expected, convolutions = draft(plain, batch), []
    for _, layer in net.each_layer():
        assert isinstance(layer, DFlash2Layer)
        convolutions += [layer.attention_conv, layer.mlp_conv]
    for convolution in convolutions:
        convolution.kernel_projection.weight.zero_()
        convolution.base_kernel.zero_()
        convolution.base_kernel[:, 0] = 1.0
    assert relative_error(draft(net, batch), expected) < 1e-12
    for convolution in convolutions:
        for side in (0, 1):
            convolution.base_kernel[side, 1] = 0.1
            assert relative_error(draft(net, batch), expected) > 1e-3
            convolution.base_kernel[side, 1] = 0.0


def test_the_selector_scores_pairs_of_the_best() -> None:
    """Guards against scores of ids outside the best, and gates by another row or token."""
    net, hidden, base = small_dflash2(), randn(3, 24), randn(3, 61, seed=4)
    weights, tokens = net.state_dict(), torch.tensor([5, 0, 60])
    found = net.head.scores(base, net.head.predecessors[tokens], hidden)
    for row, token in enumerate(tokens.tolist()):
        best = base[row].argsort(descending=True)[:9].tolist()
        gate = weights["head.hidden_projection.weight"] @ hidden[row]
        for word in range(61):
            pair = (weights["head.predecessors"][token] * gate) @ weights["head.successors"][word]
            expected = float(base[row, word] + pair) if word in best else -torch.inf
            assert found[row, word].item() == pytest.approx(expected)


def test_logits_are_scaled_and_capped() -> None:
    """Guards against a target's scale and cap that a drafter states and nobody applies, or in the other order."""
    net = small_dflash2(output_multiplier=0.196, final_logit_softcapping=20.0)
    found = net.config.base_logits(torch.tensor([300.0, -2.0]))
    assert found.tolist() == pytest.approx([20 * math.tanh(one * 0.196 / 20) for one in (300.0, -2.0)])


SPOILT: dict[str, tuple[Edit, list[str]]] = {
    "group": (put("dflash_config", "conv_group_size", value=5), ["hidden_size=24", "conv_group_size=5"]),
    "no rank": (put("dflash_config", "selector_rank", value=None), ["selector_rank is missing"]),
    "ids": (put("dflash_config", "selector_top_k", value=62), ["selector_top_k=62", "vocab_size=61"]),
    "taps": (put("dflash_config", "conv_kernel_size", value=3), ["base_kernel has shape [2, 2, 24]"]),
    "causal": (put("is_causal", value=True), ["is_causal=true", "never causal"]),
    "contradiction": (both(put("is_causal", value=True), put("dflash_config", "causal", value=False)), ["disagree"]),
    "unknown": (put("dflash_config", "input_embedding_scale", value=2.0), ["input_embedding_scale", "unknown"]),
    "name": (rename(next(iter(NAMES)), "selector.codebook"), ["missing head.predecessors", "selector.codebook"]),
}


@pytest.mark.parametrize(("edit", "named"), SPOILT.values(), ids=SPOILT.keys())
def test_what_does_not_fit_is_named(edit: Edit, named: list[str]) -> None:
    """Guards against a selector or kernels read with guessed conventions."""
    assert_refused(read_dflash2, in_memory(*export_dflash2(small_dflash2(torch.float32)), edit), named)


def test_blocks_read_both_ways_are_known_by_either_field() -> None:
    """Guards against z-lab's `is_causal`, which was ignored: sliding layers were then read as causal."""
    config, tensors = export_dflash(small_dflash(torch.float32, **SLIDING, sliding_causal=False))
    for place, name in ((config, "is_causal"), (config["dflash_config"], "causal")):
        stated = place.pop(name)
        assert stated is False
        assert not read_dflash(Checkpoint("drafter", config, tensors)).config.sliding_causal
        place[name] = stated
    del config["is_causal"], config["dflash_config"]["causal"]
    assert read_dflash(Checkpoint("drafter", config, tensors)).config.sliding_causal
