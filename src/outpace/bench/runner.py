"""Runs methods against each other, interleaved prompt by prompt, and writes one record per prompt and method."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outpace.api import Model
from outpace.bench.certificate import Certifier, Finding, method_runner
from outpace.bench.environment import environment, memory_mb
from outpace.bench.warm import warm_up
from outpace.bench.workload import WorkItem
from outpace.core.errors import InvalidRequest
from outpace.core.params import SamplingParams
from outpace.drafters.catalog import parse_method
from outpace.models.reference import TransformersReference

PLAIN, TRANSFORMERS = "plain", "transformers"
PHASES = ("draft_ms", "forward_ms", "verify_ms", "commit_ms", "observe_ms")
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class BenchPlan:
    """What to measure.

    Attributes:
        methods: methods with options, "plain" among them; "transformers" is stock `generate`.
        items: prompts.
        params: sampling parameters, with a seed if they sample.
        budget: drafted nodes per round for methods that do not name their own.
        warm_items: prompts that every method decodes first, unmeasured, for what it learns from them.
        check: whether differences are classified, which loads the model once more in higher precision.
    """

    methods: tuple[str, ...]
    items: tuple[WorkItem, ...]
    params: SamplingParams
    budget: int | None = None
    warm_items: tuple[WorkItem, ...] = ()
    check: bool = True


@dataclass(frozen=True)
class TurnRun:
    """One method's answer to one turn."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    counters: dict[str, Any]


