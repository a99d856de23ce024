"""A tiny random target that a drafter can learn within seconds, its greedy answers, and a bare training loop."""

from collections.abc import Iterator
from functools import cache

import torch

from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.training.batch import Batch, Facts, TrainingSample, collate, sample_seed
from outpace.drafters.training.objective import Objective
from outpace.engine.engine import Engine
from outpace.methods.catalog import build_proposer, parse_method
from outpace.models.draft import DraftModel
from outpace.models.frozen import FrozenTarget
from outpace.models.target import TransformersTarget
from tests.unit.models.tiny import random_ids, tiny_config, tiny_target

VOCAB = 48
MASK = 47  # stands for positions to be drafted; kept out of prompts
ANSWER = 40
CONTEXT = 0.07  # of what attention adds: with less the text is a cycle, with more it is chaos
HELD_OUT = 6


@cache
def target() -> TransformersTarget:
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


def answers(proposer: Proposer, prompts: list[list[int]], batch: int = 8) -> tuple[list[list[int]], float]:
    """Greedy answers by the engine, and the tokens per step it counted."""
    engine = Engine(target())
    made, tokens, rounds = [], 0, 0
    for start in range(0, len(prompts), batch):
        sessions = [
            engine.add(ids, SamplingParams(max_new_tokens=ANSWER, ignore_eos=True), proposer)[0]
            for ids in prompts[start : start + batch]
        ]
        while any(session.finish_reason is None for session in sessions):
            engine.step()
        for session in sessions:
            sample = engine.result(session)
            made.append(list(sample.token_ids))
            tokens += len(sample.token_ids) - 1
            rounds += sample.metrics.steps
    return made, tokens / rounds


@cache
def samples(count: int = 48, seed: int = 0) -> tuple[TrainingSample, ...]:
    """Prompts of different lengths with the target's own greedy answers."""
    prompts = [random_ids(5 + at % 7, 1000 * seed + at, MASK) for at in range(count)]
    around = BuildContext(VOCAB, torch.device("cpu"), _no_draft_model, target())
    made, _ = answers(build_proposer(parse_method("plain"), around), prompts)
    return tuple(
        TrainingSample(f"{at}/0", torch.tensor(ids + own), torch.arange(len(ids) + len(own)) >= len(ids))
        for at, (ids, own) in enumerate(zip(prompts, made, strict=True))
    )


def _no_draft_model() -> DraftModel:
    raise AssertionError("plain decoding asks for no draft model")


def facts() -> Facts:
    """Of the samples to train on."""
    ids, own = (torch.cat([getattr(sample, name) for sample in samples()[HELD_OUT:]]) for name in ("ids", "mask"))
    counts = torch.bincount(ids[own], minlength=VOCAB)
    return Facts(counts, torch.bincount(ids, minlength=VOCAB) == 0, ())


def batches(taps: tuple[int, ...], size: int, epoch: int = 0, held_out: bool = False) -> Iterator[Batch]:
    """Batches with features: of the samples to train on, or of those kept aside."""
    chosen = samples()[:HELD_OUT] if held_out else samples()[HELD_OUT:]
    for start in range(0, len(chosen), size):
        group = chosen[start : start + size]
        batch = collate(group, [sample_seed(0, epoch, sample.name) for sample in group])
        features = frozen().features(batch.ids, batch.lengths, taps)
        yield Batch(batch.ids, batch.mask, batch.lengths, batch.seeds, features)


def train(objective: Objective, epochs: int, learning_rate: float, size: int = 14) -> list[dict[str, float]]:
    """AdamW without any of the trainer's comforts; mean losses of each epoch."""
    optimizer = torch.optim.AdamW(objective.net.parameters(), lr=learning_rate, weight_decay=0.0)
    per_epoch = (len(samples()) - HELD_OUT + size - 1) // size
    curve, step = [], 0
    for epoch in range(epochs):
        sums: dict[str, float] = {}
        for batch in batches(objective.taps, size, epoch):
            terms = objective(batch, step / (epochs * per_epoch))
            (terms["loss"] / terms["weight"]).backward()
            torch.nn.utils.clip_grad_norm_(objective.net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
        curve.append({name: value / sums["weight"] for name, value in sums.items()})
    return curve
