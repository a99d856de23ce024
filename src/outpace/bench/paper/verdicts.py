"""Whether a claim holds: paired comparisons over prompts, with 95 % bootstrap intervals."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outpace.bench.paper.cells import Cell, CellComparison, Cells
from outpace.bench.paper.exhibit import Claim, ExhibitRun, Verdict
from outpace.bench.paper.intervals import FEWEST, Units, decides, interval
from outpace.bench.paper.metrics import METRICS, Numbers

USUAL: Mapping[Verdict, str] = {
    "undecided": "The difference is smaller than these prompts can tell.",
    "holds on average": "A set or run with few prompts, or groups of them, may differ by chance.",
}
"""Reasons of verdicts, for claims without one."""
MOST = 10_000  # prompts; a claim that would need more is as good as level
TOO_FEW = (
    f"An interval takes at least {FEWEST} different prompts, or groups of them, and 2 of each set in each run; prompts "
    "that several sets or runs share count once."
)
OF_MEDIANS = "Medians of repeated calls on a device, without an interval."
Pair = tuple[Numbers, Numbers]
"""A row's numbers, and those that a ratio divides them by."""
_WORST: tuple[Verdict, ...] = ("does not hold", "undecided", "holds on average", "holds")


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


@dataclass
class _Side:
    """A comparison that a claim makes. Arrays are [1 + RESAMPLES]: all prompts, then bootstrap samples.

    Attributes:
        name: what is compared.
        form: formats a number of it, with this many places more than usual.
        claimed: the claimed bound, and the values by run if there are several.
        limits: the claimed bounds, as numbers.
        pooled: the quantity that must be positive, over all sets and runs; zero suffices for a bound.
        shown: the quantity that is printed.
        gaps: the quantity that must be positive, for each run and set.
        places: the run and set of each of them.
        units: the prompts, or batches, of each of them.
        is_exact: it is a count, which needs no interval.
        is_trend: it is a difference between runs, not their mean.
        largest: the largest absolute value that `shown` can have.
    """

    name: str
    form: Callable[[float, int], str]
    claimed: str = ""
    limits: tuple[float, ...] = (1.0,)
    pooled: Numbers = field(default_factory=lambda: np.zeros(1))
    shown: Numbers = field(default_factory=lambda: np.zeros(1))
    gaps: list[Numbers] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    units: list[Units] = field(default_factory=list)
    is_bound: bool = False
    is_exact: bool = False
    is_trend: bool = False
    largest: float = np.inf

    @property
    def prompts(self) -> int:
        return sum(count for _, count in self.units)

    def show(self, pairs: Mapping[str, list[Pair]], is_ratio: bool) -> None:
        """Print the mean over sets, of all runs and, where there are several, of each. `pairs`: by run."""
        self.shown = _mean([pair for of_run in pairs.values() for pair in of_run], is_ratio)
        if len(pairs) > 1 and not self.is_exact:
            each = (f"{label}: {self.form(_mean(of_run, is_ratio)[0], 0)}" for label, of_run in pairs.items())
            self.claimed += f" ({', '.join(each)})"

    def _apart(self, value: float) -> str:
        """A number with enough places to tell it from a claimed bound: 0.996 is not printed as 1.00, nor -0.004 as
        -0.00."""
        forms = (self.form(value, more) for more in range(4))
        of_limits = {self.form(limit, more) for one in self.limits for limit in (one, -one) for more in range(4)}
        return next((text for text in forms if text not in of_limits), self.form(value, 0))

    def verdict(self) -> tuple[Verdict, str, int | None]:
        """The verdict, its numbers, and the prompts that would decide an undecided one. The claim holds if the pooled
        interval is positive and so is every set; on average if some set is not; and not if the interval is negative."""
        least = 0.0 if self.is_bound else np.nextafter(0.0, 1.0)
        against = [place for place, gap in zip(self.places, self.gaps, strict=True) if not gap[0] >= least]
        claimed = f", claimed {self.claimed}"
        if self.is_exact:
            return ("does not hold" if against else "holds"), f"{self.name} {self._apart(self.shown[0])}{claimed}", None
        text = f"{self.name} {self.form(self.shown[0], 0)}"
        if not decides(self.units):
            return "undecided", text + claimed, None
        value, (low, high) = self.pooled[0], interval(self.pooled, self.units, not self.is_trend)
        shown = interval(self.shown, self.units, not self.is_trend).clip(-self.largest, self.largest)
        text += " ({} to {})".format(*map(self._apart, shown)) + claimed
        if low >= least:
            text += f", not on {', '.join(against)}" if against else ""
            return ("holds on average" if against else "holds"), text, None
        if high < 0:
            return "does not hold", text, None
        reach = value - low if value > 0 else high - value  # to the end of the interval that lies beyond equality
        more = int(np.ceil(self.prompts * (reach / value) ** 2)) if value else 0
        return "undecided", text, more if self.prompts < more <= MOST else None


