"""Finds the best method for a model and this machine: all on a few prompts, the best on more, the last on all.

Successive halving (Jamieson and Talwalkar, arXiv 1502.07943), except that a third is kept. Decisions use ratios to
plain decoding, paired by prompt and measured in turns (`runner.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil
from statistics import median

from outpace.api import Model
from outpace.bench.report import median_interval, speedups, summarise
from outpace.bench.runner import PLAIN, BenchPlan, BenchRun, Record
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem
from outpace.drafters.kinds import kinds
from outpace.drafters.method import LANGUAGE_MODEL
from outpace.lib.checks import counted
from outpace.lib.errors import InvalidRequest, OutpaceError
from outpace.lib.stages import Progress
from outpace.methods.catalog import parse_method

FIRST_PROMPTS, KEPT, FINALISTS = 3, 3, 3
"""Prompts of the first heat; the factor by which each heat divides candidates and multiplies prompts; finalists."""
WITHOUT_DRAFTER = (
    "outpace:draft=none",
    *(f"{name}:budget={budget}" for name in ("lookup", "recycle") for budget in (7, 15, 31)),
)
WITH_DRAFTER = {
    "domino": ("outpace:draft=domino", "domino", "domino:shape=beam,budget=7", "domino:shape=beam,budget=15"),
    "lattice": ("outpace:draft=lattice", "lattice:budget=7", "lattice"),
    "dflash": ("outpace:draft=dflash", "dflash:shape=beam,budget=7", "dflash:shape=beam,budget=15"),
    "dspark": ("outpace:draft=dspark", "dspark", "dspark:shape=beam,budget=7", "dspark:shape=beam,budget=15"),
    "dflash2": ("outpace:draft=dflash2", "dflash2", "dflash2:shape=beam,budget=7", "dflash2:shape=beam,budget=15"),
    "eagle3": ("outpace:draft=eagle3", "eagle3:budget=7", "eagle3:budget=15", "eagle3:budget=31", "graft:budget=15"),
    "medusa": ("medusa:budget=7", "medusa:budget=15", "medusa:budget=31"),
    "dart": ("dart:budget=7", "dart:budget=15", "dart:budget=31"),
    LANGUAGE_MODEL: ("outpace:draft=linear", "linear", "dynatree:budget=7", "dynatree:budget=15"),
}
"""Candidates by the kind of drafter, in addition to those without a drafter."""


@dataclass(frozen=True)
class Trial:
    """The result of one candidate.

    Attributes:
        speedups: plain decoding's time per token over its own, by the prompt's number.
        break_even: tokens per step at which a round takes as long as plain decoding of them.
        has_drafter, draft_passes, drafted: whether it drafts with a model; that model's passes, and nodes, per step.
        refusal: a sentence with the prompts on which its output was not plain decoding's; empty if there are none.
    """

    method: str
    speedups: Mapping[int, float]
    tokens_per_step: float = 1.0
    break_even: float = 1.0
    drafting_share: float = 0.0
    has_drafter: bool = False
    draft_passes: float = 0.0
    drafted: float = 0.0
    refusal: str = ""

    @property
    def speedup(self) -> float:
        return _middle(list(self.speedups.values()))

    @property
    def interval(self) -> tuple[float, float] | None:
        return median_interval(list(self.speedups.values()))

    @property
    def effort(self) -> tuple[bool, float, float]:
        """A sort key, simplest first: without a drafter, then with fewer of its passes, then with smaller trees."""
        return self.has_drafter, round(self.draft_passes, 1), self.drafted


Measure = Callable[[tuple[str, ...], Sequence[WorkItem]], Sequence[Trial]]
"""Decodes prompts by methods, plain decoding first, and returns the trial of each."""


@dataclass(frozen=True)
class Outcome:
    """The result of tuning. `trials`: the last trial of each candidate; those that remained longest come first, and
    among them the fastest."""

    chosen: Trial
    why: str
    trials: tuple[Trial, ...]

    @property
    def refused(self) -> tuple[Trial, ...]:
        """Candidates whose output differs from plain decoding's."""
        return tuple(trial for trial in self.trials if trial.refusal)


def candidates(model: Model) -> tuple[tuple[str, ...], dict[str, str]]:
    """The default candidates, and the methods that cannot be built, each with the reason."""
    found, left_out = [*WITHOUT_DRAFTER], dict[str, str]()
    for kind in model.drafters.kinds:
        for method in WITH_DRAFTER.get(kind) or (kinds()[kind].default_method,):  # of another package's kind
            try:
                model.proposer(method)
                found.append(method)
            except OutpaceError as error:
                left_out[method] = str(error)
    return tuple(found), left_out


