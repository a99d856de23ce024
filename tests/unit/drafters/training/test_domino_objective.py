"""Training of Domino: both losses are those of every block by itself, and the curriculum does what it is for."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from outpace.drafters.domino.objective import (
    DominoNetSettings,
    DominoObjective,
    DominoObjectiveSettings,
    Strategy,
)
from outpace.drafters.training.batch import all_anchors
from outpace.models.frozen import FrozenTarget
from tests.unit.drafters.training import blocks, pairs, tiny
from tests.unit.models.tiny import tiny_config, tiny_target

STRATEGIES: tuple[Strategy, ...] = ("curriculum", "teacher-forcing", "training-time-test")
HEAD = {"emb_dim": 16, "gru_hidden_dim": 32}
ALIGNMENTS = [(True, 0), (True, 1), (False, 0), (False, 1), (False, 2)]


def fresh(seed: int = 0, strategy: Strategy = "curriculum", net: Any = None, **loss: Any) -> DominoObjective:
    settings = DominoObjectiveSettings(strategy=strategy, **loss)
    sizes = DominoNetSettings(**blocks.NET | HEAD | (net or {}))
    return DominoObjective.new(sizes, settings, tiny.frozen(), tiny.facts(), seed)


@cache
def trained(strategy: Strategy) -> DominoObjective:
    objective = fresh(strategy=strategy, anchors=16)
    blocks.learn(objective, 6 if strategy == "training-time-test" else 12)
    return objective


@pytest.mark.parametrize(("is_shifted", "prefix"), ALIGNMENTS)
def test_the_losses_are_those_of_every_block_by_itself(is_shifted: bool, prefix: int) -> None:
    """Guards against outputs or causal states a position off, and a head at work where the base is left alone."""
    net = {"shift_label": is_shifted, "pure_draft_prefix_len": prefix, "layers": 2}
    objective = blocks.wild(fresh(net=net, gamma=3.0, decay_ratio=0.5))
    batch = blocks.short(objective.taps)
    base, final, weight = blocks.reference(objective, batch, all_anchors(batch), gamma=3.0)
    terms = objective(batch, 0.3)  # three fifths of the way
    assert terms["base"].item() == pytest.approx(base, rel=1e-5)
    assert terms["final"].item() == pytest.approx(final, rel=1e-5)
    assert terms["loss"].item() == pytest.approx(0.6 * final + 0.4 * base, rel=1e-5)
    assert terms["weight"].item() == pytest.approx(weight, rel=1e-6)
    assert abs(base - final) > 0.01 * base
    assert objective.depth == 4


@pytest.mark.parametrize("labels", ["tokens", "target-softmax"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_losses_may_compare_some_ids(strategy: Strategy, labels: str) -> None:
    """Guards against rows of W2 that belong to other ids, and own drafts beyond the ids that will be drafted."""
    limits: dict[str, Any] = {"vocabulary": 12, "sampled": 9, "labels": labels, "gamma": 3.0}
    objective = blocks.wild(fresh(strategy=strategy, **limits))
    batch = blocks.short(objective.taps)
    base, final, weight = blocks.reference(objective, batch, all_anchors(batch), gamma=3.0)
    terms = objective(batch, 0.3)
    found = [terms[name].item() for name in ("base", "final", "weight")]
    assert found == pytest.approx([base, final, weight], rel=1e-5)


@pytest.mark.parametrize(("is_shifted", "prefix"), ALIGNMENTS)
def test_the_head_may_read_its_own_drafts(is_shifted: bool, prefix: int) -> None:
    """Guards against an ablation that feeds true tokens, or drafts of the base, and labels that follow the drafts."""
    net = {"shift_label": is_shifted, "pure_draft_prefix_len": prefix}
    objective = blocks.wild(fresh(net=net, strategy="training-time-test", gamma=3.0))
    batch = blocks.short(objective.taps)
    base, final, _ = blocks.reference(objective, batch, all_anchors(batch), gamma=3.0)
    terms = objective(batch, 0.3)
    assert terms["final"].item() == pytest.approx(final, rel=1e-5)
    assert terms["base"].item() == pytest.approx(base, rel=1e-5)
    assert terms["loss"].item() == terms["final"].item()
    forced = blocks.wild(fresh(net=net, strategy="teacher-forcing", gamma=3.0))(batch, 0.3)
    assert forced["final"].item() != pytest.approx(final, rel=1e-4)


def test_how_much_the_base_counts() -> None:
    """Guards against a curriculum that runs backwards, never ends, or also rules the ablations."""
    batch = blocks.held_out(fresh())
    for decay_ratio, progress, share in [(1.0, 0.0, 1.0), (1.0, 0.25, 0.75), (0.5, 0.25, 0.5), (0.5, 0.75, 0.0)]:
        terms = blocks.wild(fresh(decay_ratio=decay_ratio))(batch, progress)
        expected = share * terms["base"] + (1 - share) * terms["final"]
        assert terms["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
        assert terms["base"].item() != pytest.approx(terms["final"].item(), rel=1e-3)
    for strategy in STRATEGIES[1:]:
        terms = blocks.wild(fresh(strategy=strategy))(batch, 0.0)
        assert terms["loss"].item() == terms["final"].item()


def test_a_new_head_learns_at_once() -> None:
    """Guards against weights so small that the head stands still at first, and ones that spoil the base's drafts."""
    objective = fresh(anchors=16)
    terms = objective(blocks.held_out(objective), 0.5)
    assert torch.equal(terms["base"], terms["final"])
    terms["loss"].backward()
    assert objective.net.head.vocabulary_weight.grad is not None
    assert bool(objective.net.head.vocabulary_weight.grad.any())
    objective.zero_grad()
    blocks.learn(objective, 2)
    losses = blocks.held_out_losses(objective)
    assert losses["final"] < losses["base"] - 0.1


