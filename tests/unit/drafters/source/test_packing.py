"""Nets laid out for the CPU's kernels compute what they did before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.packing import pack_net
from outpace.engine.engine import Engine
from outpace.kernels.linear import KernelLinear
from outpace.models.layers.linear import PackedLinear, can_pack
from outpace.testing import decode
from tests.unit.drafters.net.small import attention
from tests.unit.drafters.source.learned import KINDS, assert_same_trees, proposer_of, source_of
from tests.unit.drafters.source.test_domino_cost import propose
from tests.unit.models.tiny import drawn, random_ids, tiny_config, tiny_target

ROWS = 5


def see_all(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of all rows over all rows."""
    return attention(query, key, value, torch.ones(len(query), len(key), dtype=torch.bool))


def block_outputs(net: DFlashNet) -> list[Tensor]:
    outputs = [part for layer in net.context(net.fuse(drawn(ROWS, 96, seed=1)), torch.arange(ROWS)) for part in layer]
    return [*outputs, net.block(drawn(ROWS, 48, seed=2), torch.arange(ROWS), see_all)]


def domino_outputs(net: DominoNet) -> list[Tensor]:
    first = net.head.start(drawn(ROWS, 48, seed=3))
    second = net.head.step(first, drawn(ROWS, 48, seed=4))
    hidden = drawn(ROWS, 48, seed=5)
    pool = net.head.vocabulary_weight[3:9]
    return [*block_outputs(net), first, second, net.head.correction(hidden, second),
            net.head.low_rank(hidden, second) @ pool.T]  # fmt: skip


def eagle_outputs(net: Eagle3Net) -> list[Tensor]:
    return [*net(drawn(ROWS, 48, seed=6), net.fuse(drawn(ROWS, 144, seed=7)), torch.arange(ROWS), see_all)]


OUTPUTS: dict[str, Callable[[Any], list[Tensor]]] = {
    "dflash": block_outputs,
    "domino-shifted": domino_outputs,
    "eagle3": eagle_outputs,
    "medusa": lambda net: [net(drawn(ROWS, 48, seed=8))],
}


@pytest.mark.skipif(not can_pack(torch.float32, torch.device("cpu")), reason="this build has no packed kernels")
@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_packed_net_computes_what_it_did(kind: str) -> None:
    """Guards against gates in another order, weights packed under another's name, and nets that are not packed."""
    net = source_of(kind, tiny_target(tiny_config("llama"))).net
    before = OUTPUTS[kind](net)
    pack_net(net)
    assert any(isinstance(module, PackedLinear | KernelLinear) for module in net.modules())
    after = OUTPUTS[kind](net)
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, atol=1e-5, rtol=1e-5)


def test_a_packed_drafter_still_drafts() -> None:
    """Guards against sources that read a weight which packing takes away."""

    target = tiny_target(tiny_config("llama"))
    for kind in KINDS:
        source = source_of(kind, target)
        pack_net(source.net)
        (session,) = decode(Engine(target), [random_ids(9, 1)], [SamplingParams(max_new_tokens=8)],
                            [proposer_of("fixed", source)])  # fmt: skip
        assert session.metrics.drafted


@pytest.mark.parametrize("kind", ["domino", "domino-shifted", "domino-subset"])
@pytest.mark.parametrize("pool", [None, 40])
@pytest.mark.parametrize("shape", ["chain", "beam"])
def test_drafts_of_a_table_of_gates_are_the_same(kind: str, pool: int | None, shape: str) -> None:
    """Guards against rows of the table that belong to other ids, gates in another order."""
    target = tiny_target(tiny_config("llama"))
    read, computed = (source_of(kind, target, pack=True, pool=pool, gate_table=wish) for wish in (True, False))
    assert read._table is not None
    assert computed._table is None
    assert_same_trees(propose(shape, read, 3), propose(shape, computed, 3))
