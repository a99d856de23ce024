"""The chart of a race of peers: `python docs/figures/peers.py runs/peers-DATE/chart.json`.

Needs matplotlib (`pip install 'outpace[plots]'`).
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "outpace"
    matplotlib.rcParams["font.size"] = 10
    chart = json.loads(Path(sys.argv[1]).read_text())
    rows = [row for row in reversed(chart["rows"]) if row["speedup"]]
    figure, axes = plt.subplots(figsize=(8.4, 0.32 * len(rows) + 1.0))
    for place, row in enumerate(rows):
        axes.barh(place, row["speedup"], color="#3f51b5" if row["peer"] == "outpace" else "#b5bddf")
        interval = row["speedup_interval"] or [row["speedup"]]
        if row["speedup_interval"]:
            axes.plot(interval, [place, place], color="#222222", linewidth=1)
        equal = row["equal_to_own_plain"]
        own = "" if equal is None else f", {equal:.0%} as its plain"
        axes.text(max(interval) + 0.03, place, f"{row['tokens_per_second']:.0f} tokens/s{own}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.axvline(1, color="#222222", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 1.45 * max(max(row["speedup_interval"] or [row["speedup"]]) for row in rows))
    axes.set_xlabel("speed over our plain decoding in bfloat16, with 95 % interval")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "peers.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
