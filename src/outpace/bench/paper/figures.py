"""Figures as SVG, drawn by matplotlib (`outpace[plots]`): the panels of an exhibit, one below the other."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outpace.bench.paper.cells import CellComparison
from outpace.bench.paper.exhibit import Exhibit, ExhibitRun, Panel, Row
from outpace.bench.paper.metrics import METRICS

_WIDE = 6.4  # inches


def draw(exhibit: Exhibit, rows: Sequence[Row], runs: Sequence[ExhibitRun], comparison: CellComparison) -> str | None:
    """An exhibit's figure as SVG; None where it has none, or nothing was measured."""
    drawings = [_Drawing(panel, exhibit, rows, runs, comparison) for panel in exhibit.panels]
    drawings = [one for one in drawings if one.rows]
    if not drawings:
        return None
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams |= {"svg.hashsalt": "outpace", "svg.fonttype": "none", "font.size": 9}
    heights = [one.inches for one in drawings]
    figure, panels = plt.subplots(
        len(drawings),
        figsize=(_WIDE, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for one, axes in zip(drawings, panels[:, 0], strict=True):
        one.into(axes)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


@dataclass
class _Drawing:
    """A panel and what it shows.

    Attributes:
        rows: those of the exhibit; once made, those that the panel shows and that were measured.
    """

    panel: Panel
    exhibit: Exhibit
    rows: Sequence[Row]
    runs: Sequence[ExhibitRun]
    comparison: CellComparison

    def __post_init__(self) -> None:
        self.runs = [run for run in self.runs if not self.panel.runs or run.label in self.panel.runs]
        self.rows = [
            row
            for row in self.rows
            if row.name.startswith(self.panel.rows or "")
            and any(self.comparison.has(run.label, row.name) for run in self.runs)
        ]

    @property
    def inches(self) -> float:
        """Its height."""
        by_row = self.panel.kind in ("rows", "stack")
        return 0.9 + 0.22 * len(self.rows) if by_row else 3.4

    def into(self, axes: Any) -> None:
        """Draw it."""
        kinds = {
            "bars": self._bars,
            "lines": self._lines,
            "points": self._points,
            "grid": self._grid,
            "rows": self._rows,
            "stack": self._stack,
        }
        kinds[self.panel.kind](axes)
        axes.set_title(self.panel.title, fontsize=9)
        if self.panel.kind == "stack":
            axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))  # bars may be long
        elif self.panel.kind in ("bars", "lines"):
            axes.legend(frameon=False, fontsize=7)

    def _value(self, metric: str, run: str, row: str, sets: Sequence[str] = ()) -> float:
        found = self.comparison.estimate(metric, run, row, sets or self.panel.sets)
        return float("nan") if found is None else found.value

    def _title(self, metric: str) -> str:
        """A metric's title in the exhibit's columns, else its usual one."""
        own = {column.metric: column.title for column in self.exhibit.columns}
        return own.get(metric, METRICS[metric].title)

    def _bars(self, axes: Any) -> None:
        """A group for each set, of each run where these differ in sets, or for the mean, and a bar for each row."""
        wanted, mean = self.panel.sets, ["mean"] * self.panel.average
        places = [
            (run.label, of)
            for run in self.runs
            for of in [*(one for one in run.sets if not wanted or one in wanted), *mean]
        ]
        width = 0.8 / len(self.rows)
        for place, row in enumerate(self.rows):
            heights = [
                self._value(self.panel.metric, run, row.name, () if of == "mean" else (of,)) for run, of in places
            ]
            axes.bar(np.arange(len(places)) + (place + 0.5) * width - 0.4, heights, width, label=row.name)
        names = [of if len(self.runs) == 1 else f"{of}\n{run}" for run, of in places]
        axes.set_xticks(range(len(places)), [name.replace("/", "/\n") for name in names])  # else neighbours overlap
        axes.set_ylabel(self._title(self.panel.metric))

    def _rows(self, axes: Any) -> None:
        """A horizontal bar for each row, with the standard deviation over prompts."""
        panel, run = self.panel, self.runs[0].label
        found = [self.comparison.estimate(panel.metric, run, row.name, panel.sets) for row in self.rows]
        values = [np.nan if one is None else one.value for one in found]
        spread = [0.0 if one is None else one.deviation or 0.0 for one in found]
        axes.barh(range(len(found)), values, xerr=spread, error_kw={"elinewidth": 0.8, "ecolor": "0.4"})
        self._name_rows(axes)
        axes.set_xlabel(self._title(self.panel.metric) + ", with sd over prompts" * any(spread))

    def _stack(self, axes: Any) -> None:
        """A horizontal bar for each row, of parts that add up."""
        left = np.zeros(len(self.rows))
        for metric, title in self.panel.parts.items():
            parts = [self._value(metric, self.runs[0].label, row.name) for row in self.rows]
            axes.barh(range(len(self.rows)), parts, left=left, label=title)
            left += np.nan_to_num(parts)
        self._name_rows(axes)
        axes.set_xlabel(self.panel.x)

    def _name_rows(self, axes: Any) -> None:
        axes.set_yticks(range(len(self.rows)), [row.name for row in self.rows])
        axes.invert_yaxis()

    def _lines(self, axes: Any) -> None:
        """A line for each row over the levels of the runs."""
        runs = [run for run in self.runs if run.level is not None]
        for row in self.rows:
            values = [self._value(self.panel.metric, run.label, row.name) for run in runs]
            axes.plot([run.level for run in runs], values, marker="o", label=row.name)
        axes.set_xticks([run.level for run in runs])
        axes.set(xlabel=self.panel.x, ylabel=self._title(self.panel.metric))

    def _points(self, axes: Any) -> None:
        """A point for each row, one metric over another."""
        metrics = self.panel.x, self.panel.metric
        for row in self.rows:
            place = [self._value(metric, self.runs[0].label, row.name) for metric in metrics]
            axes.scatter(*place)
            axes.annotate(row.name, place, fontsize=7, xytext=(3, 3), textcoords="offset points")
        axes.margins(0.2)  # for names
        axes.set(xlabel=self._title(metrics[0]), ylabel=self._title(metrics[1]))

    def _grid(self, axes: Any) -> None:
        """The best value over a sweep's other fields for each pair of two of them."""
        assert self.exhibit.sweep is not None
        sweep, across, up = self.exhibit.sweep, self.panel.x, self.panel.y
        values = sweep.cells(True) | sweep.cells(False)
        cells: dict[tuple[Any, Any], float] = {}
        for row in self.rows:
            if row.name in values:
                place = values[row.name][across], values[row.name][up]
                number = self._value(self.panel.metric, self.runs[0].label, row.name)
                cells[place] = max(cells.get(place, -np.inf), number)
        columns, lines = (sorted({place[side] for place in cells}) for side in (0, 1))
        grid = np.array([[cells.get((column, line), np.nan) for column in columns] for line in lines])
        image = axes.imshow(grid, aspect="auto", origin="lower", cmap="viridis")
        for (line, column), number in np.ndenumerate(grid):
            axes.text(column, line, f"{number:.2f}", ha="center", va="center", color="white", fontsize=7)
        axes.set_xticks(range(len(columns)), [str(one) for one in columns])
        axes.set_yticks(range(len(lines)), [str(one) for one in lines])
        axes.set(xlabel=across, ylabel=up)
        axes.figure.colorbar(image, label=self._title(self.panel.metric))
