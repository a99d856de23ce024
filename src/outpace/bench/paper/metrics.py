"""Metrics of the papers, each from sums over prompts, so that prompts can be drawn again for an interval.

The papers count differently: tokens per step with the target's own token (Domino, DynaTree) and without (Graft, by its
equation 1), as a ratio of sums and as a mean over prompts (DynaTree's second length). Records have the counts for all
of these.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.bench.records import DRAFT_MS, GRAFT_MS, PHASES
from outpace.lib.errors import InvalidRequest
from outpace.models.draft import EARLY_EXIT

Numbers = NDArray[np.float64]
Sums = Mapping[str, Numbers]
"""Sums of fields over prompts, one for each time that prompts were drawn."""

OF_RECORDS = ("steps", "drafted", "accepted", "retrieved", "accepted_retrieved", "peak_mb", *PHASES, *DRAFT_MS)
_BOOKKEEPING = ("merge_ms", "rebuild_ms", "verify_ms", "observe_ms")  # of Graft's table 14
GATES = 3  # of Graft
GRAM = 16  # tokens of text that an answer repeats
_OF_GROUPS = ("decoded", "decode_ms", "new_tokens", "end_to_end_ms")


@dataclass(frozen=True)
class Measured:
    """A row's records on one set in one run.

    Attributes:
        own, plain: fields of the row and of plain decoding interleaved with it: a number for each prompt, or group of
            prompts decoded together, in their order.
        equal, of: how many outputs are those of plain decoding, of how many; of none, they are a device's times.
        bugs: differences that rounding does not explain.
        options: those of the method, with the files and the drafter it started with.
        ids: of the prompts, in their order; empty where there are none.
        rounds: of each prompt, the tokens of each round by the number of tokens before it.
    """

    own: Mapping[str, Numbers]
    plain: Mapping[str, Numbers]
    equal: int
    of: int
    bugs: int
    options: Mapping[str, Any]
    ids: str = ""
    rounds: Sequence[Mapping[int, int]] = ()

    def metric(self, name: str, draws: NDArray[np.int64]) -> Numbers:
        """[times] a metric of drawn prompts, NaN where it was not measured. `draws`: [times, prompts] indices."""

        def sums(of: Mapping[str, Numbers]) -> Sums:
            drawn = {field: numbers[draws].sum(-1) for field, numbers in of.items()}
            return defaultdict(lambda: np.full(len(draws), math.nan), drawn)

        return METRICS[name].of(sums(self.own), sums(self.plain))

    def deviation(self, name: str) -> float:
        """Standard deviation of a metric over several prompts, of a sample; in DynaTree's tables, of a population."""
        return float(np.nanstd(self.metric(name, np.arange(len(self.own["steps"]))[:, None]), ddof=1))

    @property
    def starts_with(self) -> str:
        """What the method knew before the first prompt; no table is printed without it."""
        files = [
            f"{name} {Path(file['name']).name} {file['sha256'][:8]}" for name, file in self.options["files"].items()
        ]
        if "server" in self.options:
            return f"what the server at {self.options['server']} was started with"
        if drafter := self.options["drafter"]:
            own = " (the target's first layers)" if is_first_layers(drafter) else ""
            files.append(f"drafter {drafter['fingerprint']}{own}")
            if answers := drafter.get("answers"):
                steps = f", {drafter['steps']} steps" if drafter["steps"] else ""
                files[-1] += f" (trained on answers {answers[:8]}{steps})"
        return ", ".join(files) or "nothing"


