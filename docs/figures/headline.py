"""The chart of the README: `python docs/figures/headline.py`.

It draws the medians of all 32 prompts from docs/measurements/cpu-pass.md, with the figures by set where that page has
them (geometric mean of three sets, wikitext2 apart), and the figures of docs/measurements/other-prompts.md.
Needs matplotlib (`pip install 'outpace[plots]'`).
"""

from pathlib import Path

import matplotlib
from tables import numbers, table

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


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "outpace"
    matplotlib.rcParams["font.size"] = 10
    figure, axes = plt.subplots(figsize=(7.6, 4.0))
    measured, by_set = table("cpu-pass.md", "method"), table("cpu-pass.md", "speedup by set")
    others = {name.partition(",")[0]: row for name, row in table("other-prompts.md", "method").items()}
    points: dict[str, list[tuple[float, int]]] = {"other": [], "sets": [], "wikitext2": []}
    for place, (name, label) in enumerate(SHOWN.items()):
        speedup, *interval = numbers(measured[name]["bfloat16: speedup"])
        axes.barh(place, speedup, color="#3f51b5" if label.startswith("outpace") else "#b5bddf")
        if interval:
            axes.plot(interval, [place, place], color="#222222", linewidth=1)
        axes.text(max([speedup, *interval]) + 0.03, place, f"{speedup:.2f}x", va="center")
        if row := by_set.get(f"{name}, bfloat16"):
            points["sets"].append((numbers(row["geometric mean"])[0], place + 0.2))
            points["wikitext2"].append((numbers(row["wikitext2"])[0], place))
        if row := others.get(name):
            points["other"].append((numbers(row["36 other prompts"])[0], place - 0.2))
    styles = {
        "other": ("o", "36 other prompts"),
        "sets": ("D", "geometric mean of mtbench, gsm8k and humaneval"),
        "wikitext2": ("x", "wikitext2 alone"),
    }
    for kind, (marker, label) in styles.items():
        axes.scatter(*zip(*points[kind], strict=True), marker=marker, color="#e65100", s=28, zorder=3, label=label)
    axes.set_yticks(range(len(SHOWN)), list(SHOWN.values()))
    axes.axvline(1, color="#222222", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 3.6)
    axes.set_xlabel("speedup; bars: median of 32 prompts (8 of wikitext2), 95 % interval")
    axes.legend(loc="lower right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "headline.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
