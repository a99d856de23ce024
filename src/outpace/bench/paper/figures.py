"""Figures as SVG, drawn by matplotlib (`outpace[plots]`)."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from outpace.bench.paper.exhibit import Exhibit, ExhibitRun, Row
from outpace.bench.paper.metrics import METRICS
from outpace.bench.paper.verdicts import CellComparison


def draw(exhibit: Exhibit, rows: Sequence[Row], runs: Sequence[ExhibitRun], comparison: CellComparison) -> str | None:
    """An exhibit's figure as SVG; None where it has none, or nothing was measured."""
    drawn = exhibit.figure
    labels = [run.label for run in runs if any(comparison.has(run.label, row.name) for row in rows)]
    if drawn is None or not labels:
        return None
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams |= {"svg.hashsalt": "outpace", "svg.fonttype": "none", "font.size": 9}
    figure, axes = plt.subplots(figsize=(6.4, 3.4))
    kinds = {"bars": _bars, "lines": _lines, "points": _points, "grid": _grid}
    kinds[drawn.kind](axes, exhibit, rows, runs, comparison)
    if drawn.kind != "grid" and axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=7)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _value(comparison: CellComparison, metric: str, run: str, row: str, sets: Sequence[str] = ()) -> float:
    found = comparison.estimate(metric, run, row, sets)
    return float("nan") if found is None else found.value


def _bars(
    axes: Any, exhibit: Exhibit, rows: Sequence[Row], runs: Sequence[ExhibitRun], comparison: CellComparison
) -> None:
    """A group for each set, of each run where these differ in sets, and a bar for each row."""
    assert exhibit.figure is not None
    metric, wanted = exhibit.figure.metric, exhibit.figure.sets
    places = [(run.label, of) for run in runs for of in run.sets if not wanted or of in wanted]
    shown = [row for row in rows if any(comparison.has(run.label, row.name) for run in runs)]
    width = 0.8 / max(len(shown), 1)
    for place, row in enumerate(shown):
        heights = [_value(comparison, metric, run, row.name, (of,)) for run, of in places]
        axes.bar(np.arange(len(places)) + (place + 0.5) * width - 0.4, heights, width, label=row.name)
    names = [of if len(runs) == 1 else f"{of}\n{run}" for run, of in places]
    axes.set_xticks(range(len(places)), names)
    axes.set_ylabel(METRICS[metric].title)


def _lines(
    axes: Any, exhibit: Exhibit, rows: Sequence[Row], runs: Sequence[ExhibitRun], comparison: CellComparison
) -> None:
    """A line for each row over the levels of the runs."""
    assert exhibit.figure is not None
    metric = exhibit.figure.metric
    for row in rows:
        points = [
            (run.level, _value(comparison, metric, run.label, row.name, exhibit.figure.sets))
            for run in runs
            if run.level is not None
        ]
        if any(not np.isnan(value) for _, value in points):
            axes.plot(*zip(*points), marker="o", label=row.name)
    axes.set_xticks([run.level for run in runs if run.level is not None])
    axes.set(xlabel=exhibit.figure.x or "", ylabel=METRICS[metric].title)


def _points(
    axes: Any, exhibit: Exhibit, rows: Sequence[Row], runs: Sequence[ExhibitRun], comparison: CellComparison
) -> None:
    """A point for each row, one metric over another."""
    assert exhibit.figure is not None
    assert exhibit.figure.x is not None
    for row in rows:
        place = [
            _value(comparison, metric, runs[0].label, row.name, exhibit.figure.sets)
            for metric in (exhibit.figure.x, exhibit.figure.metric)
        ]
        if not np.isnan(place).any():
            axes.scatter(*place)
            axes.annotate(row.name, place, fontsize=7, xytext=(3, 3), textcoords="offset points")
    axes.margins(0.2)  # for names
    axes.set(xlabel=METRICS[exhibit.figure.x].title, ylabel=METRICS[exhibit.figure.metric].title)


def _grid(
    axes: Any, exhibit: Exhibit, rows: Sequence[Row], runs: Sequence[ExhibitRun], comparison: CellComparison
) -> None:
    """The best value over a sweep's other fields for each pair of two of them."""
    assert exhibit.figure is not None
    assert exhibit.sweep is not None
    drawn, sweep = exhibit.figure, exhibit.sweep
    across, up = drawn.x or "", drawn.y or ""
    cells: dict[tuple[Any, Any], float] = {}
    for row, values in (sweep.cells(True) | sweep.cells(False)).items():
        number = _value(comparison, drawn.metric, runs[0].label, row)
        if not np.isnan(number):
            place = values[across], values[up]
            cells[place] = max(cells.get(place, -np.inf), number)
    columns, lines = (sorted({place[side] for place in cells}) for side in (0, 1))
    grid = np.array([[cells.get((column, line), np.nan) for column in columns] for line in lines])
    image = axes.imshow(grid, aspect="auto", origin="lower", cmap="viridis")
    for (line, column), number in np.ndenumerate(grid):
        axes.text(column, line, f"{number:.2f}", ha="center", va="center", color="white", fontsize=7)
    axes.set_xticks(range(len(columns)), [str(one) for one in columns])
    axes.set_yticks(range(len(lines)), [str(one) for one in lines])
    axes.set(xlabel=across, ylabel=up)
    axes.figure.colorbar(image, label=METRICS[drawn.metric].title)
