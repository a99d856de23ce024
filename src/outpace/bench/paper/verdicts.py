"""Whether a claim holds: paired comparisons over prompts, with 95 % bootstrap intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outpace.bench.paper.exhibit import Claim, ExhibitRun, Verdict
from outpace.bench.paper.metrics import METRICS, Measured, Numbers

RESAMPLES = 2000
FEWEST = 6  # prompts that an interval takes
TOO_FEW = f"Too few prompts for an interval, which takes {FEWEST}, and two of each set."
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
    quote: str
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
        """A metric with its interval; None where nothing was measured, or the metric has no value."""
        by_set = self.metric(name, run, row, sets)
        if not by_set:
            return None
        own = [self.cells[run, row, of] for of in by_set]
        if any(np.isnan(numbers[0]) for numbers in by_set.values()):
            return None
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
class _Side:
    """A comparison that a claim makes.

    Attributes:
        name: what is compared, and what it must be.
        gaps: what must be positive, by run and set: of all prompts first, then of drawn ones.
        units: prompts of each of them.
        shown: what is printed for the gaps, of all prompts first, then of drawn ones.
        form: prints it.
        is_exact: it is counted, so that all gaps must be positive or zero, and no interval is needed.
    """

    name: str
    form: Callable[[float], str]
    is_exact: bool = False
    gaps: dict[str, Numbers] = field(default_factory=dict)
    units: list[int] = field(default_factory=list)
    shown: list[Numbers] = field(default_factory=list)

    def add(self, of: str, gap: Numbers, units: int) -> None:
        self.gaps[of] = gap
        self.units.append(units)

    def verdict(self) -> tuple[Verdict, str, int | None]:
        """By the rules: on every set and in the pooled interval; in the interval; against it; undecided."""
        pooled, shown = (np.mean(numbers, axis=0) for numbers in (list(self.gaps.values()), self.shown))
        text = f"{self.name} {self.form(shown[0])}"
        if self.is_exact:
            return ("holds" if all(gap[0] >= 0 for gap in self.gaps.values()) else "does not hold"), text, None
        if not _decides(self.units):
            return "undecided", text, None
        value, (low, high) = pooled[0], np.percentile(pooled[1:], (2.5, 97.5))
        bounds = " to ".join(self.form(bound) for bound in np.percentile(shown[1:], (2.5, 97.5)))
        text += f" ({bounds})"
        if low > 0:
            on_all = all(gap[0] > 0 for gap in self.gaps.values())
            return ("holds" if on_all else "holds on average"), text, None
        if high < 0:
            return "does not hold", text, None
        half = (high - low) / 2
        return "undecided", text, int(np.ceil(sum(self.units) * (half / abs(value)) ** 2)) if value else None


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
        of_claim = {"claim": claim.id, "text": claim.text, "quote": claim.quote}
        return ClaimFinding(
            **of_claim, verdict=verdict, why=reason, numbers=numbers, prompts=prompts, more_prompts=more
        )

    if claim.missing is not None:
        return found("not testable here", why=claim.missing)
    if claim.check is not None:
        holds, numbers = checks[claim.check]()
        return found("holds" if holds else "does not hold", numbers)
    labels = [run.label for run in runs if not claim.runs or run.label in claim.runs]
    sides = [one for one in _Sides(claim, labels, comparison).all() if one.gaps]
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
    return found(worst[0], numbers, prompts, worst[2], TOO_FEW if few else "")


def _unmeasured(claim: Claim, labels: Sequence[str], comparison: CellComparison) -> str:
    rows = [row for row in claim.named_rows if not any(comparison.has(label, row) for label in labels)]
    if rows:
        return f"no records of {', '.join(rows)} in these runs; a full run has them"
    return "too few runs to compare; a full run has them"


class _Sides:
    """The comparisons of a claim, in the runs of these labels; all must come out for it to hold."""

    def __init__(self, claim: Claim, labels: Sequence[str], comparison: CellComparison) -> None:
        self.claim, self.labels, self.comparison = claim, labels, comparison
        self.metric = METRICS[claim.metric]
        self.sign = -1.0 if self.metric.fewer_is_better else 1.0

    def all(self) -> list[_Side]:
        claim = self.claim
        pairs = [self._pair(first, second) for first, second in zip(claim.order, claim.order[1:])]
        trends = [self._trend(row) for row in (*claim.falls, *claim.rises)]
        of_row = self._bound if claim.larger_on is None else self._groups
        return [*pairs, *trends, *(of_row(row) for row in claim.rows)]

    def _values(self, label: str, row: str, sets: Sequence[str] = ()) -> dict[str, Numbers]:
        claim, sets = self.claim, sets or self.claim.sets
        own = {
            of: one
            for of, one in self.comparison.metric(claim.metric, label, row, sets).items()
            if not np.isnan(one[0])
        }
        if claim.over is None:
            return own
        base = self.comparison.metric(claim.metric, label, claim.over, sets)
        return {of: own[of] / np.maximum(base[of], 1e-9) for of in own if of in base}

    def _units(self, label: str, row: str, of: str) -> int:
        return self.comparison.units(label, row, (of,))[0]

    def _form(self, value: float) -> str:
        return f"{value:.2f}" if self.claim.over is not None else self.metric.printed(value)

    def _pair(self, first: str, second: str) -> _Side:
        side, ones, others = _Side(f"{first} / {second}", "{:.2f}".format), list[Numbers](), list[Numbers]()
        for label in self.labels:
            one, other = self._values(label, first), self._values(label, second)
            for of in (name for name in one if name in other and len(one[name]) == len(other[name])):
                side.add(f"{label} {of}", self.sign * (one[of] - other[of]), self._units(label, first, of))
                ones.append(one[of])
                others.append(other[of])
        if ones:
            side.shown = [np.mean(ones, axis=0) / np.maximum(np.mean(others, axis=0), 1e-9)]
        return side

    def _trend(self, row: str) -> _Side:
        by_run = [(label, found) for label in self.labels if (found := self._values(label, row))]
        means = ", ".join(f"{label} {self._form(np.mean(list(own.values()), 0)[0])}" for label, own in by_run)
        form = "difference {:+.2f}" if len(by_run) == 2 else "rank correlation {:+.2f}"
        side = _Side(f"{row}: {means};", form.format)
        for of in by_run[0][1] if len(by_run) > 1 else ():
            if all(of in found for _, found in by_run):
                rise = _rise(np.stack([found[of] for _, found in by_run]))
                side.add(of, rise * (1.0 if self.claim.rises else -1.0), self._units(by_run[0][0], row, of))
                side.shown.append(rise)
        return side

    def _bound(self, row: str) -> _Side:
        claim = self.claim
        name = row if claim.over is None else f"{row} / {claim.over}"
        bounds = {"least": claim.at_least, "most": claim.at_most}
        wanted = " and ".join(f"at {side} {self._form(bound)}" for side, bound in bounds.items() if bound is not None)
        side = _Side(f"{name} ({wanted}):", self._form, self.metric.is_exact)
        for label in self.labels:
            for of, numbers in self._values(label, row).items():
                side.shown.append(numbers)
                if claim.at_least is not None:
                    side.add(f"{label} {of} least", numbers - claim.at_least, self._units(label, row, of))
                if claim.at_most is not None:
                    side.add(f"{label} {of} most", claim.at_most - numbers, self._units(label, row, of))
        return side

    def _groups(self, row: str) -> _Side:
        """The first group of sets against the second."""
        assert self.claim.larger_on is not None
        names = " / ".join(", ".join(group) for group in self.claim.larger_on)
        side = _Side(f"{row}, {names}:", "{:.2f}".format)
        for label in self.labels:
            first, second = (self._values(label, row, sets) for sets in self.claim.larger_on)
            if first and second:
                one, other = (np.mean(list(found.values()), axis=0) for found in (first, second))
                units = sum(self.comparison.units(label, row, self.claim.larger_on[0]))
                side.add(label, self.sign * (one - other), units)
                side.shown.append(one / np.maximum(other, 1e-9))
        return side


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
