"""A table or figure of a paper: rows, runs, columns, the paper's values and its claims.

Each is a TOML file in `exhibits/PAPER`; fields are those of `Exhibit`. To add an exhibit, add a file; to add a paper, a
folder, its title in `PAPERS`, and what it has in `tests/unit/bench/paper/test_exhibits.py`. Rows, runs and values
shared with another exhibit are given by its name.
"""

import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import product
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from outpace.bench.paper.metrics import METRICS
from outpace.lib.checks import counted
from outpace.lib.errors import InvalidRequest

PAPERS = {
    "domino": "Domino: Decoupling Causal Modeling from Autoregressive Drafting in Speculative Decoding "
    "(arXiv 2605.29707)",
    "dynatree": "DynaTree: Confidence-Aware Adaptive Tree Speculative Decoding for Efficient LLM Inference",
    "graft": "Draft Less, Retrieve More: Hybrid Tree Construction for Speculative Decoding (Graft, arXiv 2605.20104)",
}
"""Titles of the papers, by name."""
PLAIN_ROW = "plain"
SHARED = ("rows", "runs", "values")  # fields that may name another exhibit
TRAINING = "training"  # the name of the set in a run that compares losses
WITH_PROMPT = {"end_to_end_speedup", "speedup_of_rates", "end_to_end_rate", "ttft_ms"}
Verdict = Literal[
    "holds", "holds on average", "does not hold", "undecided", "not testable here", "the paper contradicts itself"
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Quick(_Strict):
    """What `--quick` changes of a run; None where it changes nothing."""

    prompts: int | None = 4
    tokens: int | None = 64
    first_of: int | None = None


class ExhibitRun(_Strict):
    """How rows are measured. Rows of all exhibits whose runs are alike are measured together, interleaved.

    Attributes:
        label: the setting that differs between an exhibit's runs, such as "T = 1"; a trend follows their order.
        level: that setting as a number, for figures over levels.
        sets: names of prompts: a file NAME_dev.jsonl or NAME.jsonl of `--data`; NAME/CATEGORY for some of them. A run
            of losses has none.
        forgets: methods forget what they learned, before each prompt.
        warm: number of first prompts of each set that are decoded unmeasured.
        characters: prompts are cut to this many; None leaves them whole.
        raw: prompts are continued as they are, without the chat template.
        first_of: count the first `tokens` of answers with this many, whose records the run shares; greedy runs only.
        prompts_once: each prompt is computed for one row and restored for the others: decoding alone is timed.
        batch, in_flight: prompts decoded together, and how many of them at a time; 0 for all.
        in_quick: whether `--quick` measures it, as `quick` shortens it.
        training: compare losses, not decoding: those of the rows' trainings between these fractions of their steps.
    """

    label: str = ""
    level: float | None = None
    sets: tuple[str, ...] = ()
    prompts: int = 16
    tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    forgets: bool = False
    warm: int = 0
    characters: int | None = None
    raw: bool = False
    first_of: int | None = None
    prompts_once: bool = False
    batch: int = 1
    in_flight: int = 0
    quick: Quick = Quick()
    in_quick: bool = True
    training: tuple[float, float] | None = None

    def shortened(self) -> "ExhibitRun":
        """The run as `--quick` measures it."""
        prompts, tokens = self.quick.prompts or self.prompts, self.quick.tokens or self.tokens
        update = {"prompts": min(prompts, self.prompts), "tokens": min(tokens, self.tokens)}
        return self.model_copy(update=update | {"first_of": self.quick.first_of or self.first_of})

    def described(self) -> str:
        """How it was measured, in words."""
        each = " each" if len(self.sets) > 1 else ""
        texts = [f"{counted(self.prompts, 'prompt')}{each} of {', '.join(self.sets)}"]
        texts += [f"after {counted(self.warm, 'warm-up prompt')}{each}"] if self.warm else []
        texts += [f"{self.tokens} tokens at most"]
        texts += [f"cut to {self.characters} characters"] if self.characters else []
        texts += ["end-of-text ignored"] if self.ignore_eos else []
        texts += [f"temperature {self.temperature:g}"]
        texts += [f"{self.in_flight or self.batch} at a time"] if self.batch > 1 else []
        texts += ["methods forget between prompts"] if self.forgets else []
        return (f"{self.label}: " if self.label else "") + ", ".join(texts)

    def protocol(self) -> dict[str, Any]:
        """The settings that the records of a set depend on."""
        own = {"label", "level", "quick", "in_quick", "sets", "first_of", "training"}
        return self.model_dump(exclude=own) | {"tokens": self.decoded}

    @property
    def decoded(self) -> int:
        """Maximal tokens of each recorded answer."""
        return self.first_of or self.tokens


class Row(_Strict):
    """A method under the paper's name.

    Attributes:
        method: as `--method` takes it; {reserved} is the retrieved share of the row `after`, {warm} a file of
            `outpace warmup` made for this target, in 5 rounds, or N for {warmN}; {gates} are checkpoints and thresholds
            that it calibrated on the set, {gates:SET} on another. Empty for a row with `missing`.
        stand_in: what is measured on a target that has no drafter for `method`.
        after: the row whose records decide {reserved}; it is measured first.
        runs: labels of the runs that have it; empty for all.
        missing: why the row cannot be measured.
        needs_drafter: the name that `--drafter NAME=PATH` must give; the row is left out without it.
        trained: kind and settings with which `--train` makes that drafter, as arguments of `outpace train`; the
            exhibit's `training` is added.
        beyond: a row that the paper does not have.
        quick: whether `--quick` measures it.
    """

    name: str
    method: str = ""
    stand_in: str | None = None
    after: str | None = None
    runs: tuple[str, ...] = ()
    missing: str | None = None
    needs_drafter: str | None = None
    trained: tuple[str, ...] = ()
    beyond: bool = False
    quick: bool = True

    def is_in(self, run: ExhibitRun) -> bool:
        """Whether a run has it."""
        return not self.runs or run.label in self.runs


class Sweep(_Strict):
    """Rows made from one method and lists of values, in all combinations; `name` and `method` contain {fields}."""

    name: str
    method: str
    values: dict[str, tuple[float | int | str, ...]]
    quick: dict[str, tuple[float | int | str, ...]] | None = None  # the coarse values of a quick run

    def cells(self, is_quick: bool) -> dict[str, dict[str, float | int | str]]:
        """Values by the name of their row."""
        values = self.quick if is_quick and self.quick is not None else self.values
        cells = [dict(zip(values, combination)) for combination in product(*values.values())]
        return {self.name.format(**cell): cell for cell in cells}

    def rows(self, is_quick: bool) -> list[Row]:
        """A row per combination."""
        return [Row(name=name, method=self.method.format(**cell)) for name, cell in self.cells(is_quick).items()]


class MetricColumn(_Strict):
    """A metric under the paper's name."""

    metric: str
    title: str

    @model_validator(mode="after")
    def _known(self) -> "MetricColumn":
        if self.metric not in METRICS:
            raise ValueError(f"metric={self.metric!r}: one of {', '.join(METRICS)}")
        return self


class Value(_Strict):
    """Values that the paper prints, by set of prompts ("mean" for its average), of one of its targets.

    Attributes:
        deviations: the standard deviations printed with them.
    """

    of: str = ""
    run: str = ""
    row: str
    metric: str
    sets: dict[str, float]
    deviations: dict[str, float] = {}


class Claim(_Strict):
    """What the paper claims, as a comparison of this exhibit's rows. One of the comparisons is given.

    Attributes:
        quote: the paper's sentence; empty if the claim is only read from a table or figure.
        order: rows from the best to the worst: each has a larger metric than the next, or a smaller one where smaller
            is better.
        falls, rises: rows whose metric falls or rises from run to run, in their order.
        over: the row by whose metric the metric is divided, except that of an `order`.
        at_least, at_most: bounds of the metric of `rows`.
        larger_on: two groups of sets; the metric of `rows` is larger on the first.
        never_less: two rows; of rounds that begin at the same token, none of the first accepts less than the second's.
        apart: how much the metric of `rows`, one that is counted, may differ between sets.
        of_average: it is about the mean over sets: single sets may differ.
        of_targets: `falls` or `rises` go from the smallest target to the largest, in a report of several; with one, the
            claim is `missing`.
        check: a name of `checks.CHECKS`, which is counted rather than measured.
        missing: why the claim cannot be tested here.
        contradiction: where the paper's own numbers differ from the claim.
        why: reasons by verdict.
    """

    id: str
    text: str
    quote: str = ""
    metric: str = "speedup"
    order: tuple[str, ...] = ()
    falls: tuple[str, ...] = ()
    rises: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None
    over: str | None = None
    larger_on: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    never_less: tuple[str, str] | None = None
    apart: float | None = None
    of_average: bool = False
    of_targets: bool = False
    check: str | None = None
    missing: str | None = None
    contradiction: str | None = None
    runs: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    why: dict[Verdict, str] = {}

    @model_validator(mode="after")
    def _one_comparison(self) -> "Claim":
        bound = self.at_least is not None or self.at_most is not None or self.apart is not None
        kinds = [self.order, self.falls, self.rises, bound, self.larger_on, self.never_less, self.check]
        given = sum(map(bool, kinds))
        if given > 1 or not (given or self.missing or self.contradiction):
            raise ValueError(
                f"claim {self.id}: give one of order, falls, rises, larger_on, never_less, check, a bound, missing, "
                "contradiction"
            )
        if (bound or self.larger_on) and not self.rows:
            raise ValueError(f"claim {self.id}: name its rows")
        if self.order and self.over is not None:
            raise ValueError(f"claim {self.id}: over={self.over!r}: an order compares rows as they are; leave it out")
        if self.metric not in METRICS:
            raise ValueError(f"claim {self.id}: metric={self.metric!r}: one of {', '.join(METRICS)}")
        return self

    @property
    def named_rows(self) -> tuple[str, ...]:
        """Rows that it compares."""
        over = () if self.over is None else (self.over,)
        return (*self.order, *self.falls, *self.rises, *self.rows, *(self.never_less or ()), *over)

    @property
    def named_sets(self) -> tuple[str, ...]:
        """Sets that it compares; empty for all."""
        return (*self.sets, *(of for group in self.larger_on or () for of in group))


class Panel(_Strict):
    """A part of the exhibit's figure.

    Attributes:
        kind: "bars" of rows by set; "lines" of rows over the runs' levels, whose name is `x`; "points" of rows, `x` and
            `metric`; a "grid" of the sweep's two fields `x` and `y`; "rows", a bar for each; a "stack" of `parts` for
            each row, along `x`.
        parts: titles by metric.
        sets, runs: those that are drawn; empty for all.
        average: whether bars of each run end with those of the mean over all its sets.
        rows: prefixes of the names of the rows that are drawn.
    """

    kind: Literal["bars", "lines", "points", "grid", "rows", "stack"]
    metric: str = ""
    parts: dict[str, str] = {}
    title: str = ""
    x: str = ""
    y: str = ""
    sets: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    average: bool = False
    rows: str | tuple[str, ...] = ""

    @model_validator(mode="after")
    def _measured(self) -> "Panel":
        wanted = [*self.parts] if self.kind == "stack" else [self.metric]
        wanted += [self.x] if self.kind == "points" else []
        if unknown := [one for one in wanted if one not in METRICS]:
            raise ValueError(f"panel of {self.kind}: {', '.join(map(repr, unknown))}: one of {', '.join(METRICS)}")
        return self


class Exhibit(_Strict):
    """A numbered table or figure, or an algorithm.

    Attributes:
        name: as in the paper: "table 1", "figure 2".
        shows: the paper's rows, columns, models and protocol.
        here: what differs from the paper in all runs; prompts and lengths of a run are printed from `runs`.
        kind: diagrams are checked by tests, which `tests` names; provenance lists the models that records name.
        columns: the paper's metrics.
        training: settings of all its trainings.
    """

    paper: str
    name: str
    title: str
    shows: str
    here: str = ""
    kind: Literal["measured", "diagram", "provenance"] = "measured"
    rows: tuple[Row, ...] = ()
    sweep: Sweep | None = None
    runs: tuple[ExhibitRun, ...] = ()
    columns: tuple[MetricColumn, ...] = ()
    values: tuple[Value, ...] = ()
    claims: tuple[Claim, ...] = ()
    panels: tuple[Panel, ...] = ()
    tests: tuple[str, ...] = ()
    training: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _times_are_known(self) -> "Exhibit":
        shown = {column.metric for column in self.columns} | {claim.metric for claim in self.claims}
        if any(run.prompts_once for run in self.runs) and (hidden := shown & WITH_PROMPT):
            raise ValueError(f"prompts_once: leaves no time of the prompt for {', '.join(sorted(hidden))}")
        return self

    @model_validator(mode="after")
    def _names_exist(self) -> "Exhibit":
        if self.sweep is not None:
            return self
        rows, runs = {PLAIN_ROW, *(row.name for row in self.rows)}, {"", *(run.label for run in self.runs)}
        sets = {of for run in self.runs for of in run.sets}
        named = [
            (f"claim {claim.id}", {*claim.named_rows} - rows | {*claim.runs} - runs | {*claim.named_sets} - sets)
            for claim in self.claims
        ]
        named += [("values", {value.row} - rows | {value.run} - runs) for value in self.values]
        named += [(f"row {row.name}", {row.after or PLAIN_ROW} - rows | {*row.runs} - runs) for row in self.rows]
        named += [(f"panel {panel.title}", {*panel.runs} - runs | {*panel.sets} - sets) for panel in self.panels]
        for place, unknown in named:
            if unknown:
                raise ValueError(f"{place}: no row, run or set is named {', '.join(sorted(unknown))}")
        return self

    def rows_of(self, is_quick: bool) -> list[Row]:
        """The rows to measure."""
        swept = [] if self.sweep is None else self.sweep.rows(is_quick)
        return [*(row for row in self.rows if row.quick or not is_quick), *swept]

    def runs_of(self, is_quick: bool) -> list[ExhibitRun]:
        """The runs to measure them in."""
        return [run.shortened() for run in self.runs if run.in_quick] if is_quick else list(self.runs)

    def rows_in_runs(self, is_quick: bool) -> list[tuple[ExhibitRun, Row]]:
        """Each run with each row that it has."""
        rows = self.rows_of(is_quick)
        return [(run, row) for run in self.runs_of(is_quick) for row in rows if row.is_in(run)]

    def cells_of(self, is_quick: bool) -> list[tuple[str, str, str]]:
        """All cells to measure: run label, row name and set."""
        return [
            (run.label, row.name, of)
            for run, row in self.rows_in_runs(is_quick)
            if row.missing is None
            for of in (run.sets if run.training is None else (TRAINING,))
        ]


def read_exhibits(paper: str) -> list[Exhibit]:
    """All exhibits of a paper, tables first, in the order of their numbers.

    Raises:
        InvalidRequest: an unknown paper, a file with an unknown field, or two files of one name.
    """
    if paper not in PAPERS:
        raise InvalidRequest(f"paper={paper!r}: one of {', '.join(PAPERS)}")
    folder = files("outpace") / "bench" / "paper" / "exhibits" / paper
    by_name: dict[str, dict[str, Any]] = {}
    for file in (one for one in folder.iterdir() if one.name.endswith(".toml")):
        own = tomllib.loads(file.read_text(encoding="utf-8"))
        if by_name.setdefault(own.get("name", file.name), own) is not own:
            raise InvalidRequest(f"exhibit {paper}, {file.name}: another file has name={own['name']!r}, too")
    found = []
    for name, own in by_name.items():
        try:
            shared = {field: by_name[own[field]][field] for field in SHARED if isinstance(own.get(field), str)}
            found.append(Exhibit(paper=paper, **own | shared))
        except (ValidationError, TypeError, KeyError) as error:
            raise InvalidRequest(f"exhibit {paper}, {name}: {error}") from error
    return sorted(found, key=lambda exhibit: _place(exhibit.name))


def _place(name: str) -> tuple[int, int, str]:
    kind, _, number = name.partition(" ")
    kinds = ("table", "figure", "section", "algorithm")
    return kinds.index(kind) if kind in kinds else len(kinds), int(number) if number.isdigit() else 0, number


def chosen(exhibits: Sequence[Exhibit], names: Sequence[str]) -> list[Exhibit]:
    """The exhibits of these names, such as "table 1"; all, where none is given.

    Raises:
        InvalidRequest: a name that the paper does not have.
    """
    by_name: Mapping[str, Exhibit] = {exhibit.name: exhibit for exhibit in exhibits}
    for name in names:
        if name not in by_name:
            raise InvalidRequest(f"{name.replace(' ', '=')}: the paper has {', '.join(by_name)}")
    return [by_name[name] for name in dict.fromkeys(names or by_name)]
