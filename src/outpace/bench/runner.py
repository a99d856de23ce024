"""Runs methods against each other, interleaved group by group of prompts; one record per prompt and method."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from outpace.api import Model
from outpace.bench.certificate import Certifier, Classification, check_fit, method_runner, turn_ids
from outpace.bench.environment import environment, held_mb, resolved_options
from outpace.bench.records import TurnRun, group_figures, prompt_figures
from outpace.bench.written import written_once
from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.data.workload import WorkItem, fingerprint, in_groups
from outpace.lib.checks import check_same
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import name_of, parse_method
from outpace.methods.stores import learns
from outpace.models.reference import TransformersReference

PLAIN, TRANSFORMERS = "plain", "transformers"
WARM_UP_TOKENS, WARM_UP_PROMPT = 8, 128  # of answers and of prompts, at most
Record = dict[str, Any]


@dataclass(frozen=True)
class BenchPlan:
    """What to measure.

    Attributes:
        methods: methods with options, "plain" among them; "transformers" is stock `generate`.
        params: sampling parameters, with a seed if they sample.
        budget: drafted nodes per round for methods that do not name their own.
        warm_items: prompts that every method decodes first, unmeasured, for what it learns from them.
        check: whether differences are classified, which loads the model once more in higher precision.
        batch_size: how many prompts share the engine. Warm items are decoded one by one.
        concurrency: how many of them are in flight at a time: as one ends, the next begins. None for all.
        forgets: whether methods forget, before each group, what they learned from earlier ones.
        prompts_once: each prompt is computed for the first method and restored for the others, so that only the first
            method's time to the first token is real.

    Raises:
        InvalidRequest: prompts that make no groups of this size, a concurrency below 1 or above it, or stock
            `generate` or prompts computed once in a batch.
    """

    methods: tuple[str, ...]
    items: tuple[WorkItem, ...]
    params: SamplingParams
    budget: int | None = None
    warm_items: tuple[WorkItem, ...] = ()
    check: bool = True
    batch_size: int = 1
    concurrency: int | None = None
    forgets: bool = False
    prompts_once: bool = False

    def __post_init__(self) -> None:
        in_groups(self.items, self.batch_size)
        if not 1 <= self.in_flight <= self.batch_size:
            raise InvalidRequest(f"concurrency={self.in_flight}: must be from 1 to batch_size, {self.batch_size}")
        if self.batch_size > 1 and self.prompts_once:
            raise InvalidRequest(
                f"batch_size={self.batch_size}: prompts_once decodes one prompt at a time; leave one of them out"
            )
        if self.batch_size > 1 and TRANSFORMERS in self.methods:
            raise InvalidRequest(
                f"batch_size={self.batch_size}: stock generate decodes one prompt at a time; leave '{TRANSFORMERS}' "
                "out of the methods"
            )

    @property
    def in_flight(self) -> int:
        """Requests that are decoded at a time."""
        return self.batch_size if self.concurrency is None else self.concurrency


class BenchRun:
    """Measures a plan on a model.

    Raises:
        InvalidRequest: the model has too few slots for the plan's batches, or more than the plan's concurrency.
    """

    def __init__(self, model: Model, plan: BenchPlan) -> None:
        slots, wanted = model.target.max_slots, plan.in_flight
        if wanted > slots or (wanted < slots and wanted < plan.batch_size):
            raise InvalidRequest(
                f"batch_size={plan.batch_size}, with {wanted} requests in flight: the model decodes {slots} at a time; "
                f"load it with max_num_seqs={wanted}"
            )
        self.model, self.plan = model, replace(plan, methods=completed_methods(model, plan.methods))
        self._certifier = Certifier(model)
        self._references: dict[int, TransformersReference] = {}
        self._proposers: list[Proposer] = []
        self._options: dict[str, dict[str, Any]] = {TRANSFORMERS: {}}
        self._held_mb: dict[str, float] = {}
        self._groups = in_groups(plan.items, plan.batch_size)
        target = model.target
        self._shared = environment(target.device, target.dtype, target.quantize, target.kv_cache_dtype)
        config = target.config
        size = {"layers": config.num_hidden_layers, "width": config.hidden_size}
        size |= {"feed_forward": getattr(config, "intermediate_size", None), "vocabulary": config.vocab_size}
        self._shared |= {"model": model.name, "target_size": size}
        exactness = {"kind": model.exactness.kind, "reason": model.exactness.reason}  # its time is no setting
        self._shared |= {"batch_size": plan.batch_size, "concurrency": plan.in_flight, "exactness": exactness}

    @property
    def settings(self) -> dict[str, Any]:
        """What records depend on, the machine and the versions included."""
        plan = self.plan
        chosen = {"methods": plan.methods, "budget": plan.budget, "drafter": self.model.drafter, "check": plan.check}
        chosen |= {"forgets": plan.forgets, "prompts_once": plan.prompts_once}
        chosen |= {"prompts": fingerprint(plan.items), "warm": fingerprint(plan.warm_items), **asdict(plan.params)}
        # The length that was asked for: the one that memory allows may differ when a stopped run continues.
        return self._shared | chosen | {"max_model_len": self.model.target.asked_length}

    @property
    def group_sizes(self) -> list[int]:
        """How many records each group has."""
        return [len(group) * len(self.plan.methods) for group in self._groups]

    def records(self, on_item: Callable[[], None] = lambda: None) -> list[Record]:
        """Warm up, then decode every group with every method; records in the order of prompts and methods."""
        return [record for group in self.groups(on_item=on_item) for record in group]

    def groups(
        self, done: Sequence[Record] = (), on_item: Callable[..., None] = lambda *_: None
    ) -> Iterator[list[Record]]:
        """The records of each group as soon as it is decoded. `done`: records of the first groups, from a run that was
        stopped. Methods that learn from prompt to prompt decode these again, unmeasured, so that counts equal those of
        an uninterrupted run. `on_item`: called once with the number of prompts in `done`, if any, and False, then
        without arguments for each new prompt.

        Raises:
            InvalidRequest: a method in `done` had another drafter, or read other files under the same names; a prompt
                that does not fit the context, if it is a first turn, before any is decoded.
        """
        plan = self.plan
        ours = [method for method in plan.methods if method != TRANSFORMERS]
        self._options |= {method: resolved_options(self.model, method, self._budget(method)) for method in ours}
        for method, record in {record["method"]: record for record in done}.items():
            options = json.loads(json.dumps(self._options[method]))
            check_same(record["options"], options, f"method={method!r}: its records were made")
        first_new = len({record["group"]["number"] for record in done})
        if first_new:
            on_item(sum(map(len, self._groups[:first_new])), False)
        if first_new == len(self._groups):
            return
        # References, so that none is rebuilt after the reset, within the time of its first prompt.
        self._proposers = [self.model.proposer(method) for method in ours]
        taps = {tap for proposer in self._proposers for tap in proposer.needs.taps}
        with written_once(self.model.target, taps) if plan.prompts_once else nullcontext():
            yield from self._new_groups(first_new, done, on_item)

    def _new_groups(
        self, first_new: int, done: Sequence[Record], on_item: Callable[..., None]
    ) -> Iterator[list[Record]]:
        plan = self.plan
        check_fit(self.model, (*plan.warm_items, *plan.items))
        first = [self.model.encode(item.prompt(0, []))[:WARM_UP_PROMPT] for item in self._groups[0]]
        short = SamplingParams(max_new_tokens=WARM_UP_TOKENS)
        for method in plan.methods:
            self._run(method, first, short)
        self.model.reset()
        budgets = {method: self._budget(method) for method in plan.methods if method not in (PLAIN, TRANSFORMERS)}
        warm_up(self.model, budgets, plan.warm_items, plan.params, on_item)
        if not plan.forgets:
            self._learn_again(done)
        for number, group in list(enumerate(self._groups))[first_new:]:
            if plan.forgets:
                self.model.reset()
            # Each method takes its turn at going first, so that a drifting machine favours none of them.
            shift = number % len(plan.methods)
            order = plan.methods[shift:] + plan.methods[:shift]
            yield self._measure(number, group, order)
            for _ in group:
                on_item()

    def _learn_again(self, done: Sequence[Record]) -> None:
        """Show the prompts of finished groups to the methods that learn."""
        drafting = [method for method in self.plan.methods if method not in (PLAIN, TRANSFORMERS)]
        is_sampled = not self.plan.params.is_greedy
        learning = [method for method in drafting if learns(self.model.proposer(method), is_sampled)]
        answers: dict[int, list[list[str]]] = {}
        for record in done:
            if record["method"] == PLAIN:
                answers.setdefault(record["group"]["number"], []).append(self._answers_of(record))
        for number, texts in answers.items():
            group = self._groups[number]
            for turn in range(len(group[0].turns)):
                pairs = zip(group, texts, strict=True)
                prompts = [self.model.encode(item.prompt(turn, before[:turn])) for item, before in pairs]
                for method in learning:
                    self._run(method, prompts, self.plan.params)

    def _answers_of(self, record: Record) -> list[str]:
        """The texts of a record's answers."""
        answers = zip(record["token_ids"], record["finish_reasons"], strict=True)
        return [self.model.codec.decode(ids[:-1] if why == "stop" else ids) for ids, why in answers]

    def _measure(self, number: int, group: Sequence[WorkItem], order: Sequence[str]) -> list[Record]:
        runs: dict[str, list[list[TurnRun]]] = {method: [] for method in order}  # by turns, then prompts
        prompts: list[list[list[int]]] = []
        answers: list[list[str]] = [[] for _ in group]
        for turn in range(len(group[0].turns)):
            pairs = zip(group, answers, strict=True)
            prompts.append([turn_ids(self.model, item, turn, before) for item, before in pairs])
            for method in order:
                runs[method].append(self._run(method, prompts[-1], self.plan.params))
            # All methods continue the conversation that plain decoding had, so that turns stay comparable.
            for before, run in zip(answers, runs[PLAIN][-1], strict=True):
                before.append(run.text)
        records = []
        for place, item in enumerate(group):
            asked = [turn[place] for turn in prompts]
            own = {method: [turn[place] for turn in turns] for method, turns in runs.items()}
            for method in self.plan.methods:
                finding = self._compare(asked, own[PLAIN], own[method], method)
                record: Record = {"id": item.id, "dataset": item.dataset, "method": method}
                record |= {"options": self._options[method]} | prompt_figures(own[method])
                record |= {"group": {"number": number} | group_figures(runs[method])}
                record |= {
                    "memory_mb": self._memory(method),
                    "equal": finding.kind == "equal",
                    "finding": asdict(finding),
                }
                record |= {"sampling": asdict(self.plan.params)} | self._shared
                records.append(record | {"index": number * self.plan.batch_size + place})
        return records

    def _compare(
        self, prompts: list[list[int]], plain: list[TurnRun], other: list[TurnRun], method: str
    ) -> Classification:
        for turn, (prompt, want, got) in enumerate(zip(prompts, plain, other, strict=True)):
            if want.token_ids != got.token_ids:
                if method == TRANSFORMERS and (reason := self._why_stock_differs()):
                    return Classification("different", turn, note=f"transformers {reason}")
                if not self.plan.check:
                    return Classification("unchecked", turn, note="difference not classified")
                runner = method_runner(method, self._budget(method)) if method != TRANSFORMERS else self._reference_run
                return self._certifier.classify(prompt, self.plan.params, want.token_ids, got.token_ids, runner, turn)
        return Classification("equal")

    def _why_stock_differs(self) -> str:
        """Why stock `generate` may differ without a bug; empty if it must be equal."""
        if not self.plan.params.is_greedy:
            return "samples from a random stream of its own"
        target = self.model.target
        if target.quantize != "none":
            return f"does not round as the products of quantize={target.quantize!r} do"
        return "does not keep keys and values in int8" if target.kv_cache_dtype == "int8" else ""

    def _run(self, method: str, prompts: list[list[int]], params: SamplingParams) -> list[TurnRun]:
        """A method's answers to prompts that it decodes together."""
        if method == TRANSFORMERS:
            return [self._stock_run(prompt, params) for prompt in prompts]
        answers = self.model.generate(prompts, params, method=method, budget=self._budget(method))
        return [
            TurnRun(answer.token_ids, answer.text, answer.finish_reason, answer.metrics.as_dict()) for answer in answers
        ]

    def _stock_run(self, prompt: list[int], params: SamplingParams) -> TurnRun:
        run = self._reference(self.model).generate(prompt, params, self.model.target.eos_token_ids)
        counters: dict[str, Any] = {"prompt_tokens": len(prompt), "new_tokens": len(run.token_ids)}
        counters |= {"steps": max(len(run.token_ids) - 1, 0), "drafted": 0, "accepted": 0}
        counters |= {"ttft_ms": run.ttft_ms, "decode_ms": run.decode_ms, "forward_ms": run.decode_ms}
        return TurnRun(run.token_ids, "", "unknown", counters)

    def _budget(self, method: str) -> int | None:
        return self.plan.budget if parse_method(method).takes_budget else None

    def _memory(self, method: str) -> float:
        """MiB that a method keeps, weights of the target included; measured once, since it hardly changes."""
        if method not in self._held_mb:
            model = self.model
            own = (self._reference(model),) if method == TRANSFORMERS else (model.target, model.proposer(method))
            self._held_mb[method] = held_mb(*own)
        return self._held_mb[method]

    def _reference(self, model: Model) -> TransformersReference:
        if id(model) not in self._references:
            dtype = str(model.target.rounded_to).removeprefix("torch.")
            self._references[id(model)] = TransformersReference(model.name, dtype, str(model.target.device))
        return self._references[id(model)]

    def _reference_run(self, model: Model, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
        return self._reference(model).generate(prompt, params, model.target.eos_token_ids).token_ids


def split_methods(text: str, has_stock: bool = False, of_server: bool = False) -> tuple[str, ...]:
    """Split "lookup,recycle:budget=8,shape=chain" into methods with their options. `has_stock`: "transformers", which
    is stock `generate` and no method, may be among them. `of_server`: they are a server's, which checks them itself: it
    may have methods that are not installed here."""
    methods: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        option, equals, _ = part.partition("=")
        if equals and ":" not in option and methods:  # the second and later options of the method before
            methods[-1] += "," + part
        else:
            methods.append(part)
    for method in methods:
        if method == TRANSFORMERS and not has_stock:
            raise InvalidRequest(
                f"methods={text!r}: '{TRANSFORMERS}' is stock generate, which `outpace bench MODEL` measures; leave it "
                "out here"
            )
        if method != TRANSFORMERS and not of_server:
            parse_method(method)
    if not methods:
        raise InvalidRequest(f"methods={text!r}: names none; name one or more, or leave it out for the usual ones")
    if len(set(methods)) != len(methods):
        raise InvalidRequest(f"methods={text!r}: a method is named twice")
    return tuple(methods)


def completed_methods(model: Model, methods: Sequence[str]) -> tuple[str, ...]:
    """Methods with the drafts that they leave to the drafters at hand, as records and tables name them; each once."""
    named = (method if method == TRANSFORMERS else name_of(model.drafters.completed(method)) for method in methods)
    return tuple(dict.fromkeys(named))


def usual_methods(model: Model) -> tuple[str, ...]:
    """The methods to compare by default: those that need no drafter, and the model's default if it is another."""
    return tuple(dict.fromkeys((PLAIN, "lookup", "recycle", model.method_name)))


def with_baseline(methods: tuple[str, ...]) -> tuple[str, ...]:
    """The methods, plain decoding among them: every speedup is measured against it."""
    return methods if PLAIN in methods else (PLAIN, *methods)


def warm_up(
    model: Model,
    methods: Mapping[str, int | None],
    items: Sequence[WorkItem],
    params: SamplingParams,
    on_item: Callable[[], None] = lambda: None,
) -> None:
    """Let every method decode the first turn of every item, to learn from it. `methods`: the budget of each, None for
    its default."""
    for item in items:
        prompt = model.encode(item.prompt(0, []))
        for method, budget in methods.items():
            model.generate(prompt, params, method=method, budget=budget)
        on_item()
