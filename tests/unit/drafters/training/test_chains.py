"""Attention of chains against one dense attention, and what it keeps in memory."""

import pytest
import torch
from torch import Tensor

from outpace.drafters.training import attention
from outpace.drafters.training.attention import ChainAttention
from tests.unit.drafters.net.small import attention as attend_dense

SEQUENCES = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
BEFORE = torch.tensor([0, 5, 3, 2, 9, 4, 2, 1])


def drawn(*shape: int, seed: int) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.requires_grad_(True)


def tensors(wide: int, own: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Earlier keys and values of three sequences; queries, keys and values of the chains."""
    earlier, later = (drawn(3, 9, 2, 8, seed=seed) for seed in (0, 1))
    key, value = (drawn(8, own, 2, 8, seed=seed) for seed in (2, 3))
    return earlier, later, drawn(8, wide, 4, 8, seed=4), key, value


def dense(earlier_key: Tensor, earlier_value: Tensor, query: Tensor, key: Tensor, value: Tensor, see: Tensor) -> Tensor:
    """One chain at a time, over exactly what it sees."""
    outs = []
    for chain, (sequence, before) in enumerate(zip(SEQUENCES.tolist(), BEFORE.tolist(), strict=True)):
        keys = torch.cat((earlier_key[sequence, :before], key[chain]))
        values = torch.cat((earlier_value[sequence, :before], value[chain]))
        visible = torch.cat((torch.ones(len(see), before, dtype=torch.bool), see), dim=1)
        outs.append(attend_dense(query[chain], keys, values, visible))
    return torch.stack(outs)


@pytest.mark.parametrize("at_once", [1, 6, 1024])
@pytest.mark.parametrize(("wide", "own"), [(1, 1), (1, 3), (3, 3)])
def test_blocks_of_chains_attend_as_each_chain_alone(
    wide: int, own: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against chains that see one another's rows or later pairs, and against blocks across sequences."""
    monkeypatch.setattr(attention, "ROWS_AT_ONCE", at_once)
    visible = torch.ones(wide, own, dtype=torch.bool).tril(own - wide)
    given = earlier_key, earlier_value, query, key, value = tensors(wide, own)
    found = ChainAttention(earlier_key, earlier_value, SEQUENCES, BEFORE)(query, key, value, visible)
    wanted = dense(*given, visible)
    torch.testing.assert_close(found, wanted)
    weights = drawn(*found.shape, seed=9).detach()
    ours, exact = (torch.autograd.grad((one * weights).sum(), given) for one in (found, wanted))
    torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("scores", [1, 400, 2**27])
@pytest.mark.parametrize("window", [None, 3])
def test_padded_sequences_attend_as_each_chain_alone(
    window: int | None, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against padding that is seen or returned where a GPU takes whole sequences."""
    monkeypatch.setattr(attention, "SCORES_ON_GPU", scores)
    visible = torch.ones(3, 3, dtype=torch.bool).tril()
    given = earlier_key, earlier_value, query, key, value = tensors(3, 3)
    chains = ChainAttention(earlier_key, earlier_value, SEQUENCES, BEFORE)
    found = chains._by_sequences((query, key, value, BEFORE), visible, window)
    wanted = chains(query, key, value, visible, window)
    torch.testing.assert_close(found, wanted)
    weights = drawn(*found.shape, seed=9).detach()
    ours, exact = (torch.autograd.grad((one * weights).sum(), given) for one in (found, wanted))
    torch.testing.assert_close(ours, exact)


def test_nothing_of_rows_times_keys_is_kept_for_the_backward_pass() -> None:
    """Guards against masks or scores of [T, T] per step and head, which run out of memory at full length."""
    length, kept = 600, []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    earlier = drawn(1, length, 1, 8, seed=0)
    query, key = (drawn(length, 1, 1, 8, seed=seed) for seed in (1, 2))
    before, sequences = torch.arange(length), torch.zeros(length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention = ChainAttention(earlier, earlier, sequences, before)
        attention(query, key, key, torch.ones(1, 1, dtype=torch.bool))
    assert kept
    assert max(kept) <= length * 8


def test_anchors_out_of_order_are_refused() -> None:
    """Guards against anchors that are given in an order in which blocks would mix sequences up."""
    key, value = tensors(1, 1)[:2]
    with pytest.raises(AssertionError, match="are together"):
        ChainAttention(key, value, torch.tensor([1, 0]), torch.tensor([1, 1]))