def test_parameters_without_work_take_part() -> None:
    """Guards against processes that wait for each other's gradients: of the head alone."""
    objective = fresh()
    batch = blocks.held_out(objective)
    ends = torch.zeros_like(batch.mask)
    for row, length in enumerate(batch.lengths):
        ends[row, length - 2 : length] = True  # one draft each, which is left to the base
    head = [weight for name, weight in objective.net.named_parameters() if name.startswith("head.")]
    for case, progress in ((replace(batch, mask=ends), 0.5), (batch, 0.0)):
        objective.zero_grad()
        terms = objective(case, progress)
        terms["loss"].backward()
        assert terms["loss"].item() > 0
        assert objective.net.fc.weight.grad is not None
        assert bool(objective.net.fc.weight.grad.any())
        assert all(weight.grad is not None and not weight.grad.any() for weight in head)


@pytest.mark.thorough
def test_the_curriculum_keeps_the_base_strong() -> None:
    """Guards against a curriculum that changes nothing: figure 4 of the paper, at the size of a test."""
    direct, anchored = trained("teacher-forcing"), trained("curriculum")
    assert blocks.held_out_losses(anchored)["base"] < blocks.held_out_losses(direct)["base"] - 0.25
    before, after = (pairs.played(one).tokens_per_step for one in (fresh(), anchored))
    assert before < 1.1
    assert after > before + 0.64


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2"])
def test_a_new_head_hears_its_tokens_whatever_their_scale(family: str) -> None:
    """Guards against gates scaled for the raw embedding and fed with Gemma's, times the root of H."""
    target = FrozenTarget(tiny_target(tiny_config(family, vocab_size=tiny.VOCAB), max_length=64))
    sizes = DominoNetSettings(**blocks.NET | HEAD)
    head = DominoObjective.new(sizes, DominoObjectiveSettings(), target, tiny.facts(), 0).net.head
    fed = target.embed(torch.arange(tiny.VOCAB)).float()  # [V, H]
    heard = fed @ head.gate_weights()[0].detach().T  # [V, 3G]
    assert heard.square().mean().sqrt().item() == pytest.approx(1.0, rel=0.15)
    assert (heard.abs() > 4).float().mean() < 0.01


@pytest.mark.thorough
def test_training_on_own_drafts_works_too() -> None:
    """Guards against an ablation that does not learn, which would say nothing about the paper's figure."""
    objective = trained("training-time-test")
    assert pairs.played(objective).tokens_per_step > 1.54


@pytest.mark.costly
@pytest.mark.parametrize(("is_shifted", "prefix"), [(True, 1), (False, 0)])
def test_simulated_rounds_are_the_engines(is_shifted: bool, prefix: int) -> None:
    """Guards against figures of training that drafting does not keep: a tap, a row or a depth apart."""
    objective = trained("curriculum")
    if not is_shifted:
        objective = fresh(net={"shift_label": is_shifted, "pure_draft_prefix_len": prefix}, anchors=16)
        blocks.learn(objective, 3)
        assert pairs.played(objective).tokens_per_step > 1.2
    blocks.assert_engine_agrees(objective)
