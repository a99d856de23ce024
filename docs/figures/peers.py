"""The chart of docs/measurements/peers.md, from its tables: `python docs/figures/peers.py`.

Needs matplotlib (`pip install 'outpace[plots]'`).
"""

from pathlib import Path

import matplotlib
from tables import numbers, table

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "outpace"
    matplotlib.rcParams["font.size"] = 10
    raced, by_set = list(reversed(table("peers.md", "who").items())), table("peers.md", "who | mtbench")
    figure, (means, copied) = plt.subplots(
        1, 2, sharey=True, width_ratios=(3, 2), figsize=(8.4, 0.32 * len(raced) + 1.0)
    )
    for place, (name, row) in enumerate(raced):
        color = "#3f51b5" if name.startswith("outpace/") else "#b5bddf"
        speed, of_copied = (numbers(by_set[name][column])[0] for column in ("geometric mean", "wikitext2"))
        equal = row["equal to own plain"]
        means.barh(place, speed, color=color)
        means.text(speed + 0.03, place, f"{speed:.2f}x, {equal} as its plain", va="center", fontsize=8)
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
