"""Whether a claim holds: paired comparisons over prompts, with 95 % bootstrap intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outpace.bench.paper.exhibit import Claim, ExhibitRun, Verdict
from outpace.bench.paper.metrics import METRICS, Measured, Numbers

RESAMPLES = 2000
FEWEST = 6  # prompts that an interval takes
Cell = tuple[str, str, str]
"""A run's label, a row's name and a set."""
Cells = Mapping[Cell, Measured]
_WORST: tuple[Verdict, ...] = ("does not hold", "undecided", "holds on average", "holds")


@dataclass(frozen=True)
class Estimate:
    """A metric of a row over some sets: their mean, as the papers average.

    Attributes:
        value, low, high: with the bounds of a 95 % bootstrap interval over prompts; None of fewer than 6 prompts, or of
            one in a set.
        deviation: standard deviation over prompts, the mean of the sets'.
        sets: by set.
        prompts: how many.
    """

    value: float
    low: float | None
    high: float | None
    deviation: float
    sets: Mapping[str, float]
    prompts: int
    equal: float
    bugs: int


@dataclass(frozen=True)
class ClaimFinding:
    """A claim's verdict, with the numbers that decide it."""

    claim: str
    text: str
    verdict: Verdict
    why: str
    numbers: str = ""
    prompts: int = 0
    more_prompts: int | None = None  # how many would decide an undecided claim


def draws(size: int) -> NDArray[np.int64]:
    """[1 + RESAMPLES, prompts]: all prompts, then prompts drawn again. Rows and runs of a size have the same, so that
    comparisons are paired."""
    drawn = np.random.default_rng(size).integers(0, max(size, 1), (RESAMPLES, size))
    return np.concatenate([np.arange(size)[None], drawn])


