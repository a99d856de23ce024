"""Host work of a round by requests, from the table of docs/measurements/batches.md: `python docs/figures/batches.py`.

Needs matplotlib (`pip install 'outpace[plots]'`).
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
BEFORE, NOW = 2, 3  # columns of the table


def rows() -> list[list[str]]:
    """The cells of the table, a row for each number of requests and K."""
    text = (HERE.parent / "measurements" / "batches.md").read_text()
    table = text.split("## Host work of a round")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return [cells for cells in lines if cells[0].isdigit()]


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "outpace"
    matplotlib.rcParams["font.size"] = 10
    figure, axes = plt.subplots(figsize=(7.0, 3.2))
    for nodes, color in (("7", "#3f51b5"), ("15", "#b71c1c")):
        own = [cells for cells in rows() if cells[1] == nodes]
        requests = [int(cells[0]) for cells in own]
        for column, label, style in ((BEFORE, "before", ":"), (NOW, "now", "-")):
            took = [float(cells[column].strip("*").split()[0]) for cells in own]
            axes.plot(requests, took, style, color=color, marker="o", markersize=3, label=f"K = {nodes}, {label}")
    axes.set_xticks(requests)
    axes.set_ylim(0)
    axes.set_xlabel("requests in a round")
    axes.set_ylabel("host work of a round, ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(HERE / "batches.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
