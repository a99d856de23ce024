"""A training run, from names to a drafter: answers, sequences, target, objective, trainer."""

import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from outpace.api import load
from outpace.bench.environment import host
from outpace.data.answers import read_about, read_answers
from outpace.data.workload import WorkItem, read_workloads
from outpace.drafters.convert import settings_in
from outpace.drafters.kinds import kind_of
from outpace.drafters.load import PROVENANCE, load_net, locate
from outpace.drafters.ranked_vocabulary import FILE_NAME, load_vocabulary
from outpace.drafters.training.objective import Objective
from outpace.drafters.training.settings import TrainSettings, training_of
from outpace.lib.checkpoint import read_checkpoint
from outpace.lib.checks import path_of
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.stages import Progress, loading
from outpace.models.frozen import FrozenTarget
from outpace.models.loading.load import load_target, load_vocabulary_facts
from outpace.models.loading.precision import choose_device, choose_dtype, compute_dtype
from outpace.models.loading.shipped import find_drafter
from outpace.models.tokenizer import TextCodec
from outpace.train.answers import EngineAnswerer, check_made, regenerate, sampling_of, store_for
from outpace.train.data import BatchSampler, SampleSet, TrainingData, by_id, training_samples
from outpace.train.features import FeatureStore, about_features, capture, check_stored, stored_features
from outpace.train.records import check_disk, claim, files_hash, prompts_hash
from outpace.train.trainer import DRAFTER, STATES, Trainer

ANSWERS = "answers"
# Settings that may change when a run resumes: they do not change the learned weights, except by rounding.
FREE = {"training": {"keep", "save_every", "micro_batch_size"}, "data": {"workers"}}
LENGTH = {"epochs", "max_steps"}  # may also change if the learning rate so far does not depend on them
PACKAGES = ("outpace", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "tensorboard")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
FILES = ("*.json", *WEIGHTS)
# glibc's M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD (malloc.h): nothing is mapped apart, little is returned.
MALLOC = {-4: 0, -1: 2**31 - 1, -2: 1 << 28}


@dataclass(frozen=True)
class Run:
    """What to train.

    Attributes:
        method: kind of drafter to train.
        target: folder, GGUF file, pulled name or hub id.
        prompts: workload specs; with `answers`, the prompts that were answered.
        answers: folder of regenerated answers; None makes them first, in the run's folder.
        out: folder of the run.
        device, dtype: of the target; "auto" or a name.
        settings: everything else.
        features: folder of captured features; None computes them during training.
        start: folder or hub id of a drafter to start from; None for new weights.
    """

    method: str
    target: str
    prompts: tuple[str, ...]
    answers: str | None
    out: Path
    device: str
    dtype: str
    settings: TrainSettings
    features: str | None = None
    start: str | None = None


