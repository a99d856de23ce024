"""Measures a server from outside: levels of load, methods where it has them, a record per prompt, method and level."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from random import Random
from threading import Event
from time import perf_counter
from typing import Any

from outpace.bench.records import DRAFT_MS, PHASES, TurnRun, group_figures, prompt_figures, summed
from outpace.bench.runner import PLAIN, WARM_UP_TOKENS, Record
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem, fingerprint
from outpace.endpoint.client import Endpoint
from outpace.endpoint.in_flight import in_flight
from outpace.endpoint.server import Server, SpeculationCounts, sampling_fields, speculation_counts, speculation_fields
from outpace.lib.checks import counted
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.methods.catalog import parse_method

WHOLE_SERVER = "server"  # a server other than ours counts as one method
LOADS_PER_GROUP = 4  # prompts per request in flight, so that a group's start and end weigh little
WARM_UP_TEXT = "Hello."  # not a measured prompt, which a server's prefix cache would then hold


Asked = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class EndpointPlan:
    """What to measure.

    Attributes:
        params: sampling parameters, with a seed if they sample.
        levels: requests in flight, one level after another. Each level has its own prompts: servers cache prompts and
            methods learn from them, so no method is measured on a prompt twice.
        methods: methods of an outpace server, by default "plain" and its own; none for other servers.
        budget: drafted nodes per round for methods that do not name their own.
        warm_items: prompts that every method answers first, unmeasured.
        check: whether each prompt is sent once more, alone and unmeasured, for an answer to compare with; otherwise
            answers are compared with plain decoding's under the same load, where the server has methods.
        request_rate: average arrivals per second (a Poisson process with the seed of `params`), at the same times for
            all methods; a level then limits the requests in flight. By default one arrives as another ends.
        stated: names of `params` that are sent even where they are our defaults.

    Raises:
        InvalidRequest: levels below 1, twice, or of more requests than there are prompts; a rate of 0 or less.
    """

    items: tuple[WorkItem, ...]
    params: SamplingParams
    levels: tuple[int, ...]
    methods: tuple[str, ...] = ()
    budget: int | None = None
    warm_items: tuple[WorkItem, ...] = ()
    check: bool = True
    request_rate: float | None = None
    stated: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.request_rate is not None and not 0 < self.request_rate < inf:
            raise InvalidRequest(f"request_rate={self.request_rate}: must be a positive number of requests per second")
        levels = ",".join(map(str, self.levels))
        if not self.levels or min(self.levels) < 1 or len(set(self.levels)) < len(self.levels):
            raise InvalidRequest(f"concurrency={levels!r}: must be numbers of at least 1, each once")
        if sum(self.levels) > len(self.items):
            raise InvalidRequest(
                f"concurrency={levels!r}: the workload has {counted(len(self.items), 'prompt')}, and each level takes "
                f"its own: give at least {sum(self.levels)}, or fewer requests in flight"
            )


class EndpointRun:
    """Measures a plan on a server, which must get no other requests meanwhile: its counters cover all requests.

    Attributes:
        methods: as records name them. The first one's answers are the reference for all.

    Raises:
        InvalidRequest: methods, a budget or a window of penalties for a server that is not ours.
    """

    def __init__(self, endpoint: Endpoint, server: Server, plan: EndpointPlan, shared: dict[str, Any]) -> None:
        self.plan, self._endpoint, self._server = plan, endpoint, server
        self.methods = _methods(endpoint, server, plan)
        self._shared = shared | {"endpoint": endpoint.url, "model": server.model, "server": server.facts}
        slices = zip(plan.levels, _slices(len(plan.items), plan.levels), strict=True)
        self._groups = [(level, group) for level, places in slices for group in _even_groups(places, level)]

    @property
    def settings(self) -> dict[str, Any]:
        """What records depend on, the machine and the versions included."""
        plan = self.plan
        chosen: dict[str, Any] = {"methods": self.methods, "budget": plan.budget, "check": plan.check}
        chosen |= {"levels": plan.levels, "request_rate": plan.request_rate}
        added = sampling_fields(plan.params, plan.stated).keys() - sampling_fields(plan.params).keys()
        chosen |= {"stated": sorted(added)} if added else {}  # other statements change no request
        chosen |= {"prompts": fingerprint(plan.items), "warm": fingerprint(plan.warm_items), **asdict(plan.params)}
        # Where memory sets the limit, a restarted server may have another one.
        facts = {name: fact for name, fact in self._server.facts.items() if name != "max_model_len"}
        return self._shared | chosen | {"server": facts}

    @property
    def group_sizes(self) -> list[int]:
        """How many records each group has."""
        return [len(group) * len(self.methods) for _, group in self._groups]

    def groups(
        self, done: Sequence[Record] = (), on_item: Callable[..., None] = lambda *_: None
    ) -> Iterator[list[Record]]:
        """The records of each group as soon as it is answered. `done`: records of the first groups, from a run that was
        stopped. `on_item`: called once with the number of prompts in `done` and False, then without arguments for each
        new prompt."""
        first_new = len({record["group"]["number"] for record in done})
        on_item(sum(len(places) for _, places in self._groups[:first_new]), False)
        if first_new == len(self._groups):
            return
        self._warm_up()
        for number in range(first_new, len(self._groups)):
            # Each method takes its turn at going first, so that a drifting machine favours none of them.
            shift = number % len(self.methods)
            yield self._measure(number, self.methods[shift:] + self.methods[:shift])
            for _ in self._groups[number][1]:
                on_item()

    def _warm_up(self) -> None:
        """A short answer by each method, and the warm prompts' whole ones, turn by turn."""
        hello = replace(self.plan.items[0], turns=(WARM_UP_TEXT,))
        for method in self.methods:
            path, body = self._request(hello, 0, [], method)
            under_load(self._endpoint, [(path, {**body, "max_tokens": WARM_UP_TOKENS})], 1)
            for item in self.plan.warm_items:
                answers: list[str] = []
                for turn in range(len(item.turns)):
                    (run,) = under_load(self._endpoint, [self._request(item, turn, answers, method)], 1)
                    answers.append(run.answer)

    def _measure(self, number: int, order: Sequence[str]) -> list[Record]:
        """A group's records: turn by turn, each by every method."""
        (level, places), first = self._groups[number], self.methods[0]
        waves: dict[str, list[Wave]] = {method: [] for method in order}
        wanted: list[Mapping[int, TurnRun]] = []
        answers: dict[int, list[str]] = {place: [] for place in places}
        for turn in range(max(len(self.plan.items[place].turns) for place in places)):
            asked = [place for place in places if turn < len(self.plan.items[place].turns)]
            for method in order:
                before = speculation_counts(self._endpoint)
                runs = self._ask(asked, turn, answers, method, level)
                after = speculation_counts(self._endpoint)
                waves[method].append(Wave(runs, None if before is None or after is None else after - before))
            loaded = waves[first][-1].runs
            wanted.append(self._ask(asked, turn, answers, first, 1, is_timed=False) if self.plan.check else loaded)
            for place, run in loaded.items():  # all continue one conversation
                answers[place].append(run.answer)
        about = {"concurrency": level, "sampling": asdict(self.plan.params)} | self._shared
        is_compared = self.plan.check or len(self.methods) > 1
        records = []
        for method in self.methods:
            for record in endpoint_records(self.plan.items, waves[method], wanted if is_compared else None):
                group = {"group": {"number": number} | record["group"]}
                records.append(record | {"method": method} | about | group)
        return records

    def _ask(
        self,
        places: Sequence[int],
        turn: int,
        answers: Mapping[int, list[str]],
        method: str,
        level: int,
        is_timed: bool = True,
    ) -> dict[int, TurnRun]:
        """A method's answers to a turn of some prompts, by their places."""
        rate = self.plan.request_rate if is_timed else None
        items = [(self.plan.items[place], answers[place]) for place in places]
        requests = [self._request(item, turn, texts, method) for item, texts in items]
        arrivals = arrival_times(len(places), rate, self.plan.params.seed or 0)
        return dict(zip(places, under_load(self._endpoint, requests, level, arrivals), strict=True))

    def _request(self, item: WorkItem, turn: int, answers: list[str], method: str) -> Asked:
        """Path and body of a turn's request, given the answers to the turns before it."""
        body = sampling_fields(self.plan.params, self.plan.stated) | {"model": self._server.model}
        body |= {"prompt" if item.raw else "messages": item.prompt(turn, answers)}
        if self._server.is_outpace:
            body |= speculation_fields(method, self.plan.budget if _takes_budget(method) else None)
        return "completions" if item.raw else "chat/completions", body


