"""A training run from names to a drafter: answers, sequences, target, objective, trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from outpace.api import load
from outpace.core.params import SamplingParams
from outpace.data.answers import AnswerStore, Conversation, read_about, read_answers
from outpace.data.workload import WorkItem, read_workloads
from outpace.drafters.trainable import training_of
from outpace.drafters.training.objective import Objective
from outpace.drafters.training.settings import TrainSettings
from outpace.lib.errors import InvalidRequest
from outpace.lib.paths import path_of
from outpace.lib.stages import loading
from outpace.models.frozen import FrozenTarget
from outpace.models.loading.load import load_target, load_vocabulary_facts
from outpace.models.loading.precision import choose_device, choose_dtype, compute_dtype
from outpace.models.tokenizer import TextCodec
from outpace.train.capture import about_features, capture, stored_features
from outpace.train.data import SampleSet, TrainingData, training_samples
from outpace.train.features_store import FeatureStore
from outpace.train.provenance import claim, files_hash, git_revision, prompts_hash, versions
from outpace.train.regenerate import EngineAnswerer, about_answers, check_templates, regenerate
from outpace.train.start import begin_with, weights_hash
from outpace.train.states import check_disk
from outpace.train.trainer import Trainer

ANSWERS = "answers"
# What may change while a run goes on: none of it changes what is learned, rounding aside.
FREE = {"training": {"keep", "save_every", "micro_batch_size"}, "data": {"workers"}}


@dataclass(frozen=True)
class Run:
    """What the user asked for.

    Attributes:
        method: kind of drafter to train.
        target: folder, GGUF file, pulled name or hub id.
        prompts: workload specs; with `answers`, the ones that were answered.
        answers: folder of regenerated answers; None makes them first, in the run's folder.
        features: folder of captured features; None captures them during training.
        out: folder of the run.
        device, dtype: of the target; "auto" or a name.
        settings: everything else.
        start: folder or hub id of a drafter to begin with; None for new weights.
    """

    method: str
    target: str
    prompts: tuple[str, ...]
    answers: str | None
    features: str | None
    out: Path
    device: str
    dtype: str
    settings: TrainSettings
    start: str | None = None


def train(
    run: Run,
    report: Callable[[Mapping[str, Any]], None],
    answered: Callable[[Conversation | None], None],
    said: Callable[[str], None],
) -> dict[str, Any]:
    """Train a drafter; a run that was stopped goes on.

    Args:
        run: what the user asked for.
        report: gets what each step and measurement has to show.
        answered: gets each conversation that the target answers, and None after the last one.
        said: gets what else a user should know: prompts that were left out, and why.

    Returns:
        What `Trainer.run` says, with the folder of the drafter.

    Raises:
        OutpaceError: prompts, answers, settings or a folder that do not fit, a disk that is too small.
    """
    accelerator = _accelerator(run)
    items = read_workloads(list(run.prompts))
    folder = answers_of(run, items, accelerator.num_processes, answered, said)
    target, codec = frozen_target(run, str(accelerator.device), accelerator.is_main_process)
    longest = min(run.settings.data.max_length, target.max_length)
    samples = join(items, folder, codec, target.vocab_size, longest)
    held_out = samples.held_out(run.settings.data.held_out)
    set_seed(run.settings.training.seed)
    objective = build(run, target, codec, samples, held_out)
    if run.start is not None:
        begin_with(objective, run.start)
    if accelerator.is_main_process:
        run.out.mkdir(parents=True, exist_ok=True)
        check_disk(run.out, disk_needed(objective, run.settings.training.keep), "states and drafter")
        about = {**notes(accelerator), "data": data_of(samples, held_out)}
        claim(run.out, dependencies(run, items, folder, codec), about)
    accelerator.wait_for_everyone()
    accelerator.init_trackers("tensorboard")
    stored = None
    if run.features is not None:
        stored = stored_features(run.features, objective.taps, target, samples, longest)
    data = TrainingData(samples, held_out, stored, run.settings.data.workers)
    write = partial(objective.write, codec=codec, dtype=run.settings.training.dtype)
    trainer = Trainer(
        objective, data, run.settings.training, folder=run.out, accelerator=accelerator, write=write, report=report
    )
    try:
        done = trainer.run()
    finally:
        accelerator.end_training()
    return {**done, "drafter": str(run.out / "drafter"), "steps": trainer.steps}


def capture_features(run: Run, dtype: str, said: Callable[[str], None], done: Callable[[], None]) -> dict[str, Any]:
    """Store the features that a method reads, for runs with `features`.

    Args:
        run: with answers; `out` is the folder of features.
        dtype: to store them in, a key of `features_store.DTYPES`.
        said: gets the size, before anything is written.
        done: called after each sequence.

    Returns:
        "captured", "before" and "bytes".

    Raises:
        OutpaceError: as `train`; a method that reads no features.
    """
    assert run.answers is not None, "the command asks for them"
    items, answers = read_workloads(list(run.prompts)), path_of(run.answers)
    target, codec = frozen_target(run, str(choose_device(run.device)))
    longest = min(run.settings.data.max_length, target.max_length)
    samples = join(items, answers, codec, target.vocab_size, longest)
    objective = build(run, target, codec, samples, samples.held_out(run.settings.data.held_out))
    if not objective.taps:
        raise InvalidRequest(f"method={run.method!r}: reads no features under these settings; train without them")
    hashed = files_hash(sorted(answers.glob("part-*.safetensors")))
    about = about_features(run.target, target, objective.taps, dtype, longest, hashed)
    store = FeatureStore(run.out, about)
    size, before = (
        store.bytes_needed(int(samples.lengths.sum()), about["width"], dtype, len(objective.taps)),
        len(store),
    )
    said(f"{len(samples)} sequences, {int(samples.lengths.sum())} tokens: {size / 1e9:.3f} GB in {dtype}")
    captured = capture(samples, target, store, objective.taps, done)
    return {"captured": captured, "before": before, "bytes": size}


def answers_of(
    run: Run,
    items: Sequence[WorkItem],
    processes: int,
    answered: Callable[[Conversation | None], None],
    said: Callable[[str], None],
) -> Path:
    """The folder of the answers to train on; made or completed first where none was named.

    Raises:
        InvalidRequest: several processes would have to make them.
    """
    if run.answers is not None:
        return path_of(run.answers)
    if processes > 1:
        raise InvalidRequest(
            "answers: several processes train together, but answers are made by one; make them first with `outpace "
            "train regenerate` and name their folder with --answers"
        )
    how, folder = run.settings.regenerate, run.out / ANSWERS
    params = SamplingParams(how.max_new_tokens, how.temperature, how.top_k, how.top_p, how.min_p, seed=how.seed)
    codec, vocab_size, _ = load_vocabulary_facts(run.target)
    check_templates(items, codec, run.target)
    store = AnswerStore(folder, about_answers(run.target, codec, vocab_size, params, None, run.dtype))
    if {item.id for item in items} - store.done:
        model = load(
            run.target, "plain", dtype=run.dtype, device=run.device, max_num_seqs=how.batch_size, progress=True
        )
        answerer = EngineAnswerer(model, params)
        for conversation in regenerate(items, store, answerer):
            answered(conversation)
        for name, reason in answerer.cut.items():
            said(f"cut {name}: {reason}")
        answered(None)
    return folder


def frozen_target(run: Run, device: str, is_main: bool = True) -> tuple[FrozenTarget, TextCodec]:
    """The target as drafters are trained on it, on this process's device."""
    with loading(run.target, is_shown=is_main):  # processes that train together share one terminal
        target, codec = load_target(run.target, run.dtype, device, None, run.settings.training.micro_batch_size)
    return FrozenTarget(target), codec


