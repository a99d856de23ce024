"""The chart of the README, from the methods of docs/measurements/cpu-pass.md: `python docs/figures/headline.py`.

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
    "domino:shape=beam": "domino",
    "graft": "graft",
    "recycle": "recycle",
    "lookup": "lookup",
    "outpace": "outpace",
    "outpace:draft=none": "outpace, no drafter",
}


def rows() -> dict[str, list[str]]:
    """The cells of each method in the table of methods."""
    text = (HERE.parent / "measurements" / "cpu-pass.md").read_text()
    table = text.split("## Methods")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:3] == "| `"]
    return {cells[0].strip("`"): cells for cells in lines}


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "outpace"
    matplotlib.rcParams["font.size"] = 10
    figure, axes = plt.subplots(figsize=(7.6, 3.2))
    found = rows()
    for place, (name, label) in enumerate(SHOWN.items()):
        speedup, *interval = (float(number) for number in re.findall(r"\d+\.\d+", found[name][2]))
        axes.barh(place, speedup, color="#3f51b5" if label.startswith("outpace") else "#b5bddf")
        if interval:
            axes.plot(interval, [place, place], color="#222222", linewidth=1)
        end = max([speedup, *interval])
        axes.text(end + 0.03, place, f"{speedup:.2f}x, {found[name][1].strip('*')} tokens per step", va="center")
    axes.set_yticks(range(len(SHOWN)), list(SHOWN.values()))
    axes.axvline(1, color="#222222", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 2.9)
    axes.set_xlabel("speedup over plain decoding, with 95 % interval; every output equal to plain's")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "headline.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