def _methods(endpoint: Endpoint, server: Server, plan: EndpointPlan) -> tuple[str, ...]:
    if server.default_method is not None:
        methods = tuple(dict.fromkeys((PLAIN, *(plan.methods or (server.default_method,)))))
        if plan.budget is not None and not any(map(_takes_budget, methods)):
            raise InvalidRequest(f"budget={plan.budget}: no method takes it, of {', '.join(methods)}; leave it out")
        return methods
    if plan.methods or plan.budget is not None:
        field = f"methods={','.join(plan.methods)!r}" if plan.methods else f"budget={plan.budget}"
        raise InvalidRequest(
            f"{field}: the server at {endpoint.url} is not outpace's (it has no /outpace/methods) and drafts as it was "
            "started; leave it out"
        )
    if plan.params.penalty_window is not None:
        raise InvalidRequest(
            f"penalty_window={plan.params.penalty_window}: is a field of outpace's servers alone, and the one at "
            f"{endpoint.url} may ignore it; leave it out"
        )
    return (WHOLE_SERVER,)


def _takes_budget(method: str) -> bool:
    """Whether the plan's budget is for a method: it drafts, and neither names a budget, itself or by a preset, nor asks
    for prices. For one that only the server has, its text decides."""
    try:
        return parse_method(method).takes_budget
    except InvalidRequest:
        return re.search("[:,]budget=", method) is None


