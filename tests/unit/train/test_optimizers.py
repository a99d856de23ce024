"""What moves the weights: matrices by whole updates, everything else by AdamW, and a run goes on to the same bits."""

import pytest
import torch
from torch import nn

from outpace.drafters.draft_lm.net import make_small
from outpace.drafters.training.settings import TrainingSettings
from outpace.train.trainer import Float32Muon, make_optimizers, schedule_of, step_all
from tests.unit.drafters.training import tiny
from tests.unit.drafters.training.test_domino_objective import fresh
from tests.unit.models.tiny import tiny_config


def test_muon_moves_matrices_and_adamw_the_rest() -> None:
    """Guards against rows of the vocabulary orthogonalised together, weights moved twice, and weights never moved."""
    net = fresh().net
    muon, adamw = make_optimizers(net, TrainingSettings(optimizer="muon"))
    names = {id(weight): name for name, weight in net.named_parameters()}
    of_muon, of_adamw = ({names[id(weight)] for group in one.param_groups for weight in group["params"]}
                         for one in (muon, adamw))  # fmt: skip
    assert isinstance(muon, torch.optim.Muon)
    assert of_muon | of_adamw == set(names.values())
    assert not of_muon & of_adamw
    assert {"fc.weight", "head.prefix_gru.weight_hh_l0", "head.embed_proj.0.weight"} <= of_muon
    assert {"norm.weight", "head.embed_proj.2.weight"} <= of_adamw
    (alone,) = make_optimizers(net, TrainingSettings())
    assert isinstance(alone, torch.optim.AdamW)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
def test_muon_moves_no_vocabulary(family: str) -> None:
    """Guards against rows of the vocabulary orthogonalised together, under the names of other families."""
    config = tiny_config(family)
    net = make_small(config, 0)
    muon, _ = make_optimizers(net, TrainingSettings(optimizer="muon"))
    assert not any(config.vocab_size in weight.shape for group in muon.param_groups for weight in group["params"])


@pytest.mark.parametrize("shape", [(8, 40), (40, 8)])
def test_muon_in_float32_moves_as_torchs(shape: tuple[int, int]) -> None:
    """Guards against another update where products are not in bfloat16: three steps differ by its rounding alone."""
    torch.manual_seed(0)
    start, moved = torch.randn(shape), []
    gradients = torch.randn(3, *shape)
    for kind in (torch.optim.Muon, Float32Muon):
        weight = nn.Parameter(start.clone())
        optimizer = kind([weight], lr=0.1, weight_decay=0.5, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        moved.append(weight.detach() - start)
    assert (moved[0] - moved[1]).norm() < 0.02 * moved[0].norm()


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_muon_computes_as_the_processor_does(computed: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against products in bfloat16 where they are emulated: they made a step of training ten times as long."""
    monkeypatch.setattr("outpace.train.trainer.compute_dtype", lambda dtype, device: computed)
    muon = make_optimizers(nn.Linear(3, 3, bias=False), TrainingSettings(optimizer="muon"))[0]
    assert isinstance(muon, Float32Muon) == (computed == torch.float32)


def test_frozen_weights_are_left_alone() -> None:
    """Guards against states for weights that never change."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).requires_grad_(False)
    net[1].weight.requires_grad_(True)
    (muon,) = make_optimizers(net, TrainingSettings(optimizer="muon"))
    assert [id(weight) for group in muon.param_groups for weight in group["params"]] == [id(net[1].weight)]


def test_muon_learns() -> None:
    """Guards against an update of the wrong sign or size: Domino's loss falls by a quarter in 12 steps."""
    objective = fresh(anchors=16)
    optimizers = make_optimizers(objective.net, TrainingSettings(optimizer="muon", learning_rate=0.02))
    curve = []
    for epoch in range(4):
        for batch in tiny.batches(objective.taps, 14, epoch):
            terms = objective(batch, 0.5)
            loss = terms["loss"] / terms["weight"]
            loss.backward()
            curve.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert curve[-1] < 0.75 * curve[0]


@pytest.mark.parametrize("steps", [1, 4, 100])
def test_a_flat_schedule_falls_at_its_end(steps: int) -> None:
    """Guards against a rate that falls early, so that a longer run would have learned something else, or to zero."""
    settings = TrainingSettings(schedule="wsd", learning_rate=0.5, warmup_ratio=0.1)
    rates: dict[int, list[float]] = {}
    for count in (steps, 3 * steps):
        (optimizer,) = make_optimizers(nn.Linear(1, 1), settings)
        schedule = schedule_of(optimizer, settings, count)
        rates[count] = []
        for _ in range(count):
            rates[count].append(float(schedule.get_last_lr()[0]))
            step_all([optimizer])
            schedule.step()
        assert schedule.get_last_lr()[0] == pytest.approx(0.05)
    if steps == 100:
        assert rates[100][10:81] == [0.5] * 71 == rates[300][30:101]
        assert rates[100][90] == pytest.approx(0.275)