def measured(
    records: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]], first: int | None = None
) -> Measured:
    """One method's records on one set, and those of plain decoding.

    Args:
        first: of each answer this many tokens count; None for all.

    Raises:
        InvalidRequest: records that do not say what the method started with.
    """
    kinds = [record["finding"]["kind"] for record in records]
    options = records[0]["options"]
    if missing := {"files", "drafter"} - options.keys():
        raise InvalidRequest(
            f"records of {records[0]['method']}: their options lack {', '.join(sorted(missing))}, which leaves open "
            "what it started with; measure it again"
        )
    if drafter := options["drafter"]:
        options = options | {"drafter": drafter | {"named": records[0].get("named")}}
    own, base = ([one if first is None else _first(one, first) for one in some] for some in (records, plain))
    ids = " ".join(record.get("id", "") for record in records)
    equal, bugs = kinds.count("equal"), kinds.count("bug")
    rounds = [_rounds(record) for record in records]
    return Measured(_fields(own), _fields(base), equal, len(kinds), bugs, options, ids=ids, rounds=rounds)


def is_first_layers(drafter: Mapping[str, Any]) -> bool:
    """Whether a record's drafter is the target's own first layers, which are not trained to draft. Like them, a GGUF
    file has no folder, but it was named."""
    named = str(drafter.get("named") or EARLY_EXIT).partition(":")[0]
    return drafter["kind"] == "draft-lm" and drafter.get("folder") is None and named == EARLY_EXIT


def _rounds(record: Mapping[str, Any]) -> dict[int, int]:
    """The tokens of each round by the number of tokens before it; empty for several turns, for an answer other than
    plain decoding's, and where rounds are unknown."""
    turns = record.get("rounds", ())
    tokens = [one[0] for one in turns[0]] if len(turns) == 1 and record["equal"] else []
    return dict(zip(accumulate(tokens, initial=1), tokens))


