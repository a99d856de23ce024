"""Training of the lattice drafter: its losses, what it learns, and that the engine accepts what training counts."""

import math
from functools import cache
from typing import Any

import pytest
import torch

from outpace.core.drafting import Frontier
from outpace.core.protocols import PromptChunk
from outpace.drafters.lattice.objective import (
    LatticeNetSettings,
    LatticeObjective,
    LatticeObjectiveSettings,
    calibration_error,
)
from outpace.drafters.lattice.source import LatticeSource
from outpace.drafters.training.batch import all_anchors
from outpace.lib.errors import InvalidRequest
from outpace.testing.toy import draft_request
from tests.unit.drafters.net.block_reference import dflash_block
from tests.unit.drafters.training import blocks, pairs, tiny

SIZES = {"rank": 16, "candidates": 4}


def fresh(seed: int = 0, net: Any = None, **loss: Any) -> LatticeObjective:
    sizes = LatticeNetSettings(**blocks.NET | SIZES | (net or {}))
    return LatticeObjective.new(sizes, LatticeObjectiveSettings(**loss), tiny.frozen(), tiny.facts(), seed)


@cache
def trained() -> LatticeObjective:
    objective = fresh(anchors=16)
    blocks.learn(objective, 12)
    return objective


@pytest.mark.parametrize("labels", ["tokens", "target-softmax"])
def test_the_losses_are_those_of_every_pair_by_itself(labels: Any) -> None:
    """Guards against predecessors or features a token off, true tokens that join the candidates, and a wrong share of
    all other ids: each row is computed again with loops."""
    objective = blocks.wild(fresh(gamma=3.0, mix=0.25, labels=labels, net={"layers": 2}))
    net, target = objective.net, tiny.frozen()
    batch = blocks.short(objective.taps)
    embedding, head = target.embedding.double(), target.head.double()
    sizes = net.config.model_dump() | {"layer_types": ("full_attention",) * 2}
    weights = {name: weight.detach() for name, weight in net.named_parameters()}
    base_sum = pair_sum = total = 0.0
    anchors = all_anchors(batch)
    for row, anchor in zip(anchors.rows.tolist(), anchors.positions.tolist(), strict=True):
        ids, features = batch.ids[row, : batch.lengths[row]].tolist(), batch.features[row].double()
        block = embedding[[ids[anchor]] + [net.config.mask_token_id] * (net.config.block_size - 1)]
        known = weights["fc.weight"].double() @ features[anchor - 1, : net.fc.in_features]
        known = known / (known.square().mean() + net.config.rms_eps).sqrt() * weights["hidden_norm.weight"]
        joined = weights["join.weight"].double() @ torch.cat((known, block[0])) + weights["depths"]  # [B, H]
        outputs = dflash_block(weights, sizes, features[:anchor, : net.fc.in_features], block + joined)
        for depth in range(1, net.config.block_size + 1):
            if anchor + depth >= len(ids):
                break
            share, right, scores = math.exp(-(depth - 1) / 3.0), ids[anchor + depth], head @ outputs[depth - 1]
            told = torch.zeros(tiny.VOCAB, dtype=torch.float64)
            told[right] = 1.0
            if labels == "target-softmax":
                told = (head @ features[anchor + depth - 1, -target.hidden_size :]).softmax(dim=0)
            chosen = scores.topk(4).indices.tolist()
            a = weights["pair_head.a.weight"] @ embedding[ids[anchor + depth - 1]]
            gate = weights["pair_head.h.weight"] @ outputs[depth - 1] + weights["pair_head.h.bias"]
            of = weights["pair_head.b.weight"]
            entries = {one: scores[one] + (a * gate) @ (of @ embedding[one]) for one in chosen}
            rest = [one for one in range(tiny.VOCAB) if one not in chosen]
            logits = torch.stack([*entries.values(), scores[rest].logsumexp(dim=0)])
            wanted = torch.stack([*(told[one] for one in entries), told[rest].sum()])
            found = logits.log_softmax(dim=0)
            pair = -(wanted * found).sum()
            if labels == "target-softmax":
                pair = pair + (found.exp() - wanted).abs().sum() / 2
            base_sum += share * float(-(told * scores.log_softmax(dim=0)).sum())
            pair_sum, total = pair_sum + share * float(pair.detach()), total + share
    terms = {name: float(value.detach()) for name, value in objective(batch, 0.0).items()}
    wanted_terms = {"base": base_sum, "pair": pair_sum, "weight": total, "loss": 0.75 * base_sum + 0.25 * pair_sum}
    assert terms == pytest.approx(wanted_terms, rel=1e-4)


