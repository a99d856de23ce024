"""Domino's chain for vLLM against the head's own equations, one request and one depth at a time."""

import pytest
import torch
from torch import Tensor

from outpace.drafters.domino.net import DominoNet
from outpace.vllm.corrections import corrected_chain
from tests.unit.drafters.net.block_nets import small_domino
from tests.unit.drafters.net.small import randn

COUNT, DRAFTS, VOCAB, WIDTH = 3, 4, 61, 24


def chain(net: DominoNet, base: Tensor, hidden: Tensor, anchor: int, table: Tensor, ids: Tensor) -> list[Tensor]:
    """Logits [V] of each depth of one request, by torch's own GRU over all tokens so far."""
    tokens, logits = [anchor], []
    for depth in range(1, DRAFTS + 1):
        scores = base[depth - 1].clone()
        if net.config.corrects(depth):
            _, state = net.head.get_submodule("prefix_gru")(table[tokens][None])
            scores += net.head.correction(hidden[None, depth - 1], state[0])[0, ids]
        logits.append(scores)
        tokens.append(int(ids[scores.argmax()]))
    return logits


@pytest.mark.parametrize("is_shifted", [True, False])
@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("is_ranked", [True, False])
def test_every_depth_is_the_papers(is_shifted: bool, prefix: int, is_ranked: bool) -> None:
    """Guards against a correction one depth early or late, a state that reads other tokens than the drafts, rows of
    one request in another's, and ids of a ranked vocabulary taken for the target's."""
    net = small_domino(shift_label=is_shifted, pure_draft_prefix_len=prefix)
    ids = torch.arange(1, VOCAB, 2) if is_ranked else torch.arange(VOCAB)
    base, hidden = randn(COUNT, DRAFTS, len(ids), seed=3), randn(COUNT, DRAFTS, WIDTH, seed=4)
    table, anchors = randn(VOCAB, WIDTH, seed=5), torch.tensor([7, 0, 33])
    wanted = [chain(net, base[row], hidden[row], int(anchors[row]), table, ids) for row in range(COUNT)]
    if is_ranked:
        rows = net.head.vocabulary_weight[ids]
        narrow = torch.nn.Linear(rows.shape[1], len(ids), bias=False, dtype=rows.dtype)
        narrow.weight.data.copy_(rows)
        net.head.embed_proj[2] = narrow
    found = corrected_chain(
        net.head, base.clone(), hidden, anchors, lambda some: table[some], ids if is_ranked else None
    )
    assert torch.allclose(found, torch.stack([torch.stack(rows) for rows in wanted]), atol=1e-10)
    assert not torch.allclose(found, base, atol=0.1)
