"""Tapped hidden states: the right layers, the right rows, and nothing left behind."""

import pytest
import torch

from outpace.core.protocols import Chunk
from outpace.core.tree import DraftTree, Topology
from outpace.lib.errors import InvalidRequest
from outpace.models.packed import layers_of
from tests.unit.models.tiny import FAMILIES, open_with, path_tokens, random_ids, stock_model, tiny_config, tiny_target

PROMPT = random_ids(20, 3)
TREE = DraftTree(torch.tensor(random_ids(6, 4)), Topology.of((-1, 0, 0, 1, 2, 2)))


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_features_are_the_hidden_states_of_stock_transformers(family: str) -> None:
    """Guards against taps off by one layer, features of another row or request, and a final norm that slips in, or
    is missing from the state that the LM head reads; or one before it that is not what the norm reads."""
    config = tiny_config(family)
    stock, target = stock_model(config), tiny_target(config)
    before_norm: list[torch.Tensor] = []
    layers_of(stock.base_model)[1][-1].register_forward_hook(lambda *args: before_norm.append(args[2][0]))
    other, _ = open_with(target, random_ids(7, 5), slot=1)
    slot, _ = open_with(target, PROMPT)
    trees = [DraftTree.chain(torch.tensor(random_ids(3, 6))), TREE]
    bare, found = target.run_pass((), [other, slot], trees, [(), (2, 0, 3, 4)])[1]
    assert bare.features is None
    assert found.features is not None
    for node in range(len(TREE)):
        ids = torch.tensor([PROMPT + path_tokens(TREE, node)])
        states = stock(ids, output_hidden_states=True).hidden_states
        last = before_norm.pop().view(len(ids[0]), -1)  # of a layer that returns a tuple, or its rows
        expected = torch.cat([*(states[tap][0, -1] for tap in (2, 0, 3)), last[-1]])
        torch.testing.assert_close(found.features[node], expected, atol=1e-4, rtol=1e-4)
    chunks = [Chunk(slot, TREE.tokens[:2], False, False, (1, 3)), Chunk(other, TREE.tokens[2:5], False, False)]
    first, second = target.run_pass(chunks, (), ())[0]
    assert second.features is None
    assert first.features is not None
    states = stock(torch.tensor([PROMPT + TREE.tokens[:2].tolist()]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[1][0, -2:], states[3][0, -2:]], dim=-1)
    torch.testing.assert_close(first.features, expected, atol=1e-4, rtol=1e-4)


def test_a_layer_that_does_not_exist_is_refused_and_hooks_go() -> None:
    """Guards against features of the wrong layer in silence, and against hooks that slow every later pass."""
    target = tiny_target(tiny_config("llama"))
    slot, _ = open_with(target, PROMPT)
    for tap in (5, -1):
        with pytest.raises(InvalidRequest, match=f"tap {tap}: the target has hidden states 0 to 4"):
            target.run_pass((), [slot], [TREE], [(tap,)])
    target.run_pass((), [slot], [TREE], [(1, 3, 4)])
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in target.decoder.modules())
