"""Training of DFlash: the loss is that of every block by itself, and what is learned is what the engine accepts."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from outpace.drafters.dflash import objective as dflash_objective
from outpace.drafters.dflash.objective import (
    DFlashNetSettings,
    DFlashObjective,
    DFlashObjectiveSettings,
    block_fields,
    block_outputs,
    default_gamma,
)
from outpace.drafters.ranked_vocabulary import FILE_NAME, load_vocabulary
from outpace.drafters.training import attention
from outpace.drafters.training.batch import Batch, Facts, all_anchors, random_anchors
from outpace.drafters.training.losses import row_losses
from outpace.lib.checkpoint import INDEX, WEIGHTS
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.models.frozen import FrozenTarget
from tests.unit.drafters.training import blocks, pairs, tiny
from tests.unit.models.tiny import tiny_config

SLIDING = {"layers": 2, "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4}
KINDS: dict[str, dict[str, Any]] = {
    "full": {"layers": 2},
    "sliding": SLIDING,
    "sliding-both-ways": SLIDING | {"sliding_causal": False},
}


def fresh(
    seed: int = 0, anchors: int = 512, gamma: float | None = None, loss: dict[str, Any] | None = None, **net: Any
) -> DFlashObjective:
    settings = DFlashObjectiveSettings(anchors=anchors, gamma=gamma, **loss or {})
    return DFlashObjective.new(DFlashNetSettings(**blocks.NET | net), settings, tiny.frozen(), tiny.facts(), seed)


@cache
def trained(kind: str) -> DFlashObjective:
    objective = fresh(anchors=16, **KINDS.get(kind, {}))
    blocks.learn(objective, 12 if kind == "plain" else 4)
    return objective


@pytest.mark.parametrize("labels", ["tokens", "target-softmax"])
def test_blocks_may_be_weighted_by_what_they_may_gain(labels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against D-PACE's weights from a part of a block, or from probabilities of another row."""
    objective = blocks.wild(fresh(loss={"depth_weights": "d-pace", "labels": labels}))
    batch = blocks.short(objective.taps)
    anchors = all_anchors(batch)
    ids, own = anchors.followed(batch, objective.depth)
    hidden = block_outputs(objective.net, objective.target, batch, anchors)[:, 1:]
    loss_sum = weight_sum = 0.0
    for at in range(len(anchors)):
        reached, terms = 1.0, []
        for depth in range(int(own[at].sum())):
            truth = ids[at, depth][None]
            if labels == "target-softmax":
                read = batch.features[anchors.rows[at], anchors.positions[at] + depth, -objective.target.hidden_size :]
                truth = objective.target.logits(read[None]).double().softmax(dim=-1)
            found, accepted = row_losses(objective.target.logits(hidden[at, depth][None]).double(), truth)
            reached *= 0.5 + 0.5 * accepted.item()
            terms.append((found.item(), reached))
        weights = [sum(gained for _, gained in terms[depth:]) for depth in range(len(terms))]
        loss_sum += sum(weight * found for weight, (found, _) in zip(weights, terms, strict=True))
        weight_sum += sum(weights)
    for rows in (1, 512):
        monkeypatch.setattr(dflash_objective, "FEW_ROWS", rows)
        made = objective(batch, 0.0)
        assert made["loss"].item() == pytest.approx(loss_sum, rel=1e-4)
        assert made["weight"].item() == pytest.approx(weight_sum, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_every_block_by_itself(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rows that see the anchor's own feature, later context or other blocks, and labels a token off."""
    objective = blocks.wild(fresh(gamma=3.0, **KINDS[kind]))
    batch = blocks.short(objective.taps)
    _, loss, weight = blocks.reference(objective, batch, all_anchors(batch), gamma=3.0)
    for rows in (1, 15, 512):  # blocks by themselves, in threes, all together
        monkeypatch.setattr(attention, "ROWS_AT_ONCE", rows)
        terms = objective(batch, 0.5)
        assert terms["loss"].item() == pytest.approx(loss, rel=1e-5)
        assert terms["weight"].item() == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize("labels", ["tokens", "target-softmax"])
@pytest.mark.parametrize("limits", [{}, {"vocabulary": 20}, {"vocabulary": 12, "sampled": 9}])
def test_a_loss_may_compare_some_ids_and_learn_from_distributions(limits: dict[str, int], labels: str) -> None:
    """Guards against places among the compared ids that are taken for ids, rare tokens that are learned as others."""
    objective = blocks.wild(fresh(gamma=3.0, loss={"labels": labels, **limits}))
    assert len(objective.taps) == len(objective.net.config.taps) + (labels == "target-softmax")
    batch = blocks.short(objective.taps)
    _, loss, weight = blocks.reference(objective, batch, all_anchors(batch), gamma=3.0)
    terms = objective(batch, 0.0)
    assert (terms["loss"].item(), terms["weight"].item()) == pytest.approx((loss, weight), rel=1e-5)
    whole = blocks.reference(fresh(gamma=3.0), blocks.short(objective.net.config.taps), all_anchors(batch), gamma=3.0)
    assert (weight < whole[2]) == bool(limits), "some labels are rare"
    objective.net.float()
    objective(replace(batch, features=batch.features.float()), 0.0)["loss"].backward()
    assert all(weight.grad is not None for weight in objective.net.parameters())


def test_a_limited_drafter_keeps_its_ids(tmp_path: Path) -> None:
    """Guards against a drafter that is simulated with ids that it will not draft, or drafts ids it never learned."""
    objective = fresh(loss={"vocabulary": 20, "sampled": 4})
    objective.write(objective.net.state_dict(), tmp_path, cast(Any, None), "float32")
    assert objective.vocabulary.ranked is not None
    ids = load_vocabulary(tmp_path / FILE_NAME, tiny.VOCAB)
    assert torch.equal(ids, objective.vocabulary.ranked)
    listed = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert set(listed) == set(load_file(tmp_path / WEIGHTS))
    assert set(listed.values()) == {WEIGHTS}
    scores = objective.scores(torch.randn(3, tiny.frozen().hidden_size))
    assert torch.equal((scores > -torch.inf).nonzero()[:, 1].unique(), ids)
    batch = blocks.held_out(objective)
    right = objective.hits(batch, all_anchors(batch))
    followed, _ = all_anchors(batch).followed(batch, objective.depth)
    assert not right[~torch.isin(followed, ids)].any()


def test_only_the_anchors_that_are_drawn_count() -> None:
    """Guards against a limit that is not kept, and draws that depend on a sequence's neighbours, or not on its seed."""
    objective = blocks.wild(fresh(anchors=2))
    batch = blocks.short(objective.taps)
    drawn = random_anchors(batch, 2)
    assert len(drawn) == 4 < len(all_anchors(batch))
    of_seeds = [random_anchors(replace(batch, seeds=(seed, 0)), 2).positions.tolist() for seed in range(20)]
    assert len({tuple(positions) for positions in of_seeds}) > 3
    _, loss, weight = blocks.reference(objective, batch, drawn, default_gamma(5))
    terms = objective(batch, 0.0)
    assert (terms["loss"].item(), terms["weight"].item()) == pytest.approx((loss, weight), rel=1e-5)
    ids, mask, features = (whole[1:, :10] for whole in (batch.ids, batch.mask, batch.features))
    alone = Batch(ids, mask, (10,), batch.seeds[1:], features)
    first = Batch(batch.ids[:1], batch.mask[:1], (13,), batch.seeds[:1], batch.features[:1])
    assert sum(objective(one, 0.0)["loss"].item() for one in (alone, first)) == pytest.approx(loss, rel=1e-5)


def test_a_first_token_has_no_context() -> None:
    """Guards against a block without anything before it, where nothing is seen or the context has no rows at all."""
    objective = blocks.wild(fresh(gamma=3.0))
    whole = blocks.short(objective.taps)
    for cut in (2, 9):  # the first sequence's first token alone, and more
        ids, features = whole.ids[:1, :cut], whole.features[:1, :cut]
        batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), (cut,), (0,), features)
        anchors = all_anchors(batch)
        assert anchors.positions[0] == 0
        _, loss, _ = blocks.reference(objective, batch, anchors, gamma=3.0)
        terms = objective(batch, 0.0)
        assert terms["loss"].item() == pytest.approx(loss, rel=1e-5)
        terms["loss"].backward()
        assert all(weight.grad is not None for weight in objective.net.parameters())


