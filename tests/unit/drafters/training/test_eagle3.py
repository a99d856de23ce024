"""EAGLE-3's objective against one chain at a time, and its drafts against the engine's."""

import copy
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from outpace.drafters.eagle3 import objective as eagle3
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.eagle3.objective import Eagle3NetSettings, Eagle3Objective, Eagle3ObjectiveSettings, build_eagle3
from outpace.drafters.eagle3.source import EagleSource
from outpace.drafters.load import load_net
from outpace.drafters.ranked_vocabulary import FILE_NAME, load_vocabulary
from outpace.drafters.training import attention
from outpace.drafters.training.batch import Batch, all_anchors, stretches
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.models.frozen import FrozenTarget
from tests.unit.drafters.net.small import Cached
from tests.unit.drafters.training import pairs, tiny
from tests.unit.models.tiny import tiny_config, tiny_target

VARIANTS: dict[str, Any] = dict.fromkeys(
    ("qk_norm", "norm_output", "norm_before_residual", "fc_norm", "norm_before_fc"), True
)


def objective_of(seed: int = 0, net: dict[str, Any] | None = None, **settings: Any) -> Eagle3Objective:
    sizes, loss = Eagle3NetSettings(**(net or {})), Eagle3ObjectiveSettings(**settings)
    return build_eagle3(sizes, loss, tiny.frozen(), tiny.facts(), seed)


@cache
def trained() -> Eagle3Objective:
    """A reduced vocabulary, and chains deeper than the steps that were trained."""
    objective = objective_of(net={"draft_vocab_size": 40}, steps=4, chain_depth=6)
    tiny.train(objective, epochs=12, learning_rate=1e-2)
    return objective


@torch.no_grad()
def slowly(objective: Eagle3Objective, batch: Batch) -> tuple[float, float, float]:
    """Loss, weight and accuracy, anchor by anchor in float64."""
    net, settings = copy.deepcopy(objective.net).double(), objective.settings
    ids_of = net.target_ids(torch.arange(net.config.draft_vocab_size)).tolist()
    table, head, joined = tiny.frozen().embedding.double(), tiny.frozen().head.double(), net.config.joined_size
    compared = objective.vocabulary.draw(batch.step_seed)
    shift = torch.zeros(()) if compared.shift is None else compared.shift
    if compared.ids is not None:
        ids_of = compared.ids.tolist()

    def scored(hidden: Tensor) -> Tensor:
        return (head @ hidden)[ids_of] if net.lm_head is None else net.logits(hidden)

    loss = weight = accuracy = 0.0
    for ids, mask, features in zip(batch.ids, batch.mask, batch.features.double(), strict=True):
        for anchor in range(1, len(ids) - 1):
            if not (mask[anchor] and mask[anchor + 1]):
                continue
            attend, tokens, states = Cached(), ids[1 : anchor + 1], net.fuse(features[:anchor, :joined])
            positions = torch.arange(anchor)
            for step in range(settings.steps):
                at = anchor + step + 1  # of the label
                if at == len(ids) or not mask[at]:
                    break
                states, hidden = net(net.embed(tokens, lambda ids: table[ids]), states, positions, attend)
                states, log_probs = states[-1:], (scored(hidden[-1]) + shift).log_softmax(dim=-1)
                tokens, positions = ids[at : at + 1], torch.tensor([at - 1])
                said = head @ features[at - 1, joined:]
                ranked = objective.vocabulary.ranked
                best = int(said.argmax())
                if best not in ids_of or (ranked is not None and best not in ranked):
                    continue
                distribution = (said[ids_of] + shift).softmax(dim=-1)
                best = ids_of[int(distribution.argmax())]
                share = settings.decay**step
                loss -= share * float(distribution.double() @ log_probs)
                weight += share
                accuracy += share * (ids_of[int(log_probs.argmax())] == best)
    return loss, weight, accuracy


