"""Training of DSpark and DFlash 2: the losses are those of every block by itself, and what is learned is what the
engine accepts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outpace.drafters.dflash.objective import DFlashObjectiveSettings
from outpace.drafters.dflash2.objective import DFlash2NetSettings, DFlash2Objective
from outpace.drafters.dflash2.source import DFlash2Source
from outpace.drafters.dspark.objective import DSparkNetSettings, DSparkObjective, DSparkObjectiveSettings
from outpace.drafters.dspark.source import DSparkSource
from outpace.drafters.training.batch import Batch, all_anchors
from tests.unit.drafters.net.block_nets import Request, draft
from tests.unit.drafters.training import blocks, pairs, tiny

GAMMA = 3.0
POOL = {"vocabulary": 20, "sampled": 9}
SELECTED = {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}


def dspark(seed: int = 0, **loss: Any) -> DSparkObjective:
    sizes = DSparkNetSettings(**blocks.NET | {"markov_rank": 8})
    return DSparkObjective.new(sizes, DSparkObjectiveSettings(**loss), tiny.frozen(), tiny.facts(), seed)


def dflash2(seed: int = 0, **loss: Any) -> DFlash2Objective:
    sizes = DFlash2NetSettings(**blocks.NET | SELECTED)
    return DFlash2Objective.new(sizes, DFlashObjectiveSettings(**loss), tiny.frozen(), tiny.facts(), seed)


BUILD: dict[str, Any] = {"dspark": dspark, "dflash2": dflash2}
SOURCES: dict[str, Any] = {"dspark": DSparkSource, "dflash2": DFlash2Source}


@cache
def trained(kind: str) -> DSparkObjective | DFlash2Objective:
    objective: DSparkObjective | DFlash2Objective = BUILD[kind](anchors=16)
    blocks.learn(objective, 8)
    return objective


@dataclass
class Position:
    """A supervised position: its output [H], the tokens before and there, the target's logits [V], and its weight."""

    hidden: Tensor
    before: int
    right: int
    logits: Tensor
    weight: float


def positions(objective: DSparkObjective | DFlash2Objective, batch: Batch) -> Iterator[Position]:
    """Of all blocks, each computed alone."""
    config, embedding, head = objective.net.config, tiny.frozen().embedding.double(), tiny.frozen().head.double()
    anchors, width = all_anchors(batch), objective.net.fc.in_features
    for row, anchor in zip(anchors.rows.tolist(), anchors.positions.tolist(), strict=True):
        ids, features = batch.ids[row, : batch.lengths[row]].tolist(), batch.features[row].double()
        block = embedding[[ids[anchor]] + [config.mask_token_id] * (config.block_size - 1)]
        (outputs,) = draft(objective.net, [Request(features[:anchor, :width], block)])
        is_shifted = isinstance(objective, DSparkObjective)
        for depth in range(1, config.block_size + is_shifted):
            if anchor + depth < len(ids):
                hidden = outputs[depth - 1 if is_shifted else depth].detach()
                logits = head @ features[anchor + depth - 1, -tiny.frozen().hidden_size :]
                weight = math.exp(-(depth - 1) / GAMMA)
                yield Position(hidden, ids[anchor + depth - 1], ids[anchor + depth], logits, weight)


def compared(objective: DSparkObjective | DFlash2Objective, batch: Batch) -> tuple[list[int], Tensor, list[int]]:
    """The ids that the loss compares, what is added to their logits, and those that are drafted."""
    drawn, ranked = objective.vocabulary.draw(batch.step_seed), objective.vocabulary.ranked
    ids = list(range(tiny.VOCAB)) if drawn.ids is None else drawn.ids.tolist()
    shift = torch.zeros(len(ids)) if drawn.shift is None else drawn.shift
    return ids, shift, list(range(tiny.VOCAB)) if ranked is None else ranked.tolist()


def before_row(weights: dict[str, Tensor], ranked: list[int], token: int) -> Tensor:
    """W1's or A's row of the token before; zero for one that is not drafted."""
    rows = weights["head.predecessors"]
    return rows[ranked.index(token)] if token in ranked else torch.zeros_like(rows[0])


@pytest.mark.parametrize("limits", [{}, POOL], ids=["all", "pool"])
def test_dsparks_losses(limits: dict[str, int]) -> None:
    """Guards against a distance to the wrong position's distribution, and rows of W1 and W2 of other tokens."""
    objective = blocks.wild(dspark(gamma=GAMMA, **limits))
    assert isinstance(objective, DSparkObjective)
    batch, weights = blocks.short(objective.taps), objective.net.state_dict()
    ids, shift, ranked = compared(objective, batch)
    sums, total = torch.zeros(3, dtype=torch.float64), 0.0
    for one in positions(objective, batch):
        if one.right not in ranked:
            continue
        row = before_row(weights, ranked, one.before)
        scores = (tiny.frozen().head.double() @ one.hidden)[ids] + shift
        scores[: len(ranked)] += weights["head.successors"] @ row
        drafted = scores.softmax(dim=0)
        distance = (drafted - (one.logits[ids] + shift).softmax(dim=0)).abs().sum()
        inputs = torch.cat((one.hidden, row))
        confidence = torch.sigmoid(weights["head.confidence_weight"][0] @ inputs + weights["head.confidence_bias"][0])
        accepted = 1 - distance / 2
        doubt = -(accepted * confidence.log() + (1 - accepted) * (1 - confidence).log())
        sums += one.weight * torch.stack([-drafted[ids.index(one.right)].log(), distance, doubt])
        total += one.weight
    terms = objective(batch, 0.3)
    found = [terms[name].item() for name in ("ce", "distance", "confidence", "weight")]
    assert found == pytest.approx([*sums.tolist(), total], rel=1e-4)
    assert terms["loss"].item() == pytest.approx(0.1 * found[0] + 0.9 * found[1] + found[2], rel=1e-5)


