"""The examination: of the machine, then of a model on it, then of its method."""

from collections.abc import Iterator, Sequence

import torch

from outpace.api import Model
from outpace.data.workload import read_workload
from outpace.doctor import drafter, machine, memory, neighbours, passes, precision
from outpace.doctor.finding import Finding, finding
from outpace.doctor.method import method_findings
from outpace.doctor.race import race
from outpace.kernels.build import loaded_kernels
from outpace.kernels.instructions import cpu_flags
from outpace.lib.errors import InvalidRequest
from outpace.lib.processors import processors

PROMPTS, TOKENS = "builtin:3", 48


def examine_machine() -> Iterator[Finding]:
    """What can be said without a model, as it is found; takes about two seconds."""
    found, threads, others = processors(), torch.get_num_threads(), neighbours.others()
    yield machine.cores(found, threads, 0.0 if others is None else others.cores)
    yield machine.instructions(cpu_flags())
    yield machine.kernels()
    yield machine.waiting(threads)
    yield neighbours.neighbours(others, found.allowed, threads)
    if threads > 1:
        yield neighbours.waking(threads, neighbours.wake_microseconds(threads))
    yield memory.memory(*memory.bandwidth(threads), threads)


def examine_model(model: Model, unwell: Sequence[str] = ()) -> Iterator[Finding]:
    """What a model computes in, and what its passes cost. Of a GPU's model the precision alone.

    Args:
        model: with no requests under way.
        unwell: names of what was found of the machine that needs a look.
    """
    target = model.target
    yield precision.dtype(precision.precision_of(target))
    yield precision.exactness(model.exactness, target.device.type)
    if target.device.type != "cpu":
        return
    has_kernels = loaded_kernels() is not None
    yield passes.one_call(target.native is not None, target.config.model_type, has_kernels, target.dtype)

    def measure(slot: int | None) -> passes.PassTimes:
        if slot is None:
            raise InvalidRequest(
                "all slots are taken: wait for a request to end, or examine the model before it serves"
            )
        return passes.pass_times(target, slot)

    times = model.engine.between_steps(measure)
    cheaper, leaner = passes.pass_remedies(target, unwell)
    yield passes.reading(times, max(memory.bandwidth(torch.get_num_threads())), cheaper)
    yield passes.rows(times, target.quantize != "none", has_kernels)
    yield passes.glue(times, leaner)


def examine_method(model: Model, prompts: str = PROMPTS, tokens: int = TOKENS) -> Iterator[Finding]:
    """What the model's method does on a few prompts, beside plain decoding.

    Args:
        model: with the method.
        prompts: as `outpace bench` names a workload.
        tokens: of an answer at most.
    """
    method = model.method_name
    run = race(model, method, read_workload(prompts), tokens)
    found = drafter.drafter_of(model, method)
    yield finding("method", f"{method}, {model.method_from}", method=method, method_from=model.method_from)
    yield from method_findings(run, model.exactness.is_bitwise, found is not None)
    if found is not None:
        yield drafter.drafter(found, run.drafted)