def _first(record: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The record of an answer that is cut after this many tokens: that of a greedy run that stops there, except for the
    last rounds, whose trees would have been limited to the tokens left. Figures known only of whole answers are NaN."""
    (rounds,) = record["rounds"]
    reached, steps, drafted, decode_ms = 1, 0, 0, 0.0
    while reached < count and steps < len(rounds):
        tokens, nodes, decode_ms = rounds[steps]
        reached, steps, drafted = reached + tokens, steps + 1, drafted + nodes
    tokens = min(reached, count)
    times = {"decode_ms": decode_ms, "end_to_end_ms": decode_ms + record["ttft_ms"]}
    counts: dict[str, float] = {
        "steps": steps,
        "drafted": drafted,
        "accepted": max(tokens - 1 - steps, 0),
        "new_tokens": tokens,
    }
    counts |= {"tokens_per_step": (tokens - 1) / max(steps, 1), "tpot_ms": decode_ms / max(tokens - 1, 1)}
    group = {**record["group"], **times, "decoded": tokens - 1, "new_tokens": tokens}
    ids = [turn[:tokens] for turn in record.get("token_ids", ())]
    return {**record, **dict.fromkeys(OF_RECORDS, math.nan), **counts, **times, "group": group, "token_ids": ids}


def _fields(records: Sequence[Mapping[str, Any]]) -> dict[str, Numbers]:
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["group"]["number"], []).append(record)
    fields: dict[str, list[float]] = {}
    for number in sorted(groups):
        own = groups[number]
        cells = {name: own[0]["group"][name] for name in _OF_GROUPS}
        cells |= {name: sum(record.get(name, math.nan) for record in own) for name in OF_RECORDS}
        cells |= {"requests": len(own), "equal": sum(record["equal"] for record in own)}
        cells |= {"memory_mb": sum(record["memory_mb"] for record in own)}
        cells |= {"warm_mb": sum(_warm_mb(record["options"]) for record in own)}
        cells |= {"levels": sum(_levels(record["options"]) for record in own)}
        cells |= _thresholds(own)
        cells |= {"repeated": sum(_repeated(record.get("token_ids", ())) for record in own)}
        cells |= {"own_ms": sum(record["decode_ms"] for record in own)}
        cells |= {"ttft_ms": sum(record["ttft_ms"] for record in own)}
        times = [record["tpot_ms"] for record in own if record.get("tpot_ms") is not None]
        cells |= {"tpot_ms": sum(times), "timed": len(times)}  # answers of one token have no time per token
        cells |= {"per_step": sum(record["tokens_per_step"] for record in own)}
        cells |= {"rate": sum(1e3 * record["new_tokens"] / record["end_to_end_ms"] for record in own)}
        for name, value in cells.items():
            fields.setdefault(name, []).append(float(value))
    return {name: np.array(numbers) for name, numbers in fields.items()}


def _warm_mb(options: Mapping[str, Any]) -> float:
    """Of the file of a warm-up, 36 bytes for each row, in MB; 0 without one, NaN in records that do not say."""
    return float(options["files"]["warm"].get("bytes", math.nan)) / 1e6 if "warm" in options["files"] else 0.0


def _levels(options: Mapping[str, Any]) -> float:
    """What DynaTree's numbers divide tokens per step by: K of a chain, D + 2 of a fixed tree, which has D + 1 levels,
    and D_0 + 2 of its own; NaN for what drafts nothing, or does not say."""
    settings = options.get("shape_settings") or {}
    if "base_depth" in settings:
        return float(settings["base_depth"] + 2)
    return float(settings["depth"] + 1 if "depth" in settings else options.get("budget") or math.nan)


def _repeated(turns: Sequence[Sequence[int]]) -> float:
    """How many tokens of answers stand in 16-grams that the same answer had before; NaN in records without tokens."""
    count = 0
    for ids in turns:
        seen, places = set[tuple[int, ...]](), set[int]()
        for start in range(len(ids) - GRAM + 1):
            gram = tuple(ids[start : start + GRAM])
            places |= {*range(start, start + GRAM)} if gram in seen else set()
            seen.add(gram)
        count += len(places)
    return float(count) if turns else math.nan


def _thresholds(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of gates, by their number from the root on."""
    settings = [record["options"].get("shape_settings") or {} for record in records]
    found = [[*one.get("thresholds", ()), *[math.nan] * GATES][:GATES] for one in settings]
    return {f"gate_{number}": sum(column) for number, column in enumerate(zip(*found), 1)}


@dataclass(frozen=True)
class Metric:
    """A quantity that a column shows.

    Attributes:
        of: computes it from the sums of a row and those of plain decoding in the same run.
        fewer_is_better: whether smaller is better, as for times.
        is_exact: whether it is a count, which does not depend on the machine's speed.
    """

    title: str
    of: Callable[[Sums, Sums], Numbers]
    digits: int = 2
    unit: str = ""
    fewer_is_better: bool = False
    is_exact: bool = False

    def printed(self, value: float, more: int = 0) -> str:
        """A value, with this many places more than usual."""
        return f"{value:.{self.digits + more}f}{self.unit}"


def _ratio(over: str, under: str, factor: float = 1.0) -> Callable[[Sums, Sums], Numbers]:
    return lambda own, plain: factor * own[over] / np.maximum(own[under], 1e-9)


def _share(over: str, under: str) -> Callable[[Sums, Sums], Numbers]:
    """The percentage of `over` in `under`, as a function of sums; NaN where `under` is 0."""
    return lambda own, plain: 100 * own[over] / np.where(own[under] > 0, own[under], np.nan)


def _per_token(sums: Sums, time: str, tokens: str) -> Numbers:
    return np.maximum(sums[time], 1e-9) / np.maximum(sums[tokens], 1e-9)


METRICS: dict[str, Metric] = {
    "speedup": Metric(
        "speedup",
        lambda own, plain: _per_token(plain, "decode_ms", "decoded") / _per_token(own, "decode_ms", "decoded"),
        unit="x",
    ),
    "end_to_end_speedup": Metric(
        "speedup with the prompt",
        lambda own, plain: (
            _per_token(plain, "end_to_end_ms", "new_tokens") / _per_token(own, "end_to_end_ms", "new_tokens")
        ),
        unit="x",
    ),
    "speedup_of_rates": Metric(
        "speedup of mean rates", lambda own, plain: own["rate"] / np.maximum(plain["rate"], 1e-9), unit="x"
    ),
    "tokens_per_second": Metric("tokens/s", _ratio("decoded", "decode_ms", 1e3), 1),
    "end_to_end_rate": Metric("tokens/s with the prompt", _ratio("rate", "requests"), 1),
    "tokens_per_step": Metric("tokens per step", _ratio("decoded", "steps")),
    "tokens_per_step_of_prompts": Metric("tokens per step, mean of prompts", _ratio("per_step", "requests")),
    "accepted_per_step": Metric("accepted per step", _ratio("accepted", "steps")),
    "accepted_per_drafted": Metric("accepted of drafted", _share("accepted", "drafted"), 1, "%"),
    "accepted_as_printed": Metric("tokens per step of the depth", _share("per_step", "levels"), 1, "%"),
    "retrieved_share": Metric("retrieved of accepted", _share("accepted_retrieved", "accepted"), 1, "%"),
    "repeated_share": Metric("tokens in repeated 16-grams", _share("repeated", "new_tokens"), 1, "%"),
    "steps": Metric("rounds per request", _ratio("steps", "requests"), 1, fewer_is_better=True),
    "drafted_per_step": Metric("drafted per step", _ratio("drafted", "steps"), 1),
    "ttft_ms": Metric("TTFT", _ratio("ttft_ms", "requests"), 1, " ms", True),
    "tpot_ms": Metric("TPOT", _ratio("tpot_ms", "timed"), 2, " ms", True),
    **{
        phase: Metric(phase.replace("_ms", ", ms of a round"), _ratio(phase, "steps"), 2, "", True)
        for phase in (*PHASES, *DRAFT_MS)
    },
    "drafter_ms": Metric(
        "drafting without retrieval, ms of a round",
        lambda own, plain: (own["draft_ms"] - sum(own[name] for name in GRAFT_MS)) / np.maximum(own["steps"], 1e-9),
        fewer_is_better=True,
    ),
    "memory_mb": Metric("memory, MiB", _ratio("memory_mb", "requests"), 0, "", True, True),
    "peak_mb": Metric("peak memory, MiB", _ratio("peak_mb", "requests"), 0, "", True, True),
    "warm_mb": Metric("file of the warm-up, MB", _ratio("warm_mb", "requests"), 2, is_exact=True),
    **{
        f"gate_{number}": Metric(f"threshold of gate {number}", _ratio(f"gate_{number}", "requests"), is_exact=True)
        for number in range(1, GATES + 1)
    },
    "equal": Metric("equal to plain", _ratio("equal", "requests", 100), 0, "%", is_exact=True),
    "round_ms": Metric("round, ms", _ratio("own_ms", "steps"), 2, "", True),
    "breaks_even": Metric(
        "tokens per step at plain decoding's speed",
        lambda own, plain: own["own_ms"] / np.maximum(own["steps"], 1e-9) / _per_token(plain, "own_ms", "decoded"),
        fewer_is_better=True,
    ),
    "bookkeeping": Metric(
        "merging, rebuilding, learning and verdict of a round",
        lambda own, plain: 100 * sum(own[name] for name in _BOOKKEEPING) / np.maximum(own["own_ms"], 1e-9),
        1,
        "%",
        True,
    ),
    "base_loss": Metric("loss of the backbone", _ratio("base_loss", "steps"), 3, fewer_is_better=True),
    "forward_share": Metric("verification of a round", _ratio("forward_ms", "own_ms", 100), 1, "%", True),
    "head_share": Metric("causal head of a round", _ratio("head_ms", "own_ms", 100), 1, "%", True),
    "commit_share": Metric("commit of a round", _ratio("commit_ms", "own_ms", 100), 1, "%", True),
}
