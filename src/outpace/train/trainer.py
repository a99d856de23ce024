"""The trainer: one loop over optimizer steps for every objective, resumable to the bit.

Losses are sums. Their gradients are divided by the weight of the whole step, over all passes and processes, so neither
the number of processes nor the size of a pass changes what is learned.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup, get_wsd_schedule

from outpace.drafters.training.batch import Batch, all_anchors, sample_seed
from outpace.drafters.training.objective import Objective
from outpace.drafters.training.settings import TrainingSettings
from outpace.lib.errors import ModelError, first_line
from outpace.models.loading.precision import compute_dtype
from outpace.train.data import BatchSampler, TrainingData, collate_examples
from outpace.train.records import RunLog, States, read_counters, replace_folder, scalars

STATES, DRAFTER = "states", "drafter"
# These matrices are looked up or scored row by row, so Muon does not suit their gradients.
BY_ROW = (
    "embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out", "embed_proj.2", "predecessors", "successors",
)  # fmt: skip
MOMENTUM = 0.95
FALL, LOWEST = 0.2, 0.1  # of the schedule "wsd": share of the steps that fall, lowest share of the rate
ANCHORS_AT_ONCE = 256


class Float32Muon(Muon):
    """Muon with products in float32, for processors without bfloat16 instructions; torch's Muon multiplies in bfloat16.
    Updates are scaled to the size of AdamW's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update weights by their gradients; a closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight in (one for one in group["params"] if one.grad is not None):
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                mean = state["momentum_buffer"]
                mean.lerp_(weight.grad, 1 - momentum)
                update = _orthogonalized(weight.grad.lerp(mean, momentum), group["ns_coefficients"], group["ns_steps"])
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(update, alpha=-0.2 * rate * math.sqrt(max(weight.shape)))


def _orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """About U V^T of a matrix U S V^T, by Newton-Schulz iterations (Jordan et al., Muon, 2024)."""
    a, b, c = coefficients
    found = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix  # the smaller products of the two
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if matrix.shape[0] > matrix.shape[1] else found


