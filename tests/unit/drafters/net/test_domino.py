"""Domino's causal head: the equations, both alignments, branches, pools, and teacher forcing against steps."""

import itertools

import pytest
import torch
from torch import Tensor

from outpace.drafters.domino.net import DominoNet
from tests.unit.drafters.net import block_reference as reference
from tests.unit.drafters.net.block_nets import small_domino
from tests.unit.drafters.net.small import randn, relative_error

BLOCK, VOCAB, WIDTH = 5, 61, 24
each_alignment = pytest.mark.parametrize("shift_label", [True, False], ids=["shifted", "in place"])
each_prefix = pytest.mark.parametrize("prefix", [0, 1, 2])


def blocks(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [N, B, H], base logits [N, B, V] and the embeddings [N, B, H] of the blocks' true tokens."""
    hidden, base = randn(count, BLOCK, WIDTH, seed=1, dtype=dtype), randn(count, BLOCK, VOCAB, seed=2, dtype=dtype)
    return hidden, base, randn(count, BLOCK, WIDTH, seed=3, dtype=dtype)


def stepped(net: DominoNet, hidden: Tensor, base: Tensor, embeddings: Tensor) -> dict[int, Tensor]:
    """Final logits [N, V] by depth, as drafting makes them: one token at a time."""
    logits, state = {}, net.head.start(embeddings[:, 0])
    for depth in range(1, BLOCK + net.config.shift_label):
        position = net.config.draft_position(depth)
        logits[depth] = base[:, position]
        if net.config.corrects(depth):
            logits[depth] = logits[depth] + net.head.correction(hidden[:, position], state)
        if depth < embeddings.shape[1]:
            state = net.head.step(state, embeddings[:, depth])
    return logits


@each_alignment
@each_prefix
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_steps_follow_the_papers_equations(
    shift_label: bool, prefix: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Guards against swapped gates, [S; H] for [H; S], a state that includes the token being predicted."""
    net = small_domino(dtype, shift_label=shift_label, pure_draft_prefix_len=prefix)
    weights, (hidden, base, embeddings) = net.state_dict(), blocks(2, dtype)
    logits = stepped(net, hidden, base, embeddings)
    assert logits.keys() == set(range(1, 6 if shift_label else 5))
    for depth, row in itertools.product(logits, range(2)):
        position = depth - 1 if shift_label else depth
        want = base[row, position].double()
        if depth > prefix:
            state = reference.gru(weights, list(embeddings[row, :depth]), 10)
            want = want + reference.correction(weights, hidden[row, position], state)
        assert relative_error(logits[depth][row], want) < tolerance