@pytest.mark.parametrize("labels", ["tokens", "target-softmax"])
@pytest.mark.parametrize("limits", [{}, POOL], ids=["all", "pool"])
def test_dflash2s_losses(limits: dict[str, int], labels: str) -> None:
    """Guards against a selector that learns from ids that are not drafted, or where the true one is not a candidate."""
    objective = blocks.wild(dflash2(gamma=GAMMA, labels=labels, **limits))
    assert isinstance(objective, DFlash2Objective)
    # Wide random weights would leave no true token among the candidates.
    objective.net.norm.weight.data *= 0.05
    taps = (*objective.net.config.taps, tiny.frozen().layers)
    batch, weights = blocks.short(taps), objective.net.state_dict()
    ids, shift, ranked = compared(objective, batch)
    base = selector = total = 0.0
    found = 0
    for one in positions(objective, batch):
        if one.right not in ranked:
            continue
        scores = tiny.frozen().head.double() @ one.hidden
        wanted = torch.eye(tiny.VOCAB, dtype=torch.float64)[one.right][ids]
        if labels == "target-softmax":
            wanted = (one.logits[ids] + shift).softmax(dim=0)
        base -= one.weight * float(wanted @ (scores[ids] + shift).log_softmax(dim=0))
        total += one.weight
        best = torch.tensor(ranked)[scores[ranked].argsort(descending=True)[:6]].tolist()
        gate = before_row(weights, ranked, one.before) * (weights["head.hidden_projection.weight"] @ one.hidden)
        if one.right in best:
            moved = scores[best] + weights["head.successors"][[ranked.index(one) for one in best]] @ gate
            selector -= one.weight * float(moved.log_softmax(dim=0)[best.index(one.right)])
            found += 1
    assert 3 < found < len(all_anchors(batch)) * 4 - 3
    terms = objective(batch, 0.3)
    told = [terms[name].item() for name in ("base", "selector", "weight")]
    assert told == pytest.approx([base, selector, total], rel=1e-4)
    assert terms["loss"].item() == pytest.approx(base + selector, rel=1e-4)


@pytest.mark.parametrize("kind", BUILD)
def test_a_new_head_begins_with_the_backbone(kind: str) -> None:
    """Guards against heads and convolutions that spoil the backbone's drafts at first, or stand still."""
    objective = BUILD[kind](anchors=16)
    net, batch = objective.net, blocks.held_out(objective)
    logits, hidden = torch.randn(3, tiny.VOCAB), torch.randn(3, 48)
    scores = net.head.scores(logits, net.head.predecessors[:3], hidden)
    assert torch.equal(scores[scores.isfinite()], logits[scores.isfinite()])
    objective(batch, 0.0)["loss"].backward()
    assert bool(net.head.successors.grad.any())


@pytest.mark.costly
@pytest.mark.parametrize("kind", BUILD)
def test_simulated_rounds_are_the_engines(kind: str) -> None:
    """Guards against figures of training that drafting does not keep: a tap, a row, a token or a depth apart."""
    objective = trained(kind)
    before, after = (pairs.played(one).tokens_per_step for one in (BUILD[kind](), objective))
    assert after > before + 0.3
    assert objective.depth == (5 if kind == "dspark" else 4)
    blocks.assert_engine_agrees(objective, SOURCES[kind])


@pytest.mark.costly
def test_confidence_is_the_share_that_is_accepted() -> None:
    """Guards against a confidence that says nothing about acceptance: high where drafts are right, low elsewhere."""
    objective = trained("dspark")
    assert isinstance(objective, DSparkObjective)
    batch = blocks.held_out(objective)
    anchors = all_anchors(batch)
    with torch.no_grad():
        hidden, before = objective._drafting(batch, anchors, 1), anchors.tokens_before(batch, 1)
        logits = objective.net.head.confidence(objective._before(before[:, 0]), hidden[:, 0])
        right = objective.hits(batch, anchors)[:, 0]
    assert logits is not None
    confidence = logits.sigmoid()
    assert confidence[right].mean() > confidence[~right].mean() + 0.02
    assert 0 < confidence.min() < confidence.max() < 1


@pytest.mark.parametrize("kind", BUILD)
def test_tables_have_rows_of_drafted_ids_alone(kind: str) -> None:
    """Guards against an optimizer that updates all of 151,936 rows each step, rows written for other ids, and drafts
    in training that are not those of the written drafter."""
    objective: Any = blocks.wild(BUILD[kind](**POOL))
    net, ranked, batch = objective.net, objective.vocabulary.ranked, blocks.held_out(objective)
    assert [len(net.get_parameter(name)) for name in objective.by_id] == [20, 20]
    batch = replace(batch, features=batch.features.double())
    whole = objective.whole(net.state_dict())
    assert {len(whole[name]) for name in objective.by_id} == {tiny.VOCAB}
    for name, rows in objective.narrowed(whole).items():
        assert torch.equal(rows, net.state_dict()[name])
    anchors = all_anchors(batch)
    hidden, tokens = objective._drafting(batch, anchors, 1), anchors.tokens_before(batch, 1)
    base, head = objective.scores(hidden[:, 0]).double(), net.head
    hits = objective.hits(batch, anchors)[:, 0]
    for name in objective.by_id:
        setattr(head, name.removeprefix("head."), nn.Parameter(whole[name]))
    best = head.scores(base, head.predecessors[tokens[:, 0]], hidden[:, 0]).argmax(dim=1)
    assert set(best.tolist()) <= set(ranked.tolist())
    ids, own = anchors.followed(batch, 1)
    assert torch.equal(hits, (best == ids[:, 0]) & own[:, 0])