def _slices(prompts: int, levels: Sequence[int]) -> list[Sequence[int]]:
    """Indices of prompts for each level: one per request in flight, plus an equal share of the rest."""
    left = prompts - sum(levels)
    bounds = [sum(levels[:at]) + left * at // len(levels) for at in range(len(levels) + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]


def _even_groups(places: Sequence[int], level: int) -> list[Sequence[int]]:
    """Groups of at least LOADS_PER_GROUP prompts for each request in flight, or one of all."""
    count = max(1, len(places) // (LOADS_PER_GROUP * level))
    bounds = [len(places) * number // count for number in range(count + 1)]
    return [places[start:end] for start, end in pairwise(bounds)]


REPORTED = ("steps", "drafted", "accepted", "accepted_per_depth", "reused_tokens", "plain_steps", "by_origin")


def arrival_times(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds from the start at which requests arrive; all at once without a rate."""
    chance = Random(seed)
    return [0.0] * count if rate is None else list(accumulate(chance.expovariate(rate) for _ in range(count)))


def under_load(
    endpoint: Endpoint, asked: Sequence[Asked], concurrency: int, arrivals: Sequence[float] | None = None
) -> list[TurnRun]:
    """Send requests to a server, at most `concurrency` at a time: as one ends, the next that has arrived is sent.

    Args:
        arrivals: of each request, in seconds from the start. Its times count from then; if it is 0, from its sending.

    Returns:
        Answers in the order of the requests. Their counters hold times in milliseconds, the tokens that the server
        counts (its pieces of text where it counts none), and what an outpace server reports.
    """
    start, is_over = perf_counter(), Event()
    due = arrivals or [0.0] * len(asked)
    jobs = [partial(_ask, endpoint, one, start, at, is_over) for one, at in zip(asked, due, strict=True)]
    with in_flight(jobs, concurrency) as answers:
        try:
            return [answer.result() for answer in answers]
        finally:
            is_over.set()


def _ask(endpoint: Endpoint, asked: Asked, start: float, arrival: float, is_over: Event) -> TurnRun:
    if arrival and is_over.wait(max(start + arrival - perf_counter(), 0)):
        raise ModelError("another request of the run failed")
    sent = start + arrival if arrival else perf_counter()
    first = last = 0.0
    gaps: list[float] = []
    with endpoint.stream(*asked) as stream:
        for _ in stream:
            before, last = last, perf_counter()
            if first:
                gaps.append(round(1e3 * (last - before), 2))
            first = first or last
            if is_over.is_set():
                raise ModelError("another request of the run failed")
        end = perf_counter()
    usage, report = stream.usage, stream.report
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    counters: dict[str, Any] = {
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "new_tokens": usage.get("completion_tokens", stream.pieces),
        "counted_by": "usage" if "completion_tokens" in usage else "pieces",
        "retries": stream.retries,
        "sent_ms": 1e3 * (sent - start),
        "ttft_ms": 1e3 * ((first or end) - sent),  # an answer without text has waited for its end
        "decode_ms": 1e3 * (last - first),
        "gaps_ms": gaps,
        "reused_tokens": cached,
    }
    counters |= {name: report[name] for name in REPORTED if report.get(name) is not None}
    return TurnRun((), stream.text, stream.finish_reason or "unknown", counters, stream.answer)


ONLY_REPORTED = (*REPORTED[:4], "tokens_per_step", "accepted_per_step")
"""Fields of a prompt's record that are None unless the server reports them with each answer."""
UNKNOWN = ("draft_passes", "retrieved", "accepted_retrieved", "token_ids", "rounds", *PHASES, *DRAFT_MS)
"""Fields that no server reports."""


@dataclass(frozen=True)
class Wave:
    """One turn of a group, answered by one method. `counts`: growth of the server's speculation counters meanwhile;
    None if it has none."""

    runs: Mapping[int, TurnRun]
    counts: SpeculationCounts | None


def endpoint_records(
    items: Sequence[WorkItem],
    waves: Sequence[Wave],
    wanted: Sequence[Mapping[int, TurnRun]] | None,
) -> list[dict[str, Any]]:
    """Records of a group's prompts, as one method answered them. `wanted`: for each turn the reference answers, by the
    prompt's place; texts and finish reasons must be theirs for `equal`, which is None without them."""
    group = group_figures([list(wave.runs.values()) for wave in waves]) | {"speculation": _speculation(waves)}
    records = []
    for place in waves[0].runs:
        runs, item = [wave.runs[place] for wave in waves if place in wave.runs], items[place]
        figures = prompt_figures(runs)
        is_reported = all("steps" in run.counters for run in runs)
        hidden = [*UNKNOWN, *(() if is_reported else ONLY_REPORTED)]
        counted_by = runs[0].counters["counted_by"]
        hidden += [] if counted_by == "usage" else ["prompt_tokens"]
        figures = {name: None if name in hidden else value for name, value in figures.items()}
        own = [turn[place] for turn in wanted or () if place in turn]
        different = [turn for turn, (run, one) in enumerate(zip(runs, own)) if _answer(run) != _answer(one)]
        reused = [count for run in runs if (count := run.counters["reused_tokens"]) is not None]
        records.append(
            {"id": item.id, "dataset": item.dataset, "index": place}
            | figures
            | {
                "turn_ttft_ms": [run.counters["ttft_ms"] for run in runs],
                "turn_tpot_ms": [prompt_figures([run])["tpot_ms"] or None for run in runs],
                "turn_gaps_ms": [run.counters["gaps_ms"] for run in runs],
                "counted_by": counted_by,
                "retries": sum(run.counters["retries"] for run in runs),
                "reused_tokens": sum(reused) if reused else None,
                "by_origin": _by_origin(runs) if is_reported else None,
                "texts": [run.text for run in runs],
                "equal": None if wanted is None else not different,
                "different_turns": different,
                "group": group,
            }
        )
    return records


def _speculation(waves: Sequence[Wave]) -> dict[str, Any] | None:
    """Counts of speculation in a group, from reports of the answers, else from the server's counters; None if both are
    missing.

    Counters have no steps. Every step of a request yields its accepted tokens and one more, so the number of steps is
    the number of tokens after the first minus the accepted ones. But vLLM also counts accepted tokens behind an
    answer's end, which its last step may have; there are no fewer steps than verified drafts.
    """
    runs = [run for wave in waves for run in wave.runs.values()]
    decoded = sum(max(run.new_tokens - 1, 0) for run in runs)
    if all("steps" in run.counters for run in runs):
        found = {name: sum(run.counters.get(name, 0) for run in runs) for name in ("steps", "drafted", "accepted")}
        depths, source = [run.counters.get("accepted_per_depth", ()) for run in runs], "report"
    else:
        counts = [wave.counts for wave in waves if wave.counts is not None]
        if len(counts) < len(waves):
            return None
        found = {name: sum(getattr(one, name) for one in counts) for name in ("drafted", "accepted")}
        found["steps"] = max(decoded - found["accepted"], sum(one.drafts for one in counts))
        depths, source = [one.accepted_per_depth for one in counts], "metrics"
    return {"source": source, "decoded": decoded, **found, "accepted_per_depth": summed(depths)}


def _answer(run: TurnRun) -> tuple[str, str]:
    return run.text, run.finish_reason


def _by_origin(runs: Sequence[TurnRun]) -> dict[str, int]:
    total = Counter[str]()
    for run in runs:
        total.update(run.counters.get("by_origin", {}))
    return dict(total)
