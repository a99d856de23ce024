"""What tests of EAGLE-3's and DART's objectives do alike."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.core.protocols import Proposer
from outpace.drafters.convert import changed_settings, changed_weights
from outpace.drafters.load import load_net
from outpace.drafters.training.batch import Batch, all_anchors, collate
from outpace.drafters.training.objective import Objective
from outpace.lib.checkpoint import filled
from outpace.models.frozen import FrozenTarget
from outpace.models.tokenizer import TextCodec
from outpace.train.trainer import Simulation, simulate
from outpace.trees.proposer import StaticProposer
from outpace.trees.shapes.rank_paths import Chain
from tests.unit.drafters.training import tiny
from tests.unit.models.tiny import byte_tokenizer

THREE = ((4, 22), (5, 19), (6, 24))


def some(taps: tuple[int, ...], target: FrozenTarget | None = None, cuts: Sequence[tuple[int, int]] = THREE) -> Batch:
    """Samples, by number, whose answers are cut short to so many tokens in all, with a target's features."""
    chosen = [
        replace(sample, ids=sample.ids[:end], mask=sample.mask[:end])
        for sample, end in ((tiny.samples()[at], end) for at, end in cuts)
    ]
    batch = collate(chosen, range(7, 7 + len(cuts)))
    return replace(batch, features=(target or tiny.frozen()).features(batch.ids, batch.lengths, taps))


def without_prompts(batch: Batch, first: int = 0) -> Batch:
    """All tokens of the sequences, from the first on, as the target's own."""
    where = torch.arange(batch.ids.shape[1])
    return replace(batch, mask=(where >= first) & (where < torch.tensor(batch.lengths)[:, None]))


def assert_first_tokens_are_no_anchors(objective: Objective, batch: Batch) -> None:
    """An anchor at position 0 has no pair before it: nothing is supervised there, and no draft of it is right."""
    whole, later = without_prompts(batch), without_prompts(batch, first=1)
    found, wanted = objective(whole, 0.0), objective(later, 0.0)
    assert {name: found[name].item() for name in found} == pytest.approx({name: wanted[name].item() for name in wanted})
    objective.net.lm_head.weight.data.zero_()  # type: ignore[operator, union-attr]
    zeros = replace(whole, ids=torch.zeros_like(whole.ids))  # so that every draft is right
    anchors = all_anchors(zeros)
    right = objective.hits(zeros, anchors)[:, 0]
    assert torch.equal(right, anchors.positions > 0)


def played(objective: Objective) -> Simulation:
    return simulate(objective, [tiny.held_out(objective.taps)])


def chain_of(source: Any, depth: int) -> Proposer:
    return StaticProposer(source, Chain(), depth, torch.device("cpu"))


def assert_engine_agrees(simulation: Simulation, proposer: Proposer) -> None:
    """The engine's answers to held-out prompts are plain's, in exactly the rounds that were simulated."""
    held_out = tiny.samples()[: tiny.HELD_OUT]
    answers, tokens_per_step = tiny.answers(proposer, [sample.ids[~sample.mask].tolist() for sample in held_out])
    assert answers == [sample.ids[sample.mask].tolist() for sample in held_out]
    assert simulation.tokens == sum(len(answer) - 1 for answer in answers)
    assert tokens_per_step == simulation.tokens / simulation.rounds


def assert_file_says_the_same(objective: Objective, folder: Path) -> None:
    objective.write(objective.net.state_dict(), folder, TextCodec(byte_tokenizer(), "tiny"), "float32")
    again, net = load_net(str(folder)), objective.net
    whole = filled(partial(type(net), net.config), objective.whole(net.state_dict()), "whole")
    assert not changed_settings(whole, again)
    assert not changed_weights(whole, again)