def test_training_helps() -> None:
    """Guards against a loss that falls while nothing useful is learned."""
    before, after = (pairs.played(one).tokens_per_step for one in (fresh(), trained("plain")))
    assert before < 1.1
    assert after > before + 0.46


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["plain", "sliding"])
def test_simulated_rounds_are_the_engines(kind: str) -> None:
    """Guards against figures of training that drafting does not keep: a tap, a row or a depth apart."""
    blocks.assert_engine_agrees(trained(kind))


def test_chains_end_with_the_first_wrong_draft_and_with_the_text() -> None:
    """Guards against hits behind a miss, which no chain gets to, and behind the end, where nothing is true."""
    objective = trained("plain")
    batch = blocks.held_out(objective)
    anchors = all_anchors(batch)
    hits = objective.hits(batch, anchors)
    assert hits.shape == (len(anchors), 4)
    assert torch.equal(hits, hits.int().cumprod(dim=1).bool())
    assert 0 < hits[:, 1].sum() < hits[:, 0].sum()
    _, own = anchors.followed(batch, 4)
    assert not (hits & ~own).any()


def test_default_weights() -> None:
    """Guards against the authors' decays for other block sizes than theirs, and steps in between."""
    assert [default_gamma(size) for size in (7, 8, 10, 16)] == [4, 4, 5, 7]
    assert [default_gamma(size) for size in (9, 13)] == [4.5, 6]
    assert default_gamma(32) == 14
    assert 0 < default_gamma(2) < default_gamma(4) < 4