def train(
    run: Run,
    report: Callable[[Mapping[str, Any]], None],
    progress: Progress,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Train a drafter; an interrupted run resumes.

    Args:
        run: what to train.
        report: gets the step at which the run starts, then the log line of each step and measurement.
        progress: makes a progress bar, of the prompts that the target answers first.
        note: gets messages for the user: prompts that were left out, and why.

    Returns:
        As `Trainer.run`, with the folder of the drafter and the number of steps.

    Raises:
        OutpaceError: prompts, answers, settings or a folder that do not fit, a disk that is too small.
    """
    reuse_freed_memory()
    accelerator = _accelerator(run)
    items = read_workloads(list(run.prompts))
    check(run, items, accelerator.num_processes)
    folder = _answers_of(run, items, accelerator.num_processes, progress, note)
    target, codec = frozen_target(run, str(accelerator.device), accelerator.is_main_process)
    samples, held_out = sequences(run, items, folder, target, codec)
    if accelerator.is_main_process and (left_out := len(items) - samples.prompts):
        note(
            f"{left_out} of {len(items)} prompts are left out: they have no answers, or none within data.max_length="
            f"{run.settings.data.max_length} tokens"
        )
    torch.manual_seed(run.settings.training.seed)
    objective = build(run, target, codec, samples, held_out)
    if run.start is not None:
        begin_with(objective, run.start)
    if accelerator.is_main_process:
        run.out.mkdir(parents=True, exist_ok=True)
        needed = disk_needed(objective, run.settings.training.keep) - _stored(run.out)
        check_disk(run.out, needed, "states and drafter")
        length = run.settings.training.model_dump(include=LENGTH)
        about = {**_notes(accelerator), "data": _sizes(samples, held_out), "length": length}
        count = run.settings.data.held_out_of(samples.distinct)
        claim(run.out, _dependencies(run, items, folder, codec, count), about)
    accelerator.wait_for_everyone()
    accelerator.init_trackers("tensorboard")
    stored = None
    if run.features is not None:
        longest = longest_of(run, target)
        stored = stored_features(run.features, objective.taps, target, samples, longest, read_about(folder))
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


def capture_features(run: Run, dtype: str, note: Callable[[str], None], progress: Progress) -> dict[str, Any]:
    """Store the features that a method reads, for runs with `features`.

    Args:
        run: with answers; `out` is the folder of features.
        dtype: to store them in, a key of `features.DTYPES`.
        note: gets the size, before anything is written.
        progress: makes a progress bar.

    Returns:
        "captured", "before" and "bytes".

    Raises:
        OutpaceError: as `train`.
    """
    assert run.answers is not None, "the command requires them"
    items, answers = read_workloads(list(run.prompts)), path_of(run.answers)
    check(run, items)
    check_stored(dtype)
    target, codec = frozen_target(run, str(choose_device(run.device)))
    samples, held_out = sequences(run, items, answers, target, codec)
    objective = build(run, target, codec, samples, held_out)
    about = about_features(run.target, target, objective.taps, dtype, read_about(answers), longest_of(run, target))
    store, tokens = FeatureStore(run.out, about), int(samples.lengths.sum())
    size, before = store.bytes_of(tokens), len(store)
    note(f"{len(samples)} sequences, {tokens} tokens: {size / 1e9:.3f} GB in {dtype}")
    captured = capture(samples, target, store, objective.taps, progress)
    return {"captured": captured, "before": before, "bytes": size}


def check(run: Run, items: Sequence[WorkItem], processes: int = 1) -> None:
    """Refuse invalid settings before the target is loaded and answers are made, which may take hours."""
    prompts = len({item.digest for item in by_id(items).values()})  # those that ask the same are held out together
    training, held_out = run.settings.training, run.settings.data.held_out_of(prompts)
    BatchSampler((), training.batch_size, training.micro_batch_size, training.seed, processes=processes)
    if held_out >= prompts:
        raise InvalidRequest(
            f"data.held_out={held_out}: leaves nothing of {prompts} different prompts to train on; give more prompts "
            "or hold out fewer"
        )
    if run.answers is not None:
        check_made(run.answers, run.settings.regenerate)
    if run.start is not None:
        locate(find_drafter(run.start), FILES, "start")
    if run.features is not None:
        FeatureStore.existing(run.features)


def _answers_of(
    run: Run,
    items: Sequence[WorkItem],
    processes: int,
    progress: Progress,
    note: Callable[[str], None],
) -> Path:
    """The folder of answers to train on; made or completed first if the run names none."""
    if run.answers is not None:
        return path_of(run.answers)
    how, folder = run.settings.regenerate, run.out / ANSWERS
    if (run.out / PROVENANCE).is_file():  # a resumed run trains on the answers that it began with
        return folder
    if processes > 1:
        raise InvalidRequest(
            "answers: several processes train together, but answers are made by one; make them first with `outpace "
            "train regenerate` and name their folder with --answers"
        )
    params = sampling_of(how)
    facts = load_vocabulary_facts(run.target)
    store = store_for(folder, items, run.target, facts=facts, params=params, endpoint=None, dtype=run.dtype)
    if missing := {item.id for item in items} - store.done.keys():
        model = load(
            run.target, "plain", dtype=run.dtype, device=run.device, max_num_seqs=how.batch_size, progress=True
        )
        answerer = EngineAnswerer(model, params)
        with progress("answers", len(missing)) as advance:
            for _ in regenerate(items, store, answerer):
                advance()
        for name, reason in answerer.cut.items():
            note(f"cut {name}: {reason}")
    return folder


def frozen_target(run: Run, device: str, is_main: bool = True) -> tuple[FrozenTarget, TextCodec]:
    """The target, for training on this process's device."""
    with loading(run.target, is_shown=is_main):  # processes of a run share a terminal
        rows = run.settings.training.micro_batch_size
        # Devices allocate keys and values at once; for the target's own length limit they would take most of the
        # memory.
        target, codec = load_target(run.target, run.dtype, device, None, rows, longest=run.settings.data.max_length)
    return FrozenTarget(target), codec


def longest_of(run: Run, target: FrozenTarget) -> int:
    """The maximal tokens of a sequence."""
    return min(run.settings.data.max_length, target.max_length)


def sequences(
    run: Run, items: Sequence[WorkItem], answers: Path, target: FrozenTarget, codec: TextCodec
) -> tuple[SampleSet, tuple[int, ...]]:
    """A run's sequences, and which are held out."""
    samples = join(items, answers, codec, target.vocab_size, longest_of(run, target))
    return samples, samples.held_out(run.settings.data.held_out_of(samples.distinct))


def join(items: Sequence[WorkItem], folder: Path, codec: TextCodec, vocab_size: int, max_length: int) -> SampleSet:
    """The sequences of answers and their prompts."""
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
    settings = run.settings
    special = sorted(set(codec.tokenizer.all_special_ids))
    facts = samples.facts(samples.without(held_out), target.vocab_size, special)
    make = training_of(run.method).build
    objective: Objective = make(settings.net, settings.objective, target, facts, settings.training.seed)
    return objective


def disk_needed(objective: Objective, keep: int) -> int:
    """Bytes of states and drafters: a weight and two moments per parameter, and one more state being written."""
    parameters = sum(weight.numel() for weight in objective.net.parameters())
    return parameters * (12 * (keep + 1) + 2 * 4)


def _stored(out: Path) -> int:
    """Bytes of the states and drafters that a run has already written, which later ones replace."""
    files = (file for name in (STATES, DRAFTER) for file in (out / name).rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


def answers_hash(folder: Path) -> str:
    """SHA-256 of a folder of answers."""
    return files_hash(sorted(folder.glob("part-*.safetensors")))


def _dependencies(
    run: Run, items: Sequence[WorkItem], answers: Path, codec: TextCodec, held_out: int
) -> dict[str, Any]:
    """The settings and data that the drafter depends on, for its provenance. `held_out`: number of held-out prompts."""
    settings = run.settings.model_dump(mode="json", serialize_as_any=True)
    settings["data"]["held_out"] = held_out
    for section, names in FREE.items():
        settings[section] = {name: value for name, value in settings[section].items() if name not in names}
    if run.settings.training.schedule == "wsd":
        settings["training"] = {name: value for name, value in settings["training"].items() if name not in LENGTH}
    return {
        "method": run.method,
        "target": run.target,
        "chat_template": codec.template_fingerprint(),
        "prompts": {"names": list(run.prompts), "sha256": prompts_hash(items)},
        "answers": {"about": read_about(answers), "sha256": answers_hash(answers)},
        "features": run.features,
        "start": None if run.start is None else {"name": run.start, "sha256": weights_hash(run.start)},
        "dtype": run.dtype,
        "settings": settings,
    }


def _sizes(samples: SampleSet, held_out: Sequence[int]) -> dict[str, int]:
    """The amount of training data."""
    kept = samples.without(held_out)
    return {
        "sequences": len(kept),
        "tokens": int(samples.lengths[kept].sum()),
        "supervised": sum(int(samples[index].mask.sum()) for index in kept),
        "held_out": len(held_out),
    }


def _notes(accelerator: Accelerator) -> dict[str, Any]:
    """Facts about this start of the run that do not affect the drafter."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **host(*PACKAGES),
        "processes": accelerator.num_processes,
        "device": str(accelerator.device),
        "precision": accelerator.mixed_precision,
    }


def reuse_freed_memory() -> None:
    """Let glibc keep freed memory. A step allocates and frees the same large tensors; by default the kernel provides
    and clears new pages each time, a tenth of a step on two cores. Other C libraries ignore this."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, value in MALLOC.items():
            mallopt(option, value)


def training_precision(wanted: str, device: torch.device) -> str:
    """The precision to compute in: "auto" is bfloat16 if the hardware multiplies it, else float32."""
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
    # Every process needs the whole target. `accelerate launch --use_fsdp` turns this on, and transformers would then
    # fill the target with zeros in all processes but the first.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    # All accelerators of a process share precision and device; those of an earlier run must not apply.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    return Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="bf16" if precision == "bfloat16" else "no",
        log_with="tensorboard",
        project_dir=str(run.out),
    )


def begin_with(objective: Objective, folder: str) -> None:
    """Fill a new drafter with the weights of one of the same kind and sizes; Domino also starts from DFlash. If the
    loss compares as many ids as the earlier drafter drafts, it compares that drafter's ids: other answers may have
    other frequent ids, whose rows of the head were never trained. `folder`: of the drafter, such as `OUT/drafter` of an
    earlier run; or a hub id, or a shipped drafter's name."""
    net, found = objective.net, find_drafter(folder)
    is_drafter = hasattr(net, "config")
    if is_drafter:
        read = load_net(found)
        tensors, described, own = dict(read.state_dict()), settings_in(read), settings_in(net)
        if described.get("target_layers", 0) is None:
            del described["target_layers"]  # files may leave out target_layers and taps
        if described.get("taps", ()) is None and own.get("taps") is not None:  # DART's layouts do not name taps
            described["taps"] = read.config.taps_of(objective.target.layers)  # type: ignore[union-attr, operator]
    else:  # a language model
        described = own = {}
        tensors = {f"model.{name}": one for name, one in read_checkpoint(locate(found, FILES, "start")).tensors.items()}
    ranked, file = objective.vocabulary.ranked, locate(found, FILES, "start") / FILE_NAME
    if ranked is not None and file.is_file():
        ids: Tensor = load_vocabulary(file, objective.target.vocab_size).to(ranked.device)
        if len(ids) == len(ranked):
            objective.compare(objective.vocabulary.of(ids))
    tensors = objective.narrowed(tensors)
    wrong = [
        f"{name}={described[name]!r} there, {own[name]!r} here"
        for name in sorted(described.keys() & own.keys())
        if described[name] != own[name]
    ]
    here = net.state_dict()
    may_lack = kind_of(net).new if is_drafter else None
    given = {here[name].data_ptr() for name in tensors.keys() & here.keys()}  # files hold tied weights once
    wrong += [
        f"{name} is missing there"
        for name, weight in here.items()
        if weight.data_ptr() not in given and not (may_lack and name.startswith(may_lack))
    ]
    wrong += [f"{name} is unknown here" for name in sorted(tensors.keys() - here.keys())]
    wrong += [
        f"{name} is {list(tensors[name].shape)} there, {list(here[name].shape)} here"
        for name in sorted(tensors.keys() & here.keys())
        if tensors[name].shape != here[name].shape
    ]
    if wrong:
        raise InvalidRequest(f"start={folder!r}: {'; '.join(wrong[:8])}; give the same kind and the same net settings")
    with torch.no_grad():
        for name, tensor in tensors.items():
            here[name].copy_(tensor)


def weights_hash(folder: str) -> str:
    """SHA-256 of the files with a drafter's weights."""
    found = locate(find_drafter(folder), FILES, "start")
    files = sorted({path for pattern in WEIGHTS for path in found.glob(pattern)} - {found / FILE_NAME})
    if not files:
        raise ModelError(f"start={folder!r}: no file of weights there ({', '.join(WEIGHTS)})")
    return files_hash(files)