def make_optimizers(net: nn.Module, rates: TrainingSettings) -> list[Optimizer]:
    """AdamW for everything; or Muon for matrices and AdamW for the rest. Muon's updates are scaled to the size of
    AdamW's, so one learning rate fits both (arXiv 2502.16982, 2.2)."""

    def is_matrix(name: str, weight: Tensor) -> bool:
        return rates.optimizer == "muon" and weight.ndim == 2 and not any(part in name for part in BY_ROW)

    trained = [(name, weight) for name, weight in net.named_parameters() if weight.requires_grad]
    matrices = [weight for name, weight in trained if is_matrix(name, weight)]
    rest = [weight for name, weight in trained if not is_matrix(name, weight)]
    rate, decay = rates.learning_rate, rates.weight_decay
    made: list[Optimizer] = []
    if matrices:
        in_float32 = compute_dtype(torch.bfloat16, matrices[0].device) == torch.float32
        kind = Float32Muon if in_float32 else Muon
        made.append(kind(matrices, lr=rate, weight_decay=decay, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"))
    if rest:
        made.append(AdamW(rest, lr=rate, betas=rates.betas, weight_decay=decay, fused=True))
    return made


def schedule_of(optimizer: Optimizer, settings: TrainingSettings, steps: int) -> LRScheduler:
    """The schedule of the learning rate over this many steps."""
    warmup = math.ceil(settings.warmup_ratio * steps)
    made: LRScheduler
    if settings.schedule == "cosine":
        made = get_cosine_schedule_with_warmup(optimizer, warmup, steps)
    else:
        fall = min(math.ceil(FALL * steps), steps - warmup)
        made = get_wsd_schedule(
            optimizer, warmup, fall, num_training_steps=steps, decay_type="linear", min_lr_ratio=LOWEST
        )
    return made


def step_all(optimizers: Iterable[Optimizer]) -> None:
    """One step of each optimizer; gradients are cleared."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@dataclass
class Simulation:
    """Counts of simulated rounds: greedy chains of drafts, verified against the target's answers.

    Attributes:
        tokens: number generated in rounds, bonus tokens included; an answer's first token comes from the prompt's pass.
        reached: [depth] how often all drafts before depth k + 1 were accepted.
        accepted: [depth] how often the draft at depth k + 1 was accepted as well.
    """

    tokens: int = 0
    rounds: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def by_position(self) -> list[float]:
        """Acceptance at depths from 1, given that all earlier drafts are accepted."""
        return [right / seen if seen else 0.0 for right, seen in zip(self.accepted, self.reached, strict=True)]

    def walk(self, hits: Tensor, length: int) -> None:
        """Simulate the rounds of one answer. `hits`: [M, depth] bool, of the answer's tokens 0 to M - 1 as anchors.
        `length`: tokens of the answer, M + 1."""
        depth = hits.shape[1]
        self.reached += [0] * (depth - len(self.reached))
        self.accepted += [0] * (depth - len(self.accepted))
        runs = hits.int().cumprod(dim=1).sum(dim=1).tolist()  # [M]
        at = 0
        while at < length - 1:
            left = length - 1 - at
            run = min(runs[at], left)
            for k in range(min(run + 1, depth, left)):
                self.reached[k] += 1
                self.accepted[k] += k < run
            emitted = min(run + 1, left)  # the bonus, unless the answer ends before it
            self.tokens, self.rounds, at = self.tokens + emitted, self.rounds + 1, at + emitted

    def over_processes(self, accelerator: Accelerator, depth: int) -> "Simulation":
        """The sum over all processes."""
        counts = torch.zeros(2 + 2 * depth, dtype=torch.int64)
        counts[0], counts[1] = self.tokens, self.rounds
        counts[2 : 2 + len(self.reached)] = torch.tensor(self.reached, dtype=torch.int64)
        counts[2 + depth : 2 + depth + len(self.accepted)] = torch.tensor(self.accepted, dtype=torch.int64)
        tokens, rounds, *rest = accelerator.reduce(counts.to(accelerator.device), "sum").tolist()
        return Simulation(tokens, rounds, rest[:depth], rest[depth:])


@torch.no_grad()
def simulate(objective: Objective, batches: Iterable[Batch]) -> Simulation:
    """Simulate drafting on all answers of batches with features, without an engine."""
    total = Simulation()
    for batch in batches:
        anchors = all_anchors(batch)
        if not len(anchors):
            continue
        hits = torch.cat([objective.hits(batch, group) for group in anchors.split(ANCHORS_AT_ONCE)])
        for row in range(len(batch.ids)):
            own = hits[anchors.rows == row].cpu()
            if len(own):
                total.walk(own, len(own) + 1)
    return total


@contextmanager
def _unsharded(module: nn.Module) -> Iterator[None]:
    """Gather the weights that FSDP distributed over processes, for calls other than `forward`."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


class Trainer:
    """Trains an objective.

    Args:
        objective: a drafter in float32.
        folder: of the run, for states, log and the best drafter so far.
        write: writes a drafter's tensors, named as in `objective.net`, into an empty folder in its public layout.
    """

    def __init__(
        self,
        objective: Objective,
        data: TrainingData,
        settings: TrainingSettings,
        folder: Path,
        accelerator: Accelerator,
        write: Callable[[Mapping[str, Tensor], Path], None],
        report: Callable[[Mapping[str, Any]], None] = lambda shown: None,
    ) -> None:
        self._objective, self._data, self._settings, self._folder = objective, data, settings, folder
        self._accelerator, self._write, self._report = accelerator, write, report
        self.sampler = BatchSampler(
            tuple(data.samples.without(data.held_out)),
            settings.batch_size,
            settings.micro_batch_size,
            settings.seed,
            accelerator.process_index,
            accelerator.num_processes,
        )
        steps = self.sampler.steps(settings.epochs)
        self.steps = min(steps, settings.max_steps or steps)
        made = make_optimizers(objective.net, settings)
        if accelerator.is_fsdp2:
            # Accelerate's policy casts losses, their weights and gradients to bfloat16, and adds passes up in it.
            # Autocast alone computes in bfloat16 (see `_train_step`), as with a single process.
            accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
        self._module, *self._optimizers = accelerator.prepare(objective, *made)
        self._schedules = [schedule_of(optimizer, settings, self.steps) for optimizer in made]
        accelerator.register_for_checkpointing(*self._schedules)
        self._states, self._log = States(folder / STATES, settings.keep), RunLog(folder)
        self._choosing, self._quoted = data.samples.halves(data.held_out)
        self._step, self._best = 0, 0.0
        self._measured, self._saved = 0, 0  # the last measured step, and the last stored one
        self._is_whole = True  # between two steps, until weights change
        self._figure = 0.0  # tokens per step of the written drafter, on the prompts that did not choose it

    def run(self) -> dict[str, Any]:
        """Train to the end, resuming from the latest state; Ctrl-C stores a state first. Returns "step" and "best"
        (tokens per step of the written drafter, on held-out prompts that did not choose it)."""
        self._resume()
        self._report({"step": self._step, "steps": self.steps})
        try:
            self._loop()
        except (KeyboardInterrupt, SystemExit):
            # With several processes, the others may be in another step.
            if self._is_whole and self._step and self._accelerator.num_processes == 1:
                self._save()
                self._report({"step": self._step, "steps": self.steps, "stored": True})
            raise
        return {"step": self._step, "best": self._figure}

    def _loop(self) -> None:
        """Make the remaining steps."""
        self._finish_step()
        passes = iter(self._loader())
        while self._step < self.steps:
            started = perf_counter()
            shown = self._train_step(passes)
            self._record({"step": self._step + 1, **shown, "seconds": perf_counter() - started})
            self._step += 1
            self._is_whole = True
            self._finish_step()

    def _finish_step(self) -> None:
        """Measure and store what is due, also after an interruption."""
        if self._step > self._measured and self._is_due("evaluate_every"):
            self._measure()
        if self._step > self._saved and self._is_due("save_every"):
            self._save()

    def _is_due(self, setting: str) -> bool:
        """Whether an action is due after this step. `setting`: the one with the action's interval."""
        return self._step % self._settings.steps_between(setting, self.steps) == 0 or self._step == self.steps

    def _loader(self) -> Iterator[Batch]:
        places = self.sampler.micro_batches(self._data.samples, self._step, self.steps)
        join = partial(collate_examples, self._settings.seed)
        # Without a generator a loader would draw a seed from the global one.
        generator = torch.Generator().manual_seed(0)
        loader = DataLoader(
            self._data, batch_sampler=places, collate_fn=join, num_workers=self._data.workers, generator=generator
        )
        yield from loader

    def _train_step(self, passes: Iterator[Batch]) -> dict[str, float]:
        """One optimizer step; returns the means of the objective's terms."""
        sums: dict[str, Tensor] = {}
        count, accelerator = self.sampler.passes, self._accelerator
        seed = sample_seed(self._settings.seed, self._step, "")
        for at in range(count):
            batch = replace(self._with_features(next(passes)), step_seed=seed)
            # Gradients of several passes are reduced over processes once, with the last.
            with nullcontext() if at + 1 == count else accelerator.no_sync(self._module):
                with accelerator.autocast():  # which Accelerate adds itself, but not under FSDP
                    terms = self._module(batch, self._step / self.steps)
                accelerator.backward(terms["loss"])
            for name, value in terms.items():
                sums[name] = sums.get(name, torch.zeros_like(value.detach())) + value.detach()
        sums = accelerator.reduce(sums, "sum")
        weight = float(sums.pop("weight"))
        if not math.isfinite(float(sums["loss"])):
            raise ModelError(
                f"step {self._step + 1}: the loss is {float(sums['loss'])}; train in a new folder with a smaller "
                f"training.learning_rate than {self._settings.learning_rate}, or with training.precision=float32; "
                f"--start {self._folder / DRAFTER} begins with the best drafter so far, if there is one"
            )
        self._divide_gradients(weight)
        self._is_whole = False
        norm = accelerator.clip_grad_norm_(self._module.parameters(), self._settings.clip)
        rate = float(self._schedules[0].get_last_lr()[0])
        step_all(self._optimizers)
        for schedule in self._schedules:
            schedule.step()
        means = {name: float(value) / max(weight, 1e-12) for name, value in sums.items()}
        return {**means, "learning_rate": rate, "gradient_norm": float(norm)}

    def _divide_gradients(self, weight: float) -> None:
        """Divide by the step's weight; reduced gradients are means over processes of sums over sequences."""
        factor = self._accelerator.num_processes / max(weight, 1e-12)
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _with_features(self, batch: Batch) -> Batch:
        target = self._objective.target
        batch = batch.to(target.device)
        if self._data.stored is not None:
            return batch
        # In the target's own precision also where a measurement computes in the training's.
        with torch.autocast(target.device.type, enabled=False):
            return replace(batch, features=target.features(batch.ids, batch.lengths, self._objective.taps))

    def _measure(self) -> None:
        """Simulate on held-out sequences, and write the drafter if it is the best so far on the choosing half."""
        rate, played = self._simulated(self._choosing).tokens_per_step, self._simulated(self._quoted)
        if rate > self._best:
            with self._accelerator.autocast(), _unsharded(self._module):
                self._objective.calibrate(self._batches(self._choosing))
            self._export()
            self._best, self._figure = rate, played.tokens_per_step
        self._measured = self._step
        shown = {"tokens_per_step": played.tokens_per_step, "by_position": played.by_position, "best": self._figure}
        self._record({"step": self._step, "held_out": shown, "chosen_by": {"tokens_per_step": rate}})

    def _simulated(self, indices: Sequence[int]) -> Simulation:
        """The simulation of some sequences, over all processes."""
        accelerator = self._accelerator
        own = indices[accelerator.process_index :: accelerator.num_processes]
        with accelerator.autocast(), _unsharded(self._module):
            played = simulate(self._objective, self._batches(own))
            return played.over_processes(accelerator, self._objective.depth)

    def _batches(self, indices: Sequence[int]) -> Iterator[Batch]:
        """Some sequences, with features."""
        size = self._settings.micro_batch_size
        for start in range(0, len(indices), size):
            group = [self._data[index, 0] for index in indices[start : start + size]]
            yield self._with_features(collate_examples(0, group))

    def _export(self) -> None:
        """Replace the written drafter by the current one."""
        state = self._accelerator.get_state_dict(self._module)
        if self._accelerator.is_main_process:
            tensors = {name.removeprefix("net."): tensor.detach().cpu() for name, tensor in state.items()}
            scratch = self._states.scratch()
            self._write(tensors, scratch)
            replace_folder(scratch, self._folder / DRAFTER)
        self._accelerator.wait_for_everyone()

    def _save(self) -> None:
        accelerator = self._accelerator
        counters = {"best": self._best, "figure": self._figure, "measured": self._measured}
        if accelerator.is_main_process:
            self._states.scratch()
        accelerator.wait_for_everyone()
        try:
            # On CUDA a GRU's weights share one buffer, and safetensors would store only one of them.
            accelerator.save_state(str(self._states.unfinished), safe_serialization=False)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError on a full disk
            raise ModelError(
                f"{self._states.unfinished}: cannot be written ({first_line(error)}); free some space and run the same "
                "command again"
            ) from error
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            self._states.finish(self._step, counters)
        accelerator.wait_for_everyone()
        self._saved = self._step

    def _resume(self) -> None:
        state = self._states.latest()
        if state is not None:
            counters = read_counters(state)
            try:
                self._accelerator.load_state(str(state))
            except Exception as error:
                raise ModelError(
                    f"{state}: cannot be read ({first_line(error)}); delete it to resume from the one before"
                ) from error
            for schedule in self._schedules:  # for an extended run, the state has the rate of the old end
                schedule.last_epoch -= 1
                schedule.step()
            self._step, self._best, self._figure = counters["step"], counters["best"], counters["figure"]
            self._saved, self._measured = self._step, counters.get("measured", self._step)
        if self._accelerator.is_main_process:
            self._log.cut(self._step)

    def _record(self, shown: Mapping[str, Any]) -> None:
        if self._accelerator.is_main_process:
            self._log.write(shown)
            self._accelerator.log(scalars(shown), step=int(shown["step"]))
            self._report({**shown, "steps": self.steps})
