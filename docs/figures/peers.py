"""The charts of other libraries, from the tables in docs/results.md: `python docs/figures/peers.py`.

Needs matplotlib (`pip install 'outpace[plots]'`).
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
MEAN, COPIED = "geometric mean", "wikitext2"
# By chart: the first header of its table, and by column of a panel its label and the end of its axis.
CHARTS = {
    "peers-4bit.svg": ("contender", {MEAN: ("five sets: geometric mean", 3.6)}),
    "peers.svg": (
        "who",
        {MEAN: ("mtbench, gsm8k, humaneval: geometric mean", 3.9), COPIED: ("wikitext2 alone", 6.6)},
    ),
}


def table(first: str, page: str = "results.md") -> dict[str, dict[str, str]]:
    """The rows of a page's first table whose header begins with these cells: by their first cell, then by column."""
    lines = (HERE.parent / page).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    header, rows = _cells(lines[start]), {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = _cells(line)
        rows[cells[0].replace("`", "")] = dict(zip(header, cells, strict=True))
    return rows


def numbers(cell: str) -> list[float]:
    """The numbers in a cell: a speed, or a speed and its interval."""
    return [float(number) for number in re.findall(r"\d+\.\d+", cell)]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "outpace"
    matplotlib.rcParams["font.size"] = 10
    for file, (first, panels) in CHARTS.items():
        raced = list(reversed(table(first).items()))
        figure, every = plt.subplots(
            1,
            len(panels),
            sharey=True,
            squeeze=False,
            figsize=(8.4, 0.32 * len(raced) + 1.0),
            width_ratios=(3, 2)[: len(panels)],
        )
        for axes, (column, (label, end)) in zip(every[0], panels.items(), strict=True):
            for place, (name, row) in enumerate(raced):
                (speed, *_) = numbers(row[column])
                axes.barh(place, speed, color="#3f51b5" if name.startswith("outpace/") else "#b5bddf")
                equal = f", {row['equal to own plain']} as its plain" if column == MEAN else ""
                axes.text(speed + 0.01 * end, place, f"{speed:.2f}x{equal}", va="center", fontsize=8)
            axes.set_xlim(0, end)
            axes.set_xlabel(label)
            axes.axvline(1, color="#222222", linewidth=0.8, linestyle=":")
            axes.spines[["top", "right"]].set_visible(False)
        every[0, 0].set_yticks(range(len(raced)), [name for name, _ in raced])
        figure.tight_layout()
        figure.savefig(HERE / file, facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