class BenchRun:
    """Measures a plan on a model.

    Args:
        model: the model.
        plan: what to measure.
    """

    def __init__(self, model: Model, plan: BenchPlan) -> None:
        self.model, self.plan = model, plan
        self._certifier = Certifier(model)
        self._references: dict[int, TransformersReference] = {}

    def records(self, on_item: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
        """Warm up, then decode every prompt with every method; records in the order of prompts and methods."""
        plan, records = self.plan, []
        shared = environment(self.model.target.device, self.model.target.dtype) | {"model": self.model.name}
        first = self.model.encode(plan.items[0].prompt(0, []))
        short = SamplingParams(max_new_tokens=WARM_UP_TOKENS)
        for method in plan.methods:
            self._run(self.model, method, first, short)
        self.model.reset()
        budgets = {method: self._budget(method) for method in plan.methods if method not in (PLAIN, TRANSFORMERS)}
        warm_up(self.model, budgets, plan.warm_items, plan.params, on_item)
        for number, item in enumerate(plan.items):
            # Each method takes its turn at going first, so that a drifting machine favours none of them.
            shift = number % len(plan.methods)
            order = plan.methods[shift:] + plan.methods[:shift]
            records += self._measure(item, order, shared | {"index": number})
            on_item()
        return records

    def _measure(self, item: WorkItem, order: Sequence[str], shared: dict[str, Any]) -> list[dict[str, Any]]:
        runs: dict[str, list[TurnRun]] = {method: [] for method in order}
        memory = dict.fromkeys(order, 0.0)
        prompts: list[list[int]] = []
        answers: list[str] = []
        for turn in range(len(item.turns)):
            prompts.append(self.model.encode(item.prompt(turn, answers)))
            for method in order:
                runs[method].append(self._run(self.model, method, prompts[-1], self.plan.params))
                memory[method] = max(memory[method], memory_mb(self.model.target.device))
            # All methods continue the conversation that plain decoding had, so that turns stay comparable.
            answers.append(runs[PLAIN][-1].text)
        records = []
        for method in self.plan.methods:
            finding = self._compare(prompts, runs[PLAIN], runs[method], method)
            record = {"id": item.id, "dataset": item.dataset, "method": method, "options": _options(self.plan, method)}
            record |= _totals(runs[method]) | {"memory_mb": memory[method], "equal": finding.kind == "equal"}
            record["finding"] = asdict(finding)
            records.append(record | {"sampling": asdict(self.plan.params)} | shared)
        return records

    def _compare(self, prompts: list[list[int]], plain: list[TurnRun], other: list[TurnRun], method: str) -> Finding:
        for turn, (prompt, want, got) in enumerate(zip(prompts, plain, other, strict=True)):
            if want.token_ids != got.token_ids:
                if method == TRANSFORMERS and not self.plan.params.is_greedy:
                    return Finding("different", turn, note="transformers samples from a random stream of its own")
                if not self.plan.check:
                    return Finding("unchecked", turn, note="difference not classified")
                runner = method_runner(method, self._budget(method)) if method != TRANSFORMERS else self._reference_run
                return self._certifier.classify(prompt, self.plan.params, want.token_ids, got.token_ids, runner, turn)
        return Finding("equal")

    def _run(self, model: Model, method: str, prompt: list[int], params: SamplingParams) -> TurnRun:
        if method == TRANSFORMERS:
            run = self._reference(model).generate(prompt, params, model.target.eos_token_ids)
            counters: dict[str, Any] = {"prompt_tokens": len(prompt), "new_tokens": len(run.token_ids)}
            counters |= {"steps": max(len(run.token_ids) - 1, 0), "drafted": 0, "accepted": 0}
            counters |= {"ttft_ms": run.ttft_ms, "decode_ms": run.decode_ms, "forward_ms": run.decode_ms}
            return TurnRun(run.token_ids, "", "unknown", counters)
        generation = model.generate(prompt, params, method=method, budget=self._budget(method))
        metrics = generation.metrics.as_dict()
        return TurnRun(generation.token_ids, generation.text, generation.finish_reason, metrics)

    def _budget(self, method: str) -> int | None:
        return self.plan.budget if parse_method(method).budget is None else None

    def _reference(self, model: Model) -> TransformersReference:
        if id(model) not in self._references:
            dtype = str(model.target.dtype).removeprefix("torch.")
            self._references[id(model)] = TransformersReference(model.name, dtype, str(model.target.device))
        return self._references[id(model)]

    def _reference_run(self, model: Model, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
        return self._reference(model).generate(prompt, params, model.target.eos_token_ids).token_ids


def split_methods(text: str) -> tuple[str, ...]:
    """Split "lookup,recycle:budget=8,shape=chain" into methods with their options.

    Raises:
        InvalidRequest: an unknown method or option, or a method named twice.
    """
    methods: list[str] = []
    for part in filter(None, text.split(",")):
        is_option = "=" in part and ":" not in part and methods
        if is_option:  # the second and later options of the method before
            methods[-1] += "," + part
        else:
            methods.append(part.strip())
    for method in methods:
        if method != TRANSFORMERS:
            parse_method(method)
    if len(set(methods)) != len(methods):
        raise InvalidRequest(f"methods={text!r}: a method is named twice")
    return tuple(methods)


def usual_methods(model: Model) -> tuple[str, ...]:
    """What is compared where nothing is named: the methods that need nothing, and the model's own if it is another."""
    return tuple(dict.fromkeys((PLAIN, "lookup", "recycle", model.method)))


def with_baseline(methods: tuple[str, ...]) -> tuple[str, ...]:
    """The methods, plain decoding among them: every speedup is measured against it."""
    return methods if PLAIN in methods else (PLAIN, *methods)


def write_records(records: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Append records to `folder/records.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "records.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


def _options(plan: BenchPlan, method: str) -> dict[str, Any]:
    if method == TRANSFORMERS:
        return {}
    spec = parse_method(method)
    return spec.options.model_dump() | {"budget": plan.budget if spec.budget is None else spec.budget}


def _totals(turns: Sequence[TurnRun]) -> dict[str, Any]:
    def total(name: str) -> Any:
        return sum(turn.counters.get(name, 0) for turn in turns)

    depths = [turn.counters.get("accepted_per_depth", []) for turn in turns]
    steps, decoded = total("steps"), total("new_tokens") - sum(1 for turn in turns if turn.token_ids)
    decode_ms, ttft_ms = total("decode_ms"), total("ttft_ms")
    return {
        "turns": len(turns),
        "prompt_tokens": total("prompt_tokens"),
        "new_tokens": total("new_tokens"),
        "steps": steps,
        "drafted": total("drafted"),
        "draft_passes": total("draft_passes"),
        "accepted": total("accepted"),
        "retrieved": total("retrieved"),
        "accepted_retrieved": total("accepted_retrieved"),
        "accepted_per_depth": [sum(column) for column in _columns(depths)],
        "tokens_per_step": decoded / steps if steps else 1.0,
        "accepted_per_step": total("accepted") / steps if steps else 0.0,
        "ttft_ms": ttft_ms / len(turns),
        "tpot_ms": decode_ms / decoded if decoded else None,
        "decode_ms": decode_ms,
        "end_to_end_ms": decode_ms + ttft_ms,
        **{phase: total(phase) for phase in (*PHASES, "graft_ms")},
        "finish_reasons": [turn.finish_reason for turn in turns],
        "token_ids": [list(turn.token_ids) for turn in turns],
    }


def _columns(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    width = max((len(row) for row in rows), default=0)
    return [[row[column] for row in rows if column < len(row)] for column in range(width)]