def join(items: Sequence[WorkItem], folder: Path, codec: TextCodec, vocab_size: int, max_length: int) -> SampleSet:
    """The sequences of answers and their prompts.

    Raises:
        InvalidRequest: answers by another target or under another chat template; no sequences.
    """
    about = read_about(folder)
    ours = {"vocab_size": vocab_size, "chat_template": codec.template_fingerprint()}
    for field, value in ours.items():
        if about.get(field) != value:
            raise InvalidRequest(
                f"answers={str(folder)!r}: made with {field}={about.get(field)!r}, and the target has {value!r}"
            )
    samples = SampleSet(training_samples(items, read_answers(folder), codec, max_length))
    if not len(samples):
        raise InvalidRequest(
            f"answers={str(folder)!r}: no answer is left within data.max_length={max_length} tokens; allow longer ones"
        )
    return samples


def build(run: Run, target: FrozenTarget, codec: TextCodec, samples: SampleSet, held_out: Sequence[int]) -> Objective:
    """The method's objective with a new net."""
    settings, method = run.settings, training_of(run.method)
    special = sorted(set(codec.tokenizer.all_special_ids))
    facts = samples.facts(samples.without(held_out), target.vocab_size, special)
    objective: Objective = method.build(settings.net, settings.objective, target, facts, settings.training.seed)
    return objective


