"""Training of Medusa's heads: the loss is the one stated, and what is learned is what the engine accepts."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from outpace.drafters.medusa.net import HeadKind, MedusaHead
from outpace.drafters.medusa.objective import MedusaNetSettings, MedusaObjective, MedusaObjectiveSettings, build_medusa
from outpace.drafters.medusa.source import MedusaSource
from outpace.drafters.training.batch import all_anchors, collate
from outpace.lib.errors import InvalidRequest
from outpace.models.frozen import FrozenTarget
from outpace.train.trainer import simulate
from tests.unit.drafters.training import pairs, tiny
from tests.unit.models.tiny import tiny_config, tiny_target

KINDS: tuple[HeadKind, ...] = ("own", "shared", "target")


def fresh(
    head: HeadKind = "own", heads: int = 5, layers: int = 1, decay: float = 0.8, chained: bool = False
) -> MedusaObjective:
    net = MedusaNetSettings(heads=heads, layers=layers, head=head, chained=chained)
    return build_medusa(net, MedusaObjectiveSettings(decay=decay), tiny.frozen(), tiny.facts(), 0)


@cache
def trained(head: HeadKind) -> MedusaObjective:
    objective = fresh(head)
    tiny.train(objective, 20, 1e-2)
    return objective


def shaken(objective: MedusaObjective) -> MedusaObjective:
    """With weights of which none is zero, each head's its own."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in objective.net.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return objective


def assert_engine_agrees(objective: MedusaObjective) -> None:
    source = MedusaSource(objective.net.requires_grad_(False), tiny.target().head, 3)
    pairs.assert_engine_agrees(pairs.played(objective), pairs.chain_of(source, objective.depth))
    objective.net.requires_grad_(True)


@pytest.mark.parametrize("head", KINDS)
def test_the_loss_is_that_of_every_anchor_and_head_by_itself(head: HeadKind) -> None:
    """Guards against heads a token off, rows of prompts or padding in the loss, and weights of another depth."""
    objective, batch = shaken(fresh(head, heads=3, layers=2, decay=0.7)), tiny.held_out((3,))
    terms = objective(batch, 0.5)
    layers = [tiny.frozen().head] if head == "target" else objective.net.vocabulary_layers()
    loss = weight = 0.0
    for ids, mask, features in zip(batch.ids.tolist(), batch.mask.tolist(), batch.features.double(), strict=True):
        for pending in range(1, len(ids) - 1):
            if not (mask[pending] and mask[pending + 1]):
                continue
            for k, blocks in enumerate(objective.net.heads):
                aim = pending + 1 + k
                if aim >= len(ids) or not mask[aim]:
                    continue
                row = features[pending - 1]
                assert isinstance(blocks, MedusaHead)
                for block in blocks.blocks:
                    assert isinstance(block, nn.Linear)
                    inner = block.weight.double() @ row + block.bias.double()
                    row = row + inner / (1 + torch.exp(-inner))
                scores = layers[min(k, len(layers) - 1)].double() @ row
                loss += 0.7**k * (scores.exp().sum().log() - scores[ids[aim]]).item()
                weight += 0.7**k
    assert terms["weight"].item() == pytest.approx(weight, rel=1e-6)
    assert terms["loss"].item() == pytest.approx(loss, rel=1e-5)
    assert sum(terms[f"head_{k}"].item() for k in (1, 2, 3)) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("head", KINDS)
def test_the_start_is_the_targets_own_head(head: HeadKind) -> None:
    """Guards against a random start, which throws away what the target's head knows, and blocks that cannot learn."""
    objective, batch = fresh(head, layers=2), tiny.held_out((3,))
    hidden = objective.net(batch.features[0])  # [T, heads, H]
    assert torch.equal(hidden, batch.features[0][:, None].expand_as(hidden))
    if head != "target":
        assert all(torch.equal(layer, tiny.frozen().head) for layer in objective.net.vocabulary_layers())
    terms = objective(batch, 0.0)
    terms["loss"].backward()
    for name, weight in objective.net.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.any(), name
    assert tiny.frozen().head.grad is None


@pytest.mark.costly
@pytest.mark.parametrize("head", KINDS)
def test_training_helps(head: HeadKind) -> None:
    """Guards against a loss that falls while nothing useful is learned."""
    objective = trained(head)
    before, after = (pairs.played(one).tokens_per_step for one in (fresh(head), objective))
    assert 1.3 < before < 1.4
    assert after > before + 0.1
    seen = list(tiny.batches((3,), 14))
    assert simulate(objective, seen).tokens_per_step > simulate(fresh(head), seen).tokens_per_step + 0.33


@pytest.mark.parametrize("head", KINDS)
def test_simulated_rounds_are_the_engines(head: HeadKind) -> None:
    """Guards against figures of training that drafting does not keep: a tap, a row or a depth apart."""
    assert_engine_agrees(trained(head))


def test_chained_heads_start_from_the_targets_own_head_and_learn(tmp_path: Path) -> None:
    """Guards against chained heads that read the state after the final norm, start from other factors of that norm,
    cannot learn, lose a weight on disk, or draft something else in the engine."""
    objective = fresh("target", chained=True)
    batch = tiny.held_out((4, 3))
    before, after = batch.features.chunk(2, dim=-1)
    hidden = objective.net(before[batch.mask])  # [R, heads, H]
    torch.testing.assert_close(hidden, after[batch.mask][:, None].expand_as(hidden), atol=1e-5, rtol=1e-5)
    tiny.train(objective, 20, 1e-2)
    assert pairs.played(objective).tokens_per_step > pairs.played(fresh("target", chained=True)).tokens_per_step + 0.1
    assert_engine_agrees(objective)
    pairs.assert_file_says_the_same(objective, tmp_path)
    with pytest.raises(ValidationError, match="chained=true needs layers=1 and head=target, not 1 and own"):
        MedusaNetSettings(chained=True)
    normed = FrozenTarget(tiny_target(tiny_config("gpt_neox")))
    with pytest.raises(InvalidRequest, match="chained heads need a target with RMSNorm"):
        build_medusa(MedusaNetSettings(head="target", chained=True), MedusaObjectiveSettings(), normed, tiny.facts(), 0)


def test_a_first_token_without_a_prompt_is_never_right() -> None:
    """Guards against a draft from a state that no engine has: position -1 is the end of the sequence."""
    sample = replace(tiny.samples()[0], mask=torch.ones(len(tiny.samples()[0].ids), dtype=torch.bool))
    batch = collate([sample], (1,), [tiny.frozen().features(sample.ids[None], (len(sample.ids),), (3,))[0]])
    objective = trained("own")
    hits = objective.hits(batch, all_anchors(batch))
    assert len(hits) == len(sample.ids) - 1
    assert not hits[0].any()
    assert not any(hits[-left, left:].any() for left in range(1, objective.depth)), "nothing is right beyond the end"
