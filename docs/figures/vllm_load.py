"""Throughput in vLLM by requests in flight, from the table of docs/measurements/vllm-load.md: `python
docs/figures/vllm_load.py`.

Needs matplotlib (`pip install 'outpace[plots]'`).
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
COLORS = {"plain": "#757575", "lookup:budget=5": "#00897b", "domino": "#b71c1c", "outpace": "#3f51b5"}


def rows() -> list[list[str]]:
    """The cells of all tables, a row for each level and method."""
    text = (HERE.parent / "measurements" / "vllm-load.md").read_text()
    lines = [
        [cell.strip(" `*") for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    return [cells for cells in lines if cells[0].isdigit()]


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "outpace"
    matplotlib.rcParams["font.size"] = 10
    figure, axes = plt.subplots(figsize=(7.0, 3.2))
    for method, color in COLORS.items():
        own: dict[int, float] = {}
        for cells in rows():
            if cells[1] == method:
                own.setdefault(int(cells[0]), float(cells[3].rstrip("x")))  # of the first table that has it
        axes.plot(list(own), list(own.values()), color=color, marker="o", markersize=3, label=method)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes.set_ylim(0)
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("throughput over plain")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(HERE / "vllm-load.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