class CellComparison:
    """Metrics of an exhibit's cells: of all prompts first, then of those drawn."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self.sets = list(dict.fromkeys(of for _, _, of in cells))

    def has(self, run: str, row: str) -> bool:
        return any((run, row, of) in self.cells for of in self.sets)

    def metric(self, name: str, run: str, row: str, sets: Sequence[str] = ()) -> dict[str, Numbers]:
        """By set: the metric of all prompts, then of each time that prompts were drawn."""
        found = {}
        for of in sets or self.sets:
            if (cell := self.cells.get((run, row, of))) is not None:
                found[of] = cell.metric(name, draws(len(cell.own["steps"])))
        return found

    def units(self, run: str, row: str, sets: Sequence[str] = ()) -> list[int]:
        """Prompts, or groups of prompts decoded together, by set."""
        own = [self.cells.get((run, row, of)) for of in sets or self.sets]
        return [len(cell.own["steps"]) for cell in own if cell is not None]

    def estimate(self, name: str, run: str, row: str, sets: Sequence[str] = ()) -> Estimate | None:
        """A metric with its interval; None where nothing was measured."""
        by_set = self.metric(name, run, row, sets)
        if not by_set:
            return None
        own = [self.cells[run, row, of] for of in by_set]
        prompts, pooled = sum(cell.of for cell in own), np.mean(list(by_set.values()), axis=0)
        bounds = np.percentile(pooled[1:], (2.5, 97.5)) if _decides(self.units(run, row, sets)) else (None, None)
        low, high = (None if bound is None else float(bound) for bound in bounds)
        return Estimate(
            value=float(pooled[0]),
            low=low,
            high=high,
            deviation=float(np.mean([cell.deviation(name) for cell in own])),
            sets={of: float(numbers[0]) for of, numbers in by_set.items()},
            prompts=prompts,
            equal=sum(cell.equal for cell in own) / prompts,
            bugs=sum(cell.bugs for cell in own),
        )


def _decides(units: Sequence[int]) -> bool:
    """Whether so many prompts by set make an interval: one of a set shows no spread."""
    return sum(units) >= FEWEST and min(units, default=0) > 1


@dataclass
class _Sides:
    """Differences that a claim says are positive: by run and set, all prompts first, then drawn ones."""

    differences: dict[str, Numbers] = field(default_factory=dict)

    units: list[int] = field(default_factory=list)

    def add(self, name: str, numbers: Numbers, units: int) -> None:
        self.differences[name] = numbers
        self.units.append(units)

    def verdict(self) -> tuple[Verdict, str, int | None]:
        """By the rules: on every set and in the pooled interval; in the interval; against it; undecided."""
        pooled = np.mean(list(self.differences.values()), axis=0)
        if not _decides(self.units):
            return "undecided", f"{pooled[0]:+.3g}", None
        value, (low, high) = pooled[0], np.percentile(pooled[1:], (2.5, 97.5))
        numbers = f"{value:+.3g} ({low:+.3g} to {high:+.3g})"
        if low > 0:
            on_all = all(numbers_of[0] > 0 for numbers_of in self.differences.values())
            return ("holds" if on_all else "holds on average"), numbers, None
        if high < 0:
            return "does not hold", numbers, None
        half = (high - low) / 2
        return "undecided", numbers, int(np.ceil(sum(self.units) * (half / abs(value)) ** 2)) if value else None


def judge(
    claim: Claim,
    runs: Sequence[ExhibitRun],
    comparison: CellComparison,
    checks: Mapping[str, Callable[[], tuple[bool, str]]],
    absent: Mapping[str, str],
) -> ClaimFinding:
    """A claim's verdict.

    Args:
        checks: what is counted rather than measured.
        absent: rows that could not be measured, with the reason.
    """

    def found(
        verdict: Verdict, numbers: str = "", prompts: int = 0, more: int | None = None, why: str = ""
    ) -> ClaimFinding:
        reason = why or claim.why.get(verdict, "")
        return ClaimFinding(claim.id, claim.text, verdict, reason, numbers, prompts, more_prompts=more)

    if claim.missing is not None:
        return found("not testable here", why=claim.missing)
    if claim.check is not None:
        holds, numbers = checks[claim.check]()
        return found("holds" if holds else "does not hold", numbers)
    labels = [run.label for run in runs if not claim.runs or run.label in claim.runs]
    sides = [one for one in _sides(claim, labels, comparison) if one.differences]
    verdicts = [one.verdict() for one in sides]
    numbers, prompts = "; ".join(one[1] for one in verdicts), max((sum(one.units) for one in sides), default=0)
    if claim.contradiction is not None:
        return found("the paper contradicts itself", numbers, prompts, why=claim.contradiction)
    for row in claim.named_rows:
        if row in absent:
            return found("not testable here", why=f"{row}: {absent[row]}")
    if not sides:
        return found("not testable here", why=_unmeasured(claim, labels, comparison))
    worst = min(verdicts, key=lambda one: _WORST.index(one[0]))
    few = worst[0] == "undecided" and not all(_decides(one.units) for one in sides)
    return found(worst[0], numbers, prompts, worst[2], "Too few prompts for an interval." if few else "")


def _unmeasured(claim: Claim, labels: Sequence[str], comparison: CellComparison) -> str:
    rows = [row for row in claim.named_rows if not any(comparison.has(label, row) for label in labels)]
    if rows:
        return f"no records of {', '.join(rows)} in these runs; a full run has them"
    return "too few runs to compare; a full run has them"


def _sides(claim: Claim, labels: Sequence[str], comparison: CellComparison) -> list[_Sides]:
    """What must be positive for a claim to hold."""
    sign = -1.0 if METRICS[claim.metric].fewer_is_better else 1.0

    def values(label: str, row: str, sets: Sequence[str] = claim.sets) -> dict[str, Numbers]:
        own = comparison.metric(claim.metric, label, row, sets)
        if claim.over is None:
            return own
        base = comparison.metric(claim.metric, label, claim.over, sets)
        return {of: own[of] / np.maximum(base[of], 1e-9) for of in own if of in base}

    def units(label: str, row: str, of: str) -> int:
        return comparison.units(label, row, (of,))[0]

    sides = []
    for first, second in zip(claim.order, claim.order[1:]):
        pair = _Sides()
        for label in labels:
            one, other = values(label, first), values(label, second)
            for of in (name for name in one if name in other and len(one[name]) == len(other[name])):
                pair.add(f"{label} {of}", sign * (one[of] - other[of]), units(label, first, of))
        sides.append(pair)
    for row in (*claim.falls, *claim.rises):
        trend = _Sides()
        by_run = [(label, found) for label in labels if (found := values(label, row))]
        for of in by_run[0][1] if len(by_run) > 1 else ():
            if all(of in found for _, found in by_run):
                levels = np.stack([found[of] for _, found in by_run])
                trend.add(of, _rise(levels) * (1.0 if claim.rises else -1.0), units(by_run[0][0], row, of))
        sides.append(trend)
    for row in claim.rows:
        bound = _Sides()
        for label in labels:
            if claim.larger_on is not None:
                first_sets, second_sets = (values(label, row, sets) for sets in claim.larger_on)
                if first_sets and second_sets:
                    larger, smaller = (np.mean(list(one.values()), axis=0) for one in (first_sets, second_sets))
                    bound.add(label, sign * (larger - smaller), sum(comparison.units(label, row, claim.larger_on[0])))
                continue
            for of, numbers in values(label, row).items():
                if claim.at_least is not None:
                    bound.add(f"{label} {of} least", numbers - claim.at_least, units(label, row, of))
                if claim.at_most is not None:
                    bound.add(f"{label} {of} most", claim.at_most - numbers, units(label, row, of))
        sides.append(bound)
    return sides


def _rise(levels: Numbers) -> Numbers:
    """[draws] how much a metric rises over runs, levels [runs, draws]: Spearman's correlation with their order; of two
    runs, their difference."""
    if len(levels) == 2:
        difference: Numbers = levels[1] - levels[0]
        return difference
    less, same = (levels < levels[:, None]).sum(1), (levels == levels[:, None]).sum(1)
    ranks = less + (same - 1) / 2  # [runs, draws]; equal ones share theirs
    places = np.arange(len(levels), dtype=np.float64)[:, None]
    places -= places.mean()
    rise: Numbers = np.sum(places * (ranks - ranks.mean(0)), axis=0)
    return rise / float(np.sum(places**2))
