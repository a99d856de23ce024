"""A tiny random target that a drafter can learn within seconds, its greedy answers, and a bare training loop."""

from collections.abc import Callable, Iterator
from functools import cache

import torch

from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.drafters.training.batch import Batch, Facts, TrainingSample, collate, sample_seed
from outpace.drafters.training.objective import Objective
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.models.frozen import FrozenTarget
from outpace.models.target import PackedTarget
from outpace.testing import decode
from outpace.trees.proposer import EmptyDraft
from tests.unit.models.tiny import random_ids, tiny_config, tiny_target

VOCAB = 48
MASK = 47  # stands for positions to be drafted; kept out of prompts
ANSWER = 40
CONTEXT = 0.07  # of what attention adds: with less the text is a cycle, with more it is chaos
HELD_OUT = 6


@cache
def target() -> PackedTarget:
    """Three layers of float32 with a vocabulary small enough to be learned by heart."""
    config = tiny_config("llama", vocab_size=VOCAB, num_key_value_heads=3)
    model = tiny_target(config, max_length=128, max_slots=8, pack=False)
    with torch.no_grad():
        for name, weight in model.decoder.named_parameters():
            if name.endswith("o_proj.weight"):
                weight.mul_(CONTEXT)
    return model


@cache
def frozen() -> FrozenTarget:
    return FrozenTarget(target())


def answers(proposer: Proposer, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Greedy answers by the engine, and the tokens per step it counted."""
    engine, params, sessions = Engine(target()), SamplingParams(max_new_tokens=ANSWER, ignore_eos=True), list[Session]()
    for start in range(0, len(prompts), engine.target.max_slots):
        group = prompts[start : start + engine.target.max_slots]
        sessions += decode(engine, group, [params] * len(group), [proposer] * len(group))
    made = [session.generated for session in sessions]
    return made, sum(len(answer) - 1 for answer in made) / sum(session.metrics.steps for session in sessions)


@cache
def samples(count: int = 48) -> tuple[TrainingSample, ...]:
    """Prompts of different lengths with the target's own greedy answers."""
    prompts = [random_ids(5 + at % 7, at, MASK) for at in range(count)]
    made, _ = answers(EmptyDraft(), prompts)
    return tuple(
        TrainingSample(f"{at}/0", torch.tensor(ids + own), torch.arange(len(ids) + len(own)) >= len(ids))
        for at, (ids, own) in enumerate(zip(prompts, made, strict=True))
    )


def facts() -> Facts:
    """Of the samples to train on."""
    ids, own = (torch.cat([getattr(sample, name) for sample in samples()[HELD_OUT:]]) for name in ("ids", "mask"))
    counts = torch.bincount(ids[own], minlength=VOCAB)
    return Facts(counts, torch.bincount(ids, minlength=VOCAB) == 0, ())


def batches(taps: tuple[int, ...], size: int, epoch: int = 0, kept_aside: bool = False) -> Iterator[Batch]:
    """Batches with features: of the samples to train on, or of those kept aside."""
    chosen = samples()[:HELD_OUT] if kept_aside else samples()[HELD_OUT:]
    for start in range(0, len(chosen), size):
        group = chosen[start : start + size]
        batch = collate(group, [sample_seed(0, epoch, sample.name) for sample in group])
        features = frozen().features(batch.ids, batch.lengths, taps)
        yield Batch(batch.ids, batch.mask, batch.lengths, batch.seeds, features)


def held_out(taps: tuple[int, ...]) -> Batch:
    return next(batches(taps, HELD_OUT, kept_aside=True))


def train(
    objective: Objective,
    epochs: int,
    learning_rate: float,
    size: int = 14,
    of_epoch: Callable[[tuple[int, ...], int, int], Iterator[Batch]] = batches,
    falls: bool = False,
) -> None:
    """AdamW without any of the trainer's comforts, at a rate that may fall to zero."""
    optimizer = torch.optim.AdamW(objective.net.parameters(), lr=learning_rate, weight_decay=0.0)
    for epoch in range(epochs):
        chosen = list(of_epoch(objective.taps, size, epoch))
        for at, batch in enumerate(chosen):
            progress = (epoch * len(chosen) + at) / (epochs * len(chosen))
            if falls:
                optimizer.param_groups[0]["lr"] = learning_rate * (1 - progress)
            terms = objective(batch, progress)
            (terms["loss"] / terms["weight"]).backward()
            torch.nn.utils.clip_grad_norm_(objective.net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
