"""Domino with its table of gates: the same drafts, read instead of computed."""

from typing import Any

import pytest
import torch

from outpace.drafters.domino.gpu.head import gate_table
from outpace.methods.catalog import parse_method
from tests.unit.drafters.source.learned import source_of
from tests.unit.drafters.source.test_domino_cost import propose
from tests.unit.models.tiny import VOCAB, tiny_config, tiny_target


@pytest.mark.parametrize("kind", ["domino", "domino-shifted", "domino-subset"])
@pytest.mark.parametrize("pool", [None, 40])
@pytest.mark.parametrize("shape", ["chain", "beam"])
def test_drafts_are_the_same(kind: str, pool: int | None, shape: str) -> None:
    """Guards against rows of the table that belong to other ids, gates in another order, and a first state that reads
    no anchor. What is compared: tokens and parents equal, scores to float32's rounding."""
    target = tiny_target(tiny_config("llama"))
    read, computed = (source_of(kind, target, pack=True, pool=pool, gate_table=wish) for wish in (True, False))
    assert read._table is not None
    assert computed._table is None
    for one, other in zip(propose(shape, read, 3), propose(shape, computed, 3), strict=True):
        assert one.topology.parents == other.topology.parents
        assert one.tokens.tolist() == other.tokens.tolist()
        if one.scores is not None:
            torch.testing.assert_close(one.scores, other.scores, atol=1e-4, rtol=1e-4)


def test_the_table_holds_every_id() -> None:
    """Guards against ids that are left out where the vocabulary is no multiple of a piece."""
    target = tiny_target(tiny_config("llama"))
    weight = torch.randn(36, 48, generator=torch.Generator().manual_seed(1))
    table = gate_table(weight, target.embedding, VOCAB)
    assert table.shape == (VOCAB, 36)
    torch.testing.assert_close(table[VOCAB - 1], weight @ target.embedding.weight[VOCAB - 1].float())


def test_the_option_is_named_on_and_off() -> None:
    """Guards against a table that nobody asked for: 0.93 GB beside Qwen3-8B."""
    options: list[Any] = [parse_method(text).options for text in ("domino:gate_table=on", "domino:gate_table=off")]
    assert [one.gate_table for one in options] == [True, False]
    assert not parse_method("graft-domino").options.gate_table  # type: ignore[attr-defined]