@pytest.mark.parametrize("net", [{}, {"draft_vocab_size": 12}, VARIANTS], ids=["plain", "reduced", "variants"])
def test_the_loss_is_that_of_each_chain_alone(net: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against steps that see other chains' rows, positions, tokens or labels off by one."""
    monkeypatch.setattr(attention, "ROWS_AT_ONCE", 20)
    objective = objective_of(3, net)
    with torch.no_grad():  # wide weights: at 0.02 attention adds next to nothing
        for weight in objective.net.parameters():
            weight.mul_(8.0) if weight.ndim == 2 else weight.mul_(1 + 0.3 * torch.randn_like(weight))
    batch = pairs.some(objective.taps)
    found = objective(batch, 0.0)
    wanted = slowly(objective, batch)
    assert [found[name].item() for name in ("loss", "weight", "accuracy")] == pytest.approx(wanted, rel=1e-5)
    assert [found[name].requires_grad for name in ("loss", "weight", "accuracy")] == [True, False, False]


@pytest.mark.parametrize("limits", [{}, {"vocabulary": 20}, {"vocabulary": 12, "sampled": 9}])
def test_the_target_may_lend_its_head(limits: dict[str, int]) -> None:
    """Guards against a borrowed head that is scored whole, and rare tokens learned as others."""
    objective = objective_of(3, {"own_head": False}, steps=4, **limits)
    assert objective.net.lm_head is None
    assert objective.net.config.draft_vocab_size == tiny.VOCAB
    batch = pairs.some(objective.taps)
    found, wanted = objective(batch, 0.0), slowly(objective, batch)
    assert [found[name].item() for name in ("loss", "weight", "accuracy")] == pytest.approx(wanted, rel=1e-5)


def test_a_borrowed_head_drafts_what_it_learned(tmp_path: Path) -> None:
    """Guards against simulations with ids that the engine does not draft, and a file that wants a head of its own."""
    objective = objective_of(0, {"own_head": False}, steps=4, vocabulary=30, sampled=5)
    tiny.train(objective, epochs=4, learning_rate=1e-2)
    simulation = pairs.played(objective)
    assert simulation.tokens_per_step > 1.15, "1.03 before"
    objective.write(objective.net.state_dict(), tmp_path, cast(Any, None), "float32")
    net, ids = load_net(str(tmp_path)), load_vocabulary(tmp_path / FILE_NAME, tiny.VOCAB)
    assert isinstance(net, Eagle3Net)
    assert net.lm_head is None
    source = EagleSource(net.requires_grad_(False), tiny.target(), vocabulary=ids)
    pairs.assert_engine_agrees(simulation, pairs.chain_of(source, 4))


def test_a_stretch_of_chains_is_what_it_says() -> None:
    """Guards against chains of a stretch that meet labels beyond it, and stretches that are always the first."""
    objective = objective_of(3, steps=3, anchors=6)
    batch = pairs.some(objective.taps)
    seen = set()
    for seed in range(12):
        drawn = stretches(all_anchors(batch), (seed, seed + 1, seed + 2), 6)
        assert len(drawn) == 18
        for row in range(3):
            own = drawn.positions[drawn.rows == row]
            assert (own.diff() == 1).all()
            seen.add((row, int(own[0])))
    assert len(seen) > 12
    found = objective(batch, 0.0)
    whole = objective_of(3, steps=3, anchors=100)(batch, 0.0)
    assert torch.equal(whole["loss"], objective_of(3, steps=3)(batch, 0.0)["loss"])
    assert found["weight"].item() == pytest.approx(3 * (6 + 5 * 0.8 + 4 * 0.64))
    assert found["loss"] < whole["loss"]


def test_logits_of_all_rows_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against pieces that count labels, each of which has a row of logits for every step."""
    monkeypatch.setattr(eagle3, "ROWS_AT_ONCE", 50)
    objective, seen = objective_of(), []
    assert objective.net.lm_head is not None
    objective.net.lm_head.register_forward_hook(lambda module, given, made: seen.append(len(made)))
    objective(pairs.some(objective.taps), 0.0)["loss"].backward()
    assert 7 <= max(seen) <= 50


@pytest.mark.parametrize("cuts", [((0, 20),), ((0, 8), (2, 20))], ids=["one", "one where the other ends"])
def test_chains_end_with_their_sequence(cuts: tuple[tuple[int, int], ...]) -> None:
    """Guards against labels that meet a chain of the sequence before, or, in a batch of one, of its own end."""
    objective = objective_of()
    batch = pairs.some(objective.taps, cuts=cuts)
    assert objective(batch, 0.0)["loss"].item() == pytest.approx(slowly(objective, batch)[0], rel=1e-5)


def test_training_raises_tokens_per_step_and_the_engine_agrees() -> None:
    """Guards against training for another drafter than the engine runs, and simulations that flatter."""
    objective = trained()
    assert pairs.played(objective_of(net={"draft_vocab_size": 40}, steps=4, chain_depth=6)).tokens_per_step < 1.1
    simulation = pairs.played(objective)
    assert simulation.tokens_per_step > 1.57
    assert len(simulation.accepted) == 6
    pairs.assert_engine_agrees(simulation, pairs.chain_of(EagleSource(objective.net, tiny.target()), 6))


@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_what_was_trained_is_what_a_file_says(variant: str | None, tmp_path: Path) -> None:
    """Guards against maps, taps, rotations or variants that a file loses, and drafters that no file can hold."""
    variants: dict[str, Any] = {} if variant is None else {variant: True}
    for taps in ((2, 1), (1, 0)):  # tap 0 is no layer's output
        objective = objective_of(net={**variants, "draft_vocab_size": 12, "taps": taps})
        pairs.assert_file_says_the_same(objective, tmp_path / f"from {taps[-1]}")
        is_simple = variant in (None, "fc_norm") and 0 not in taps
        assert objective.layout == ("midlayer" if is_simple else "speculators")


def test_taps_are_the_usual_ones_that_a_target_has() -> None:
    """Guards against targets of few layers that cannot be drafted for, and taps that are not those published."""
    for layers, taps in ((2, (1, 1, 0)), (6, (2, 3, 3)), (8, (2, 4, 5))):
        config = tiny_config("llama", num_hidden_layers=layers, vocab_size=tiny.VOCAB)
        target = FrozenTarget(tiny_target(config, max_length=32))
        objective = build_eagle3(Eagle3NetSettings(), Eagle3ObjectiveSettings(), target, tiny.facts(), 0)
        assert objective.net.config.taps == taps
        assert objective.taps == (*taps, layers)
        two = Eagle3NetSettings(taps=(0, 1))
        assert build_eagle3(two, Eagle3ObjectiveSettings(), target, tiny.facts(), 0).taps == (0, 1, layers)


def test_what_cannot_be_trained_is_refused() -> None:
    """Guards against two settings that contradict each other, one of which would be ignored, a training whose first
    drafter cannot be written, and nets that fail in the middle of a pass, or read what the target's last norm made."""
    with pytest.raises(InvalidRequest, match=r"objective.vocabulary=20: .*net.draft_vocab_size"):
        objective_of(0, vocabulary=20)
    for variant in ("qk_norm", "norm_output"):
        with pytest.raises(InvalidRequest, match=rf"net.own_head=false, net.{variant}=true: .*leave one of them out"):
            objective_of(0, {"own_head": False, variant: True})
    with pytest.raises(InvalidRequest, match=r"net.own_head=false, net.taps=\[0, 2\]: .*choose other taps"):
        objective_of(0, {"own_head": False, "taps": (0, 2)})
    assert objective_of(0, {"own_head": False}).net.config.taps == (2, 1, 1)
    with pytest.raises(ModelError, match="taps"):
        objective_of(net={"taps": (0, 3)})
