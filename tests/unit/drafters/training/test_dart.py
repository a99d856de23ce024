"""DART's objective against one anchor at a time, and its drafts against the engine's."""

import copy
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from outpace.drafters.dart.objective import DartNetSettings, DartObjective, DartObjectiveSettings, build_dart
from outpace.drafters.dart.source import DartSource
from outpace.drafters.training import attention
from outpace.drafters.training.batch import Batch, random_anchors
from outpace.drafters.training.objective import Objective
from outpace.lib.errors import ModelError
from outpace.models.frozen import FrozenTarget
from tests.unit.drafters.net.small import causal
from tests.unit.drafters.training import pairs, test_eagle3, tiny
from tests.unit.models.tiny import tiny_config, tiny_target


def objective_of(seed: int = 0, net: dict[str, Any] | None = None, **settings: Any) -> DartObjective:
    sizes, loss = DartNetSettings(**(net or {})), DartObjectiveSettings(**settings)
    return build_dart(sizes, loss, tiny.frozen(), tiny.facts(), seed)


@cache
def trained() -> DartObjective:
    objective = objective_of(net={"draft_vocab_size": 40, "draft_length": 4})
    tiny.train(objective, epochs=15, learning_rate=5e-3)
    return objective


@torch.no_grad()
def slowly(objective: DartObjective, batch: Batch) -> tuple[float, float]:
    """Loss and weight, anchor by anchor in float64."""
    net, depth = copy.deepcopy(objective.net).double(), objective.depth
    ids_of = net.target_ids(torch.arange(net.config.draft_vocab_size)).tolist()
    table = tiny.frozen().embedding.double()
    loss = weight = 0.0
    anchors = random_anchors(batch, objective.settings.anchors)
    for row, anchor in zip(anchors.rows.tolist(), anchors.positions.tolist(), strict=True):
        ids, mask, features = batch.ids[row], batch.mask[row], batch.features[row].double()
        behind = torch.arange(anchor, anchor + depth - 1)
        wanted = torch.arange(anchor - 1, anchor + depth - 1)
        hidden = net(
            table[ids[1 : anchor + 1]], net.fuse(features[:anchor]), torch.arange(anchor), behind, wanted, causal
        )
        log_probs = net.logits(hidden).log_softmax(dim=-1)
        for k in range(1, depth + 1):
            if anchor + k < len(ids) and mask[anchor + k] and int(ids[anchor + k]) in ids_of:
                share = math.exp(-(k - 1) / objective.settings.gamma)
                loss -= share * float(log_probs[k - 1, ids_of.index(int(ids[anchor + k]))])
                weight += share
    return loss, weight


@pytest.mark.parametrize("net", [{}, {"draft_vocab_size": 12, "draft_length": 1}], ids=["plain", "reduced"])
@pytest.mark.parametrize("count", [5, 256])
def test_the_loss_is_that_of_each_anchor_alone(
    net: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against mask rows that see those of other anchors or later pairs, positions or depths off by one."""
    monkeypatch.setattr(attention, "ROWS_AT_ONCE", 20)
    objective = objective_of(3, net, anchors=count, gamma=2.5)
    with torch.no_grad():  # wide weights: at 0.02 attention adds next to nothing
        for weight in objective.net.parameters():
            weight.mul_(8.0) if weight.ndim == 2 else weight.mul_(1 + 0.3 * torch.randn_like(weight))
        objective.net.midlayer.mask_rep.normal_()
    batch = pairs.some(objective.taps)
    found = objective(batch, 0.0)
    assert [found[name].item() for name in ("loss", "weight")] == pytest.approx(slowly(objective, batch), rel=1e-5)
    assert not found["weight"].requires_grad


def test_training_raises_tokens_per_step_and_the_engine_agrees() -> None:
    """Guards against training for another drafter than the engine runs, and simulations that flatter."""
    objective = trained()
    assert pairs.played(objective_of(net={"draft_vocab_size": 40, "draft_length": 4})).tokens_per_step < 1.1
    simulation = pairs.played(objective)
    assert simulation.tokens_per_step > 1.43
    assert len(simulation.accepted) == 5
    pairs.assert_engine_agrees(simulation, pairs.chain_of(DartSource(objective.net, tiny.target()), 5))


@pytest.mark.parametrize("make", [objective_of, test_eagle3.objective_of], ids=["dart", "eagle3"])
def test_an_answer_without_a_prompt_begins_with_its_second_token(make: Callable[[], Objective]) -> None:
    """Guards against the anchor at position 0, before which there is no pair: its row would be the last one's."""
    objective = make()
    pairs.assert_first_tokens_are_no_anchors(objective, pairs.some(objective.taps))


def test_targets_with_scaled_positions_get_drafters_that_a_file_can_say(tmp_path: Path) -> None:
    """Guards against a scaling that DART's layout does not have: it would be trained, written, and then refused."""
    yarn = {"rope_type": "yarn", "rope_theta": 2e4, "factor": 4.0, "original_max_position_embeddings": 64}
    config = tiny_config("llama", vocab_size=tiny.VOCAB, rope_parameters=yarn)
    target = FrozenTarget(tiny_target(config, max_length=32))
    objective = build_dart(DartNetSettings(), DartObjectiveSettings(), target, tiny.facts(), 0)
    pairs.assert_file_says_the_same(objective, tmp_path / "new")


def test_nets_that_do_not_fit_are_refused() -> None:
    """Guards against taps that its layout cannot name, and targets that lack the usual ones."""
    for bad in ({"taps": (0, 1, 2)}, {"draft_length": 0}, {"qk_norm": True}):
        with pytest.raises(ValidationError, match=next(iter(bad))):
            DartNetSettings(**bad)  # type: ignore[arg-type]
    shallow = FrozenTarget(tiny_target(tiny_config("llama", num_hidden_layers=2, vocab_size=tiny.VOCAB), max_length=32))
    with pytest.raises(ModelError, match="taps"):
        build_dart(DartNetSettings(), DartObjectiveSettings(), shallow, tiny.facts(), 0)
