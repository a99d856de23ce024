"""What holds for the training objectives of every kind."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.drafters.training.batch import all_anchors
from outpace.drafters.training.objective import Objective
from outpace.drafters.training.settings import merged_settings, training_of
from outpace.models.frozen import FrozenTarget
from tests.unit.drafters.training import blocks, pairs, test_domino_objective, tiny
from tests.unit.drafters.training.test_dflash_objective import SLIDING
from tests.unit.drafters.training.test_draft_lm_objective import KINDS as DRAFT_LMS
from tests.unit.drafters.training.test_eagle3 import VARIANTS
from tests.unit.models.tiny import tiny_config, tiny_target

DOMINO = blocks.NET | test_domino_objective.HEAD
SELECTED = blocks.NET | {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}
LATTICE = blocks.NET | {"rank": 12, "candidates": 4}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", blocks.NET | SLIDING, {}),
    **{name: ("domino", DOMINO, {"strategy": name}) for name in test_domino_objective.STRATEGIES},
    "unshifted": ("domino", DOMINO | {"shift_label": False, "pure_draft_prefix_len": 0}, {}),
    "dspark": ("dspark", blocks.NET | {"markov_rank": 8}, {}),
    "dspark-pool": ("dspark", blocks.NET | {"markov_rank": 8}, {"vocabulary": 20, "sampled": 9}),
    "dflash2": ("dflash2", SELECTED, {}),
    "dflash2-pool": ("dflash2", SELECTED, {"vocabulary": 20, "sampled": 9, "labels": "target-softmax"}),
    "lattice": ("lattice", LATTICE, {}),
    "lattice-softmax": ("lattice", LATTICE, {"labels": "target-softmax", "vocabulary": 20, "sampled": 5}),
    "dart": ("dart", {"draft_vocab_size": 12}, {}),
    "eagle3": ("eagle3", {"draft_vocab_size": 12}, {}),
    "eagle3-variants": ("eagle3", VARIANTS, {}),
    "headless": ("eagle3", {"own_head": False}, {"vocabulary": 20}),
    **{f"medusa-{head}": ("medusa", {"head": head}, {}) for head in ("own", "shared", "target")},
    **{f"draft-lm-{name}": ("draft-lm", *one) for name, one in DRAFT_LMS.items()},
}
each_case = pytest.mark.parametrize("case", CASES)


@cache
def target(dtype: torch.dtype) -> FrozenTarget:
    config = tiny_config("llama", vocab_size=tiny.VOCAB, num_key_value_heads=3)
    return FrozenTarget(tiny_target(config, dtype, max_length=64, pack=False))


def objective_of(case: str, target: FrozenTarget) -> Objective:
    """A new drafter whose weights are not zero: nothing is learned behind those."""
    kind, net, loss = CASES[case]
    chosen = merged_settings(kind, None, [])
    sections = type(chosen.net)(**net), type(chosen.objective)(**loss)
    build: Callable[..., Objective] = training_of(kind).build
    objective = build(*sections, target, tiny.facts(), 0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in objective.net.parameters():
            if not weight.any():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
    return objective


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_reach_every_parameter(case: str, dtype: torch.dtype) -> None:
    """Guards against weights that never learn, a target that does, and dtypes that do not go together."""
    exact = objective_of(case, target(torch.float32))
    wanted = exact(pairs.some(exact.taps, exact.target), 0.5)
    objective = objective_of(case, target(dtype))
    batch = pairs.some(objective.taps, objective.target)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = objective(batch, 0.5)
        assert objective.hits(batch, all_anchors(batch)).dtype == torch.bool
    found["loss"].backward()
    single = objective(batch, 0.5)
    assert all(value.dtype == torch.float32 and value.ndim == 0 for value in found.values())
    means = [float((terms["loss"] / terms["weight"]).detach()) for terms in (found, single)]
    assert means == pytest.approx([float((wanted["loss"] / wanted["weight"]).detach())] * 2, rel=0.02)
    for name, weight in objective.net.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.dtype == torch.float32
        assert bool(weight.grad.any()), name
        assert bool(weight.grad.isfinite().all()), name
    frozen = objective.target
    assert all(weight.grad is None for weight in (frozen.head, *frozen.decoder.parameters()))


@each_case
def test_a_batch_without_anything_to_learn_takes_part(case: str) -> None:
    """Guards against processes that wait for each other's gradients, or divide by what one of them lacks."""
    objective = objective_of(case, target(torch.float32))
    batch = pairs.some(objective.taps, objective.target)
    terms = objective(replace(batch, mask=torch.zeros_like(batch.mask)), 0.5)
    assert (terms["loss"].item(), terms["weight"].item()) == (0.0, 0.0)
    terms["loss"].backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in objective.net.parameters())


@pytest.mark.parametrize("case", [case for case, (kind, *_) in CASES.items() if kind != "draft-lm"])
def test_the_file_says_what_was_trained(case: str, tmp_path: Path) -> None:
    """Guards against taps, masks, windows, alignments or maps that a file loses."""
    pairs.assert_file_says_the_same(objective_of(case, target(torch.float32)), tmp_path / "new")
