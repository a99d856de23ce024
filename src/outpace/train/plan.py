"""The cost of a run before it starts: counted where possible, else measured on a few passes."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor

from outpace.api import encoded, load
from outpace.core.params import SamplingParams
from outpace.data.answers import read_about
from outpace.data.workload import WorkItem, read_workloads
from outpace.drafters.training.batch import TrainingSample
from outpace.drafters.training.objective import Objective
from outpace.drafters.training.settings import TrainingSettings
from outpace.lib.checks import path_of
from outpace.lib.errors import InvalidRequest
from outpace.models.tokenizer import TextCodec
from outpace.train.data import BatchSampler, SampleSet, TrainingData, collate_examples, held_out_ids
from outpace.train.features import stored_features
from outpace.train.run import Run, build, check, disk_needed, frozen_target, longest_of, sequences, training_precision
from outpace.train.trainer import make_optimizers, step_all

SHOWN_PROMPTS = 64  # prompts whose lengths represent all of them
TRIED_TOKENS = 8  # per answer, to measure the target's speed
TRIED_PASSES = 2


def plan(run: Run) -> dict[str, Any]:
    """Estimates of tokens, memory, disk and time for this machine and one process. Missing answers are assumed to have
    the maximal length. Speeds are measured with the real target and new weights. Refuses the same settings as a run
    does before it makes answers."""
    items = read_workloads(list(run.prompts))
    check(run, items)
    target, codec = frozen_target(run, run.device)
    turns, scale = sum(len(item.turns) for item in items), 1.0
    if run.answers is not None:
        samples, chosen = sequences(run, items, path_of(run.answers), target, codec)
        kept = samples.without(chosen)
        count = len(kept)
    else:
        samples = longest_samples(items, codec, run.settings.regenerate.max_new_tokens, longest_of(run, target))
        out = held_out_ids((item.id for item in items), run.settings.data.held_out_of(len(items)))
        kept, count = list(range(len(samples))), sum(len(item.turns) for item in items if item.id not in out)
        scale = turns / len(samples)
    objective = build(run, target, codec, samples, ()).to(target.device)
    stored = None
    if run.features is not None and run.answers is not None:
        longest, about = longest_of(run, target), read_about(path_of(run.answers))
        stored = stored_features(run.features, objective.taps, target, samples, longest, about)
    training = run.settings.training
    sampler = BatchSampler(tuple(kept), training.batch_size, training.micro_batch_size, training.seed)
    steps = max(1, -(-round(training.epochs * count) // training.batch_size))
    steps = min(steps, training.max_steps or steps)
    # Measured before `answer_seconds` loads another copy of the target.
    per_pass, memory = try_training(objective, samples, sampler, training, stored)
    seconds = {"training": per_pass * sampler.passes * steps}
    if run.answers is None:
        answers = answer_seconds(run, items, turns, samples.supervised * scale)
        seconds = {"answers": answers} | seconds  # in the order of a run's stages
    supervised = round(samples.supervised * scale)
    return {
        "settings": run.settings.model_dump(mode="json", serialize_as_any=True),  # first: the estimates stay in view
        "method": run.method,
        "device": str(target.device),
        "parameters": sum(weight.numel() for weight in objective.net.parameters()),
        "sequences": round(len(samples) * scale),
        "tokens": {"per_epoch": round(int(samples.lengths.sum()) * scale), "supervised": supervised},
        "steps": steps,
        "memory_gb": round(memory / 1e9, 3),
        "disk_gb": round((disk_needed(objective, training.keep) + 2 * supervised) / 1e9, 3),
        "hours": {name: round(value / 3600, 4) for name, value in seconds.items()},
    }


def longest_samples(items: Sequence[WorkItem], codec: TextCodec, answer: int, max_length: int) -> SampleSet:
    """First turns of some prompts, with answers of the maximal length, made of the prompts' tokens."""
    made = []
    for item in items[:SHOWN_PROMPTS]:
        prompt = torch.tensor(encoded(item.prompt(0, []), codec))
        ids = torch.cat([prompt, prompt.repeat(1 + answer // len(prompt))[:answer]])[:max_length]
        if len(ids) > len(prompt):
            made.append(TrainingSample(f"{item.id}/0", ids, torch.arange(len(ids)) >= len(prompt)))
    if not made:
        raise InvalidRequest(f"data.max_length={max_length}: no prompt is short enough; allow longer sequences")
    return SampleSet(made)


def try_training(
    objective: Objective,
    samples: SampleSet,
    sampler: BatchSampler,
    settings: TrainingSettings,
    stored: Callable[[str], Tensor] | None = None,
) -> tuple[float, float]:
    """Seconds per forward and backward pass, and peak bytes of memory, target and optimizer included. `stored`: as of
    `TrainingData`."""
    optimizers = make_optimizers(objective.net, settings)
    target, times = objective.target, []
    is_gpu = target.device.type == "cuda"
    precision = training_precision(settings.precision, target.device)
    examples, size = TrainingData(samples, (), stored), sampler.micro_batch_size
    for at in range(TRIED_PASSES + 1):  # the first one warms up
        started = perf_counter()
        chosen = [examples[sampler.indices[(at * size + place) % len(sampler.indices)], 0] for place in range(size)]
        batch = collate_examples(0, chosen).to(target.device)
        if stored is None:
            batch = replace(batch, features=target.features(batch.ids, batch.lengths, objective.taps))
        with torch.autocast(target.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            terms = objective(batch, 0.5)
        (terms["loss"] / terms["weight"]).backward()
        step_all(optimizers)
        if is_gpu:
            torch.cuda.synchronize(target.device)
        times.append(perf_counter() - started)
    if is_gpu:
        return sum(times[1:]) / TRIED_PASSES, float(torch.cuda.max_memory_allocated(target.device))
    return sum(times[1:]) / TRIED_PASSES, most_memory()


def most_memory() -> float:
    """The peak memory of this process, in bytes."""
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset)
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)


def answer_seconds(run: Run, items: Sequence[WorkItem], turns: int, tokens: float) -> float:
    """Seconds that the target takes to answer this many turns with this many tokens in all, in full batches."""
    how = run.settings.regenerate
    options: dict[str, Any] = {"dtype": run.dtype, "device": run.device, "max_num_seqs": how.batch_size}
    model = load(run.target, "plain", enable_prefix_caching=False, **options)
    encoded, most = (model.encode(item.prompt(0, [])) for item in items), model.target.max_length - 1 - TRIED_TOKENS
    prompts = list(islice((ids for ids in encoded if len(ids) <= most), how.batch_size))  # runs leave out others
    if not prompts:
        return 0.0
    seconds = []
    # The first call warms up, since a GPU records its passes once. Then come prompts alone, and prompts with answers.
    for length in (1 + TRIED_TOKENS, 1, 1 + TRIED_TOKENS):
        started = perf_counter()
        model.generate(prompts, SamplingParams(max_new_tokens=length, ignore_eos=True))
        seconds.append((perf_counter() - started) / len(prompts))
    _, alone, longer = seconds
    return turns * alone + tokens * max(0.0, longer - alone) / TRIED_TOKENS
