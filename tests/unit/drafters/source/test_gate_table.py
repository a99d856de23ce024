"""Domino with its table of gates: the same drafts, read instead of computed."""

import pytest
import torch

from tests.unit.drafters.source.learned import source_of
from tests.unit.drafters.source.test_domino_cost import propose
from tests.unit.models.tiny import tiny_config, tiny_target


@pytest.mark.parametrize("kind", ["domino", "domino-shifted", "domino-subset"])
@pytest.mark.parametrize("pool", [None, 40])
@pytest.mark.parametrize("shape", ["chain", "beam"])
def test_drafts_are_the_same(kind: str, pool: int | None, shape: str) -> None:
    """Guards against rows of the table that belong to other ids, gates in another order."""
    target = tiny_target(tiny_config("llama"))
    read, computed = (source_of(kind, target, pack=True, pool=pool, gate_table=wish) for wish in (True, False))
    assert read._table is not None
    assert computed._table is None
    for one, other in zip(propose(shape, read, 3), propose(shape, computed, 3), strict=True):
        assert one.topology.parents == other.topology.parents
        assert one.tokens.tolist() == other.tokens.tolist()
        if one.scores is not None:
            torch.testing.assert_close(one.scores, other.scores, atol=1e-4, rtol=1e-4)
