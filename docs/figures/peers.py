"""The chart of other libraries, from the table in docs/results.md: `python docs/figures/peers.py`.

Needs matplotlib (`pip install 'outpace[plots]'`).
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
MEAN, COPIED = "geometric mean", "wikitext2"


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
    raced = list(reversed(table("who").items()))
    figure, (means, copied) = plt.subplots(
        1, 2, sharey=True, width_ratios=(3, 2), figsize=(8.4, 0.32 * len(raced) + 1.0)
    )
    for place, (name, row) in enumerate(raced):
        color = "#3f51b5" if name.startswith("outpace/") else "#b5bddf"
        speed, of_copied = (numbers(row[column])[0] for column in (MEAN, COPIED))
        means.barh(place, speed, color=color)
        equal = f"{row['equal to own plain']} as its plain"
        means.text(speed + 0.03, place, f"{speed:.2f}x, {equal}", va="center", fontsize=8)
        copied.barh(place, of_copied, color=color)
        copied.text(of_copied + 0.06, place, f"{of_copied:.2f}x", va="center", fontsize=8)
    means.set_yticks(range(len(raced)), [name for name, _ in raced])
    means.set_xlim(0, 3.9)
    means.set_xlabel("mtbench, gsm8k, humaneval: geometric mean")
    copied.set_xlim(0, 6.6)
    copied.set_xlabel("wikitext2 alone")
    for axes in (means, copied):
        axes.axvline(1, color="#222222", linewidth=0.8, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "peers.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