def some_target(family: str = "llama", layers: int = 36) -> FrozenTarget:
    config = tiny_config(family)
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "layers": layers}
    return cast(FrozenTarget, SimpleNamespace(config=config, **sizes))


def facts(unused: tuple[int, ...], special: tuple[int, ...] = ()) -> Facts:
    free = torch.zeros(160, dtype=torch.bool)
    free[list(unused)] = True
    return Facts((~free).long(), free, special)


def test_sizes_of_a_target_with_other_fields() -> None:
    """Guards against sizes that are read under Llama's names alone, and none where a target states none."""
    values = block_fields(DFlashNetSettings(), some_target("gpt2"), facts((3,)))
    assert (values["intermediate_size"], values["rope_theta"], values["rms_eps"]) == (96, 1e4, 1e-5)


@pytest.mark.parametrize(("layers", "taps"), [(30, (1, 8, 14, 20, 27)), (6, (1, 2, 3)), (3, (0, 1)), (1, (0,))])
def test_shallow_targets(layers: int, taps: tuple[int, ...]) -> None:
    """Guards against a rule for 36 layers that names a layer twice, or none, of a target with few."""
    assert block_fields(DFlashNetSettings(), some_target(layers=layers), facts((3,)))["target_layer_ids"] == taps


def test_the_mask_is_a_token_that_the_data_never_uses() -> None:
    """Guards against a mask that stands for a real token too."""

    def found(*given: Any) -> object:
        return block_fields(DFlashNetSettings(), some_target(), facts(*given))["mask_token_id"]

    assert found((7, 9, 30), (1, 7, 9)) == 9
    assert found((7, 9, 30), (1, 2)) == 30
    with pytest.raises(InvalidRequest, match=r"set net\.mask_token_id"):
        found((), (1, 2))
    assert block_fields(DFlashNetSettings(mask_token_id=5), some_target(), facts(()))["mask_token_id"] == 5


def test_settings_that_contradict_the_target_are_refused() -> None:
    """Guards against errors that name neither the setting nor its value."""
    with pytest.raises(ModelError, match="net: block_size=5000"):
        fresh(block_size=5000)