def tune(methods: Sequence[str], items: Sequence[WorkItem], measure: Measure) -> Outcome:
    """Find the best method. `items`: prompts, at least three, of which the first ones decide which methods remain."""
    if len(items) < FIRST_PROMPTS:
        raise InvalidRequest(
            f"workload: {counted(len(items), 'prompt')}; tune needs at least {FIRST_PROMPTS} to tell methods apart"
        )
    trials: dict[str, Trial] = {}
    left, prompts = [method for method in methods if method != PLAIN], FIRST_PROMPTS
    if not left:
        raise InvalidRequest(f"methods={PLAIN!r}: is what candidates are compared with; name one of these, too")
    while True:
        is_last = len(left) <= FINALISTS or prompts >= len(items)
        heat = measure((PLAIN, *left), items if is_last else items[:prompts])
        ranked = sorted(heat, key=lambda trial: -trial.speedup)
        trials = {trial.method: trial for trial in ranked} | {
            method: trial for method, trial in trials.items() if method not in {one.method for one in heat}
        }
        able = [trial for trial in ranked if not trial.refusal and trial.method != PLAIN]
        if is_last:
            if len(trials[PLAIN].speedups) < FIRST_PROMPTS:
                raise InvalidRequest("workload: most answers are one token long, which takes no time to decode")
            chosen, why = decide(trials[PLAIN], able)
            return Outcome(chosen, why, tuple(trials.values()))
        left = [trial.method for trial in able[: max(FINALISTS, ceil(len(able) / KEPT))]]
        prompts *= KEPT


def decide(plain: Trial, able: Sequence[Trial]) -> tuple[Trial, str]:
    """The candidate to take, and why: the simplest of those that are not significantly slower than the fastest. `able`:
    candidates with plain decoding's output, on the same prompts."""
    paying = [trial for trial in able if _lowest(list(trial.speedups.values())) > 1]
    if not paying:
        best = max(able, key=lambda trial: trial.speedup, default=None)
        found = (
            "no candidate is left"
            if best is None
            else f"the fastest candidate, {best.method} at {_speed(best)}, may be none"
        )
        return plain, f"nothing is surely faster than plain decoding: {found}"
    best = max(paying, key=lambda trial: trial.speedup)
    alike = [trial for trial in paying if trial is best or not _is_surely_faster(best, trial)]
    chosen = min(alike, key=lambda trial: trial.effort)
    if chosen is not best:
        why = f"not significantly slower than the fastest, {best.method} at {_speed(best)}, and is simpler"
        return chosen, f"{_speed(chosen)}, {why}"
    others = [trial.method for trial in alike if trial is not best]
    return best, f"{_speed(best)}, the fastest" + (
        f"; {', '.join(others)} are not significantly slower" if others else ""
    )


def _speed(trial: Trial) -> str:
    """A speedup with its interval."""
    low, high = trial.interval or (trial.speedup, trial.speedup)
    return f"{trial.speedup:.2f}x ({low:.2f}-{high:.2f})"


def spread(items: Sequence[WorkItem]) -> tuple[WorkItem, ...]:
    """Prompts of all data sets in turns, so that the first few are of each."""
    by_dataset: dict[str, list[WorkItem]] = {}
    for item in items:
        by_dataset.setdefault(item.dataset, []).append(item)
    return tuple(item for row in zip_longest(*by_dataset.values()) for item in row if item is not None)


def measuring(model: Model, params: SamplingParams, progress: Progress) -> Measure:
    """A function that measures methods on a model. If the model's exactness is bitwise every difference refuses a
    method, else only one that rounding does not explain."""

    def measure(methods: tuple[str, ...], items: Sequence[WorkItem]) -> Sequence[Trial]:
        plan = BenchPlan(methods, tuple(items), params, check=not model.exactness.is_bitwise)
        with progress(f"{len(methods)} methods", len(items)) as advance:
            return trials_of(BenchRun(model, plan).records(advance))

    return measure


def trials_of(records: Sequence[Record]) -> list[Trial]:
    """The trial of each method from the records of a benchmark."""
    # Copied text counts here: users who tune on it have such prompts.
    figures, ratios = summarise(records, copied=()), speedups(records)
    rates = {(record["method"], record["group"]["number"]): record["tokens_per_step"] for record in records}
    return [
        Trial(
            method=method,
            speedups=ratios[method],
            tokens_per_step=row["tokens_per_step"],
            # By prompt: a round's cost in plain tokens is its tokens over its speedup.
            break_even=_middle([rates[method, number] / ratio for number, ratio in ratios[method].items()]),
            drafting_share=min(row["draft_ms"] / row["round_ms"], 1.0) if row["round_ms"] else 0.0,
            has_drafter=parse_method(method).drafter is not None,
            draft_passes=row["draft_passes_per_step"],
            drafted=row["drafted_per_step"],
            refusal=_refusal(records, method),
        )
        for method, row in figures.items()
    ]


def _refusal(records: Sequence[Record], method: str) -> str:
    own = [record for record in records if record["method"] == method]
    wrong = [record["id"] for record in own if record["finding"]["kind"] not in ("equal", "tie")]
    return f"its output was not plain decoding's on {', '.join(wrong)}" if wrong else ""


def _is_surely_faster(one: Trial, other: Trial) -> bool:
    both = one.speedups.keys() & other.speedups.keys()
    return _lowest([one.speedups[number] / other.speedups[number] for number in sorted(both)]) > 1


def _lowest(ratios: Sequence[float]) -> float:
    """The lower end of the median's interval; 0 for too few measurements."""
    if len(ratios) < FIRST_PROMPTS:
        return 0.0
    return (median_interval(ratios) or (ratios[0], ratios[0]))[0]


def _middle(values: Sequence[float]) -> float:
    """The median; 0 without values."""
    return median(values) if values else 0.0