def disk_needed(objective: Objective, keep: int) -> int:
    """Bytes that states and drafters of a run take: a weight and two moments per parameter, one state being written."""
    parameters = sum(weight.numel() for weight in objective.net.parameters())
    return parameters * (12 * (keep + 1) + 2 * 4)


def dependencies(run: Run, items: Sequence[WorkItem], answers: Path, codec: TextCodec) -> dict[str, Any]:
    """What the drafter depends on, for its provenance."""
    settings = run.settings.model_dump(mode="json", serialize_as_any=True)
    for section, names in FREE.items():
        settings[section] = {name: value for name, value in settings[section].items() if name not in names}
    return {
        "method": run.method,
        "target": run.target,
        "chat_template": codec.template_fingerprint(),
        "prompts": {"names": list(run.prompts), "sha256": prompts_hash(items)},
        "answers": {"about": read_about(answers), "sha256": files_hash(sorted(answers.glob("part-*.safetensors")))},
        "features": run.features,
        "start": None if run.start is None else {"name": run.start, "sha256": weights_hash(run.start)},
        "dtype": run.dtype,
        "settings": settings,
    }


def data_of(samples: SampleSet, held_out: Sequence[int]) -> dict[str, int]:
    """How much there is to train on."""
    kept = samples.without(held_out)
    supervised = sum(int(samples[index].mask.sum()) for index in kept)
    return {
        "sequences": len(kept),
        "tokens": int(samples.lengths[kept].sum()),
        "supervised": supervised,
        "held_out": len(held_out),
    }


def notes(accelerator: Accelerator) -> dict[str, Any]:
    """What is worth knowing of a start, besides."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_revision(),
        "versions": versions(),
        "processes": accelerator.num_processes,
        "device": str(accelerator.device),
        "precision": accelerator.mixed_precision,
    }


def training_precision(wanted: str, device: torch.device) -> str:
    """What a run computes in: "auto" is bfloat16 where the hardware multiplies it, whatever weights are kept in."""
    if wanted != "auto":
        return wanted
    computed = compute_dtype(choose_dtype("auto", device), device)
    return "bfloat16" if computed == torch.bfloat16 else "float32"


def _accelerator(run: Run) -> Accelerator:
    device = choose_device(run.device)
    if device.index is not None:
        raise InvalidRequest(
            f"device={run.device!r}: processes take the GPUs they see in order; choose with CUDA_VISIBLE_DEVICES"
        )
    precision = training_precision(run.settings.training.precision, device)
    run.out.mkdir(parents=True, exist_ok=True)
    # Precision and device are shared by all of a process's accelerators: what an earlier run chose is not this one's.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    return Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="bf16" if precision == "bfloat16" else "no",
        log_with="tensorboard",
        project_dir=str(run.out),
    )