def judge(
    claim: Claim,
    runs: Sequence[ExhibitRun],
    comparison: CellComparison,
    checks: Mapping[str, Callable[[], tuple[bool, str]]],
    absent: Mapping[str, str],
    planned: Collection[Cell] = (),
    due: Collection[Cell] = (),
) -> ClaimFinding:
    """A claim's verdict. Cells that are due but not measured leave it undecided, unless the others contradict it.

    Args:
        checks: functions, by name, for claims that are counted rather than measured.
        absent: rows that could not be measured, with the reason.
        planned: all cells of a full run; the finding names those that were not measured.
        due: those of this run, quick or full.
    """

    def found(
        verdict: Verdict, numbers: str = "", prompts: int = 0, more: int | None = None, why: str = ""
    ) -> ClaimFinding:
        reason = why or claim.why.get(verdict) or USUAL.get(verdict, "")
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
    if claim.of_average:
        verdicts = [("holds" if one[0] == "holds on average" else one[0], *one[1:]) for one in verdicts]
    numbers, prompts = "; ".join(one[1] for one in verdicts), max((one.prompts for one in sides), default=0)
    if sides and (lacking := _lacking(claim, planned, comparison.cells)):
        numbers += f"; without {' and '.join(lacking)}"
    if claim.contradiction is not None:
        return found("the paper contradicts itself", numbers, prompts, why=claim.contradiction)
    for row in claim.named_rows:
        if row in absent:
            return found("not testable here", why=f"{row}: {absent[row]}")
    if not sides:
        unmeasured = _unmeasured(claim, labels, comparison, due)
        if unmeasured is not None:
            return found("undecided", why=unmeasured)
        unknown = f"no {METRICS[claim.metric].title} in these records, or not of the same prompts for all rows"
        return found("not testable here", why=unknown)
    verdict = min((one[0] for one in verdicts), key=_WORST.index)
    if verdict in ("holds", "holds on average") and _lacking(claim, due, comparison.cells):
        return found("undecided", numbers, prompts, why="Not all of it is measured yet.")
    few = verdict == "undecided" and not all(decides(one.units) for one in sides)
    needed = [one[2] for one in verdicts if one[0] == "undecided" and one[2] is not None]
    more = max(needed, default=None) if verdict == "undecided" else None
    return found(verdict, numbers, prompts, more, TOO_FEW if few else OF_MEDIANS if comparison.are_medians else "")


def _lacking(claim: Claim, planned: Collection[Cell], cells: Cells) -> list[str]:
    """Cells that a claim compares and that were not measured: whole rows, whole runs, or single ones, by name."""
    own = [
        (label, row, of)
        for label, row, of in planned
        if row in claim.named_rows and label in (claim.runs or (label,)) and of in (claim.named_sets or (of,))
    ]
    gone = [cell for cell in own if cell not in cells]
    rows, labels = {cell[1] for cell in own if cell in cells}, {cell[0] for cell in own if cell in cells}
    return list(
        dict.fromkeys(
            row if row not in rows else label if label not in labels else f"{row} on {of}" + f" ({label})" * bool(label)
            for label, row, of in gone
        )
    )


