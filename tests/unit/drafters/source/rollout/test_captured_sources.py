"""Drafters whose passes run over static buffers, through the switch that turns them on where there is no GPU."""

from typing import Any
from unittest.mock import Mock

import pytest

from outpace.core.params import SamplingParams
from outpace.engine.engine import Engine
from outpace.gpu.capture import VARIABLE
from outpace.models.target import PackedTarget
from outpace.testing import assert_lossless
from tests.lossless.led import LedSource
from tests.unit.drafters.source.learned import assert_same_trees, proposer_of, source_of
from tests.unit.drafters.source.test_domino_cost import propose
from tests.unit.gpu.worlds import DEVICE, target_of
from tests.unit.models.tiny import random_ids

CASES = [
    ("eagle3", "beam"), ("dflash-sliding", "cut"), ("domino-shifted", "chain"), ("eagle3-subset", "gated"),
    ("dflash2", "beam"),
]  # fmt: skip


def source_as_on_a_gpu(kind: str, target: PackedTarget) -> Any:
    """Without what only CPUs have."""
    source = source_of(kind, target)
    source._compiled, source.slots.tiled = None, True
    if kind.startswith("domino"):
        source._kernel = None
    return source


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_trees_are_those_without_buffers(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against levels and blocks that see padding, another request's rows or those of the round before."""
    found: dict[str, list[Any]] = {}
    for wish in ("off", "on"):
        monkeypatch.setenv(VARIABLE, wish)
        source = source_as_on_a_gpu(kind, target_of("llama", pack=False))
        assert source.slots.captures == (wish == "on")
        graphs = source._pass._captured._graphs
        graphs._function = Mock(wraps=graphs._function)
        found[wish] = [tree for count in (3, 1, 2) for tree in propose(shape, source, count, str(DEVICE))]
        assert graphs._function.called == (wish == "on")
    assert_same_trees(found["on"], found["off"])


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "shape"), CASES[:4:2])
def test_lossless(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a token lost where every pass of the target and of a drafter runs over static buffers."""
    monkeypatch.setenv(VARIABLE, "on")
    prompts = [random_ids(length, length) for length in (5, 9)]
    params = [SamplingParams(max_new_tokens=6, temperature=0.7 * seed, seed=seed) for seed in range(2)]
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}  # fewer programs for the interpreter
    target = target_of("llama", pack=False, **heads)
    assert target.captures
    sessions = assert_lossless(
        lambda: Engine(target_of("llama", pack=False, **heads), prefill_chunk=16),
        lambda known: proposer_of(shape, LedSource(source_as_on_a_gpu(kind, target), known), str(DEVICE)),
        prompts,
        params,
    )
    assert sum(session.metrics.accepted for session in sessions) > 0