def test_training_starts_from_the_base_logits_and_learns_what_follows_what() -> None:
    """Guards against a pair head that disturbs the start, or that never learns: its drafts must beat the base's."""
    start = fresh()
    batch = blocks.held_out(start)
    hidden = torch.randn(3, start.net.config.hidden_size)
    assert not start._pairs(batch.ids[0, :3], hidden, torch.arange(6).view(3, 2)).any()
    before, after = blocks.held_out_losses(start), blocks.held_out_losses(trained())
    assert after["loss"] < 0.75 * before["loss"]
    assert after["pair"] < after["base"]
    without = fresh()
    without.net.load_state_dict(trained().net.state_dict())
    without.net.pair_head.b.weight.data.zero_()
    with_pairs, base_alone = pairs.played(trained()), pairs.played(without)
    assert with_pairs.tokens_per_step > 1.02 * base_alone.tokens_per_step


def test_the_engine_accepts_what_training_counts() -> None:
    """Guards against pair scores, candidates or positions that differ between training and drafting."""
    blocks.assert_engine_agrees(trained(), LatticeSource)


def test_calibration_brings_probabilities_of_chains_to_how_often_they_are_right() -> None:
    """Guards against temperatures that are fitted to other numbers than drafting uses, or multiplied the wrong way."""
    objective = fresh()
    objective.net.load_state_dict(trained().net.state_dict())
    objective.net.pair_head.b.weight.data.mul_(3.0)  # too sure
    batches = list(tiny.batches(objective.taps, tiny.HELD_OUT))
    objective.calibrate(batches)
    temperatures = objective.net.pair_head.temperatures.clone()
    assert len(temperatures) == objective.depth
    assert float(temperatures.max()) > 1.2
    model = tiny.target()
    errors = []
    for fitted in (torch.ones(objective.depth), temperatures):
        objective.net.pair_head.temperatures.copy_(fitted)
        errors.append(_chain_error(objective, model))
    assert errors[1] < 0.75 * errors[0]


def _chain_error(objective: LatticeObjective, model: Any) -> float:
    """Calibration error of the first two drafts, as the source scores them on the sequences of training."""
    source = LatticeSource(objective.net, model, model.head)
    likely, right = [], []
    for sample in tiny.samples()[tiny.HELD_OUT : tiny.HELD_OUT + 12]:
        features = blocks.features_of(sample, objective.taps)
        first = int(sample.mask.int().argmax())
        for anchor in range(first, len(sample.ids) - 3, 3):
            ids, state = sample.ids[: anchor + 1].tolist(), source.open(0)
            source.prefill([state], [PromptChunk(sample.ids[:anchor], None, features[:anchor])])
            source.begin([state], [draft_request(ids, 4, 4)])
            one = source.expand([state], Frontier(torch.tensor(ids[-1:]), [0], [-1]), 1)
            two = source.expand([state], Frontier(one.tokens[0], [0], [0]), 1)
            likely.append(float((one.log_probs + two.log_probs).exp()))  # type: ignore[operator]
            right.append([int(one.tokens), int(two.tokens)] == sample.ids[anchor + 1 : anchor + 3].tolist())
    return calibration_error(torch.tensor(likely), torch.tensor(right))


def test_more_candidates_than_ids_are_refused() -> None:
    """Guards against a crash in the middle of training where no id is left besides the candidates."""
    with pytest.raises(InvalidRequest, match=r"net\.candidates=12: must be below the 12 ids"):
        fresh(net={"candidates": 12}, vocabulary=12)