def _unmeasured(claim: Claim, labels: Sequence[str], comparison: CellComparison, due: Collection[Cell]) -> str | None:
    """What a full run would measure of a claim without any comparison; None if nothing of it is missing."""
    rows = [row for row in claim.named_rows if not any(comparison.has(label, row) for label in labels)]
    if rows:
        where = f"at {', '.join(claim.runs)}" if claim.runs else "in these runs"
        names = " and ".join(rows)  # which have commas
        return f"no records of {names} {where}: quick runs leave them out, or they are not measured yet"
    if (claim.falls or claim.rises) and sum(comparison.has(label, claim.named_rows[0]) for label in labels) < 2:
        return "too few runs to compare; a full run has them"
    places = ((label, row) for label in labels for row in claim.named_rows)
    values = (comparison.metric(claim.metric, *place, claim.named_sets).values() for place in places)
    is_known = any(not np.isnan(numbers[0]) for by_set in values for numbers in by_set)
    return "Not all of it is measured yet." if is_known and _lacking(claim, due, comparison.cells) else None


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
        of_row = of_row if claim.apart is None else self._spread
        rounds = [] if claim.never_less is None else [self._rounds(*claim.never_less)]
        return [*pairs, *trends, *rounds, *(of_row(row) for row in claim.rows)]

    def _add(self, side: _Side, gap: Numbers, label: str, of: str, units: Sequence[Units]) -> None:
        """Add the quantity that must be positive for a run and set."""
        side.gaps.append(gap)
        side.places.append(f"{of} ({label})" if label and len(self.labels) > 1 else of)
        side.units += units

    def _paired(self, label: str, first: str, second: str, sets: Sequence[str] = ()) -> dict[str, Pair]:
        """Numbers of two rows by set, if both have a value, and equally many prompts: not if a run was stopped."""
        rows = first, second
        one, other = (self.comparison.metric(self.claim.metric, label, row, sets or self.claim.sets) for row in rows)
        alike = [of for of in one if of in other and self._units(label, first, of) == self._units(label, second, of)]
        return {of: (one[of], other[of]) for of in alike if not np.isnan([one[of][0], other[of][0]]).any()}

    def _values(self, label: str, row: str, sets: Sequence[str] = ()) -> dict[str, Numbers]:
        pairs = self._paired(label, row, self.claim.over or row, sets)
        return {of: _mean([pair], self.claim.over is not None) for of, pair in pairs.items()}

    def _units(self, label: str, row: str, of: str) -> list[Units]:
        return self.comparison.units(label, row, (of,))

    def _form(self, value: float, more: int = 0) -> str:
        return _ratio(value, more) if self.claim.over is not None else self.metric.printed(value, more)

    def _exact(self, bound: float) -> str:
        """A bound with a third place where two would round it to another one, such as 1.005 to 1.00."""
        return self._form(bound, int(self.claim.over is not None and round(bound, 2) != bound))

    def _pair(self, first: str, second: str) -> _Side:
        side = _Side(f"{first} / {second}:", _ratio, "above 1.00" if self.sign > 0 else "below 1.00")
        side.is_exact = self.metric.is_exact or self.comparison.are_medians
        both: dict[str, list[Pair]] = {}
        for label in self.labels:
            for of, (one, other) in self._paired(label, first, second).items():
                both.setdefault(label, []).append((one, other))
                self._add(side, self.sign * (one - other), label, of, self._units(label, first, of))
        if both:
            over, under = _means([pair for pairs in both.values() for pair in pairs])
            side.pooled = self._gain(over, under)
            side.show(both, is_ratio=True)
        return side

    def _gain(self, over: Numbers, under: Numbers) -> Numbers:
        """How far the ratio, whose interval is printed, is on the claimed side of 1; 0 where both numbers are 0. The
        interval of their difference may lie elsewhere, since those of few prompts are widened."""
        gain: Numbers = self.sign * (over - under) / np.maximum(under, 1e-9)
        return gain

    def _trend(self, row: str) -> _Side:
        by_run = [(label, found) for label in self.labels if (found := self._values(label, row))]
        means = ", ".join(f"{label} {self._form(np.mean(list(own.values()), 0)[0])}" for label, own in by_run)
        over = "" if self.claim.over is None else f" / {self.claim.over}"
        kind = "difference" if len(by_run) == 2 else "rank correlation"
        claimed, rises = "above 0" if self.claim.rises else "below 0", list[Numbers]()
        side = _Side(f"{row}{over}: {means}; {kind}", lambda value, more: f"{value:+.{2 + more}f}", claimed, (0.0,))
        side.is_trend, side.largest = True, np.inf if len(by_run) == 2 else 1.0
        for of in by_run[0][1] if len(by_run) > 1 else ():
            if all(of in found for _, found in by_run):
                rises.append(_rise(np.stack([found[of] for _, found in by_run])))
                units = [one for label, _ in by_run for one in self._units(label, row, of)]
                self._add(side, rises[-1] * (1.0 if self.claim.rises else -1.0), "", of, units)
        if rises:
            side.pooled, side.shown = np.mean(side.gaps, axis=0), np.mean(rises, axis=0)
        return side

    def _bound(self, row: str) -> _Side:
        claim = self.claim
        name = row if claim.over is None else f"{row} / {claim.over}"
        bounds = {"least": claim.at_least, "most": claim.at_most}
        wanted = " and ".join(f"at {side} {self._exact(bound)}" for side, bound in bounds.items() if bound is not None)
        limits = tuple(bound for bound in bounds.values() if bound is not None)
        side = _Side(f"{name}:", self._form, wanted, limits, is_bound=True)
        side.is_exact = self.metric.is_exact or self.comparison.are_medians
        pairs: dict[str, list[Pair]] = {}
        for label in self.labels:
            for of, pair in self._paired(label, row, claim.over or row).items():
                pairs.setdefault(label, []).append(pair)
                within = self._within(_mean([pair], claim.over is not None))
                self._add(side, within, label, of, self._units(label, row, of))
        if pairs:
            side.show(pairs, is_ratio=claim.over is not None)
            side.pooled = self._within(side.shown)
        return side

    def _within(self, numbers: Numbers) -> Numbers:
        """The distance to the claim's nearest bound, negative outside."""
        least = -np.inf if self.claim.at_least is None else self.claim.at_least
        most = np.inf if self.claim.at_most is None else self.claim.at_most
        return np.minimum(numbers - least, most - numbers)

    def _rounds(self, first: str, second: str) -> _Side:
        """Rounds of two rows that begin at the same token of the same answer, one by one."""
        side, below, of_all = _Side("", lambda value, more: f"{value:.0f}", "0", (), is_bound=True, is_exact=True), 0, 0
        for label in self.labels:
            for of in self.claim.sets or self.comparison.sets:
                cells = [self.comparison.cells.get((label, row, of)) for row in (first, second)]
                one, other = cells
                if one is None or other is None or one.ids != other.ids:
                    continue
                both = zip(one.rounds, other.rounds, strict=True)
                pairs = [(own[place], its[place]) for own, its in both for place in own.keys() & its.keys()]
                if pairs:
                    fewer = sum(own < its for own, its in pairs)
                    below, of_all = below + fewer, of_all + len(pairs)
                    self._add(side, np.array([-float(fewer)]), label, of, self._units(label, first, of))
        side.shown = np.array([float(below)])
        side.name = (
            f"of {of_all} rounds that begin at the same token, those in which {first} accepts less than {second}:"
        )
        return side

    def _spread(self, row: str) -> _Side:
        """How far apart a counted metric is on the sets."""
        apart = self.claim.apart or 0.0
        side = _Side(f"{row}, largest difference between sets:", self._form, f"at most {self._form(apart)}", (apart,))
        side.is_bound = side.is_exact = True
        for label in self.labels:
            values = {of: float(numbers[0]) for of, (numbers, _) in self._paired(label, row, row).items()}
            if len(values) > 1:
                found = max(values.values()) - min(values.values())
                side.shown = np.maximum(side.shown, found)
                units = [one for of in values for one in self._units(label, row, of)]
                self._add(side, np.array([apart + 1e-9 - found]), label, "these sets", units)
        return side

    def _groups(self, row: str) -> _Side:
        """The first group of sets against the second."""
        assert self.claim.larger_on is not None
        names = " / ".join(", ".join(group) for group in self.claim.larger_on)
        side, pairs = _Side(f"{row}, {names}:", _ratio, "above 1.00"), []
        for label in self.labels:
            first, second = (self._values(label, row, sets) for sets in self.claim.larger_on)
            if first and second:
                one, other = (np.mean(list(found.values()), axis=0) for found in (first, second))
                pairs.append((one, other))
                units = self.comparison.units(label, row, [of for group in self.claim.larger_on for of in group])
                self._add(side, self.sign * (one - other), label, "these sets", units)
        if pairs:
            one, other = _means(pairs)
            side.pooled, side.shown = self._gain(one, other), _mean(pairs, is_ratio=True)
        return side


