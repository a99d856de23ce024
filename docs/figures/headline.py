"""The chart of the README, from the table of docs/measurements/graft-and-union.md: `python docs/figures/headline.py`.

Needs matplotlib (`pip install 'outpace[plots]'`).
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
SHOWN = {
    "plain": "plain",
    "eagle3": "eagle3",
    "lookup": "lookup",
    "recycle:warm=W": "recycle",
    "graft:warm=W": "graft",
    "outpace:draft=none,warm=W": "outpace, no drafter",
    "outpace:warm=W": "outpace",
}


def rows() -> dict[str, list[str]]:
    """The cells of each method in the first table, K = 15 and greedy."""
    text = (HERE.parent / "measurements" / "graft-and-union.md").read_text()
    table = text.split("**K = 15, greedy**")[1].split("**K = ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:3] == "| `"]
    return {cells[0].strip("`"): cells for cells in lines}


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "outpace"
    matplotlib.rcParams["font.size"] = 10
    figure, axes = plt.subplots(figsize=(7.6, 3.2))
    found = rows()
    for place, (name, label) in enumerate(SHOWN.items()):
        speedup, *interval = (float(number) for number in re.findall(r"\d+\.\d+", found[name][6]))
        axes.barh(place, speedup, color="#3f51b5" if label.startswith("outpace") else "#b5bddf")
        if interval:
            axes.plot(interval, [place, place], color="#222222", linewidth=1)
        end = max([speedup, *interval])
        axes.text(end + 0.03, place, f"{speedup:.2f}x, {found[name][5]} tokens per step", va="center")
    axes.set_yticks(range(len(SHOWN)), list(SHOWN.values()))
    axes.axvline(1, color="#222222", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 3.6)
    axes.set_xlabel("speedup over plain decoding, with 95 % interval; every output equal to plain's")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "headline.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
