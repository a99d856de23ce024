"""The trainer: one loop over optimizer steps for every objective, resumable to the bit.

Losses come as sums. Gradients of the sums are divided by the weight of the whole step, all passes and processes
together, so that neither the number of processes nor the size of a pass changes what is learned.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from outpace.drafters.training.batch import Batch, sample_seed
from outpace.drafters.training.objective import Objective
from outpace.drafters.training.settings import TrainingSettings
from outpace.lib.errors import ModelError
from outpace.train.data import Deal, Examples, TrainingData, collate_examples
from outpace.train.optimizers import make_optimizers, step_all
from outpace.train.processes import together, whole
from outpace.train.runlog import RunLog, scalars
from outpace.train.simulate import Simulation, simulate
from outpace.train.states import States, read_counters, replace_folder

STATES, DRAFTER = "states", "drafter"


class Trainer:
    """Trains an objective.

    Args:
        objective: a drafter in float32, on the CPU or where it will train.
        data: sequences to train on and to measure on.
        settings: of the training section.
        folder: of the run: states, log and the best drafter so far.
        accelerator: who else takes part, and in which precision.
        write: writes a drafter's tensors, named as in `objective.net`, into an empty folder in its public layout.
        report: gets what a step or a measurement has to show, after each.
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
        self._examples = Examples(data.samples, data.stored)
        self.deal = Deal(
            tuple(data.samples.without(data.held_out)),
            settings.batch_size,
            settings.micro_batch_size,
            settings.seed,
            accelerator.process_index,
            accelerator.num_processes,
        )
        steps = self.deal.steps(settings.epochs)
        self.steps = min(steps, settings.max_steps or steps)
        made = make_optimizers(objective.net, settings)
        self._module, *self._optimizers = accelerator.prepare(objective, *made)
        warmup = math.ceil(settings.warmup_ratio * self.steps)
        self._schedules = [get_cosine_schedule_with_warmup(optimizer, warmup, self.steps) for optimizer in made]
        accelerator.register_for_checkpointing(*self._schedules)
        self._states, self._log = States(folder / STATES, settings.keep), RunLog(folder)
        self._choosing, self._quoted = data.samples.halves(data.held_out)
        self._step, self._best, self._stale = 0, 0.0, 0
        self._figure = 0.0  # of the drafter that was written, on the prompts that had no part in choosing it

    def run(self) -> dict[str, Any]:
        """Train to the end, or until held-out sequences say that it is enough; goes on from the latest state.

        Returns:
            "step", "best" (tokens per step of the drafter that was written, on held-out prompts that had no part in
            choosing it) and "stopped_early".

        Raises:
            ModelError: a state that cannot be read, or a loss that is no number.
        """
        self._resume()
        settings, stopped = self._settings, self._is_stale()
        passes = iter(self._loader())
        while self._step < self.steps and not stopped:
            started = perf_counter()
            shown = self._train_step(passes)
            self._step += 1
            self._record({"step": self._step, **shown, "seconds": perf_counter() - started})
            if self._step % settings.evaluate_every == 0 or self._step == self.steps:
                self._measure()
                stopped = self._is_stale()
            if self._step % settings.save_every == 0 or self._step == self.steps or stopped:
                self._save()
        return {"step": self._step, "best": self._figure, "stopped_early": stopped and self._step < self.steps}

    def _is_stale(self) -> bool:
        return self._settings.patience is not None and self._stale >= self._settings.patience

    def _loader(self) -> Iterator[Batch]:
        places = self.deal.micro_batches(self._data.samples, self._step, self.steps)
        join = partial(collate_examples, self._settings.seed)
        # A loader draws a seed from the global generator; one of its own leaves that alone.
        generator = torch.Generator().manual_seed(0)
        loader = DataLoader(
            self._examples,
            batch_sampler=places,
            collate_fn=join,
            num_workers=self._data.workers,
            generator=generator,
        )
        yield from loader

    def _train_step(self, passes: Iterator[Batch]) -> dict[str, float]:
        """One optimizer step; means of what the objective shows."""
        sums: dict[str, Tensor] = {}
        count, accelerator = self.deal.passes, self._accelerator
        seed = sample_seed(self._settings.seed, self._step, "")
        for at in range(count):
            batch = replace(self._with_features(next(passes)), step_seed=seed)
            # Gradients of several passes are exchanged once, with the last.
            with nullcontext() if at + 1 == count else accelerator.no_sync(self._module):
                terms = self._module(batch, self._step / self.steps)
                accelerator.backward(terms["loss"])
            for name, value in terms.items():
                sums[name] = sums.get(name, torch.zeros_like(value.detach())) + value.detach()
        sums = accelerator.reduce(sums, "sum")
        weight = float(sums.pop("weight"))
        if not math.isfinite(float(sums["loss"])):
            raise ModelError(
                f"step {self._step + 1}: the loss is {float(sums['loss'])}; start from the last state with a smaller "
                f"training.learning_rate than {self._settings.learning_rate}, or with training.precision=float32"
            )
        self._divide_gradients(weight)
        norm = accelerator.clip_grad_norm_(self._module.parameters(), self._settings.clip)
        rate = self._schedules[0].get_last_lr()[0]
        step_all(self._optimizers)
        for schedule in self._schedules:
            schedule.step()
        means = {name: float(value) / max(weight, 1e-12) for name, value in sums.items()}
        return {**means, "learning_rate": rate, "gradient_norm": float(norm)}

    def _divide_gradients(self, weight: float) -> None:
        """Exchanged gradients are means over processes of sums over sequences."""
        factor = self._accelerator.num_processes / max(weight, 1e-12)
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _with_features(self, batch: Batch) -> Batch:
        target, taps = self._objective.target, self._objective.taps
        batch = batch.to(target.device)
        if self._data.stored is not None or not taps:
            return batch
        return replace(batch, features=target.features(batch.ids, batch.lengths, taps))

    def _measure(self) -> None:
        """Simulated tokens per step on held-out sequences; the best drafter so far, by half of them, is written."""
        rate, played = self._played(self._choosing).tokens_per_step, self._played(self._quoted)
        is_better = rate > self._best + (self._settings.min_gain if self._best else 0.0)
        is_final = self._objective.may_stop(self._step / self.steps)
        self._stale = self._stale + 1 if is_final and not is_better else 0
        if is_better:
            self._best, self._figure = rate, played.tokens_per_step
            self._export()
        shown = {"tokens_per_step": played.tokens_per_step, "by_position": played.by_position, "best": self._figure}
        self._record({"step": self._step, "held_out": shown, "chosen_by": {"tokens_per_step": rate}})

    def _played(self, indices: Sequence[int]) -> Simulation:
        """Rounds on some sequences, of all processes together."""
        accelerator, size = self._accelerator, self._settings.micro_batch_size
        own = indices[accelerator.process_index :: accelerator.num_processes]
        batches = (
            self._with_features(collate_examples(0, [self._examples[index, 0] for index in own[start : start + size]]))
            for start in range(0, len(own), size)
        )
        with accelerator.autocast(), whole(self._module):
            return together(accelerator, simulate(self._objective, batches), self._objective.depth)

    def _export(self) -> None:
        """Write the drafter as it is now, in place of the one before."""
        state = self._accelerator.get_state_dict(self._module)
        if self._accelerator.is_main_process:
            tensors = {name.removeprefix("net."): tensor.detach().cpu() for name, tensor in state.items()}
            scratch = self._states.scratch()
            self._write(tensors, scratch)
            replace_folder(scratch, self._folder / DRAFTER)
        self._accelerator.wait_for_everyone()

    def _save(self) -> None:
        accelerator = self._accelerator
        scratch = self._folder / STATES / "unfinished"
        if accelerator.is_main_process:
            scratch = self._states.scratch()
        accelerator.wait_for_everyone()
        accelerator.save_state(str(scratch))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            self._states.finish(scratch, self._step, {"best": self._best, "figure": self._figure, "stale": self._stale})
        accelerator.wait_for_everyone()

    def _resume(self) -> None:
        state = self._states.latest()
        if state is not None:
            counters = read_counters(state)
            try:
                self._accelerator.load_state(str(state))
            except Exception as error:
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                raise ModelError(
                    f"{state}: cannot be read ({reason}); delete it, and the run goes on from the one before"
                ) from error
            self._step, self._stale = counters["step"], counters["stale"]
            self._best, self._figure = counters["best"], counters["figure"]
        if self._accelerator.is_main_process:
            self._log.cut(self._step)

    def _record(self, shown: Mapping[str, Any]) -> None:
        if self._accelerator.is_main_process:
            self._log.write(shown)
            self._accelerator.log(scalars(shown), step=int(shown["step"]))
            self._report({**shown, "steps": self.steps})