def _ratio(value: float, more: int = 0) -> str:
    return f"{value:.{2 + more}f}"


def _means(pairs: Sequence[Pair]) -> Pair:
    """The mean over pairs of the first numbers, and of the second."""
    first, second = (np.mean(numbers, axis=0) for numbers in zip(*pairs, strict=True))
    return first, second


def _mean(pairs: Sequence[Pair], is_ratio: bool) -> Numbers:
    """The mean of the first numbers, divided by that of the second for a ratio."""
    own, over = _means(pairs)
    found: Numbers = own / np.maximum(over, 1e-9) if is_ratio else own
    return found


def _rise(levels: Numbers) -> Numbers:
    """[draws] how much a metric rises over runs, levels [runs, draws]: Spearman's correlation with their order; of two
    runs, their difference."""
    if len(levels) == 2:
        difference: Numbers = levels[1] - levels[0]
        return difference
    less, same = (levels < levels[:, None]).sum(1), (levels == levels[:, None]).sum(1)
    ranks = less + (same - 1) / 2  # [runs, draws]; equal levels share a rank
    places = np.arange(len(levels), dtype=np.float64)[:, None]
    places -= places.mean()
    rise: Numbers = np.sum(places * (ranks - ranks.mean(0)), axis=0)
    return rise / float(np.sum(places**2))
