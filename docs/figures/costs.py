"""The chart of what passes cost: `python docs/figures/costs.py BFLOAT16.json INT8.json`, of scripts/pass_costs.py.

Needs matplotlib (`pip install 'outpace[plots]'`).
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
SHADES = ("#1a237e", "#3f51b5", "#7986cb", "#b5bddf", "#d9d9d9")


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "outpace"
    matplotlib.rcParams["font.size"] = 9
    figure, panels = plt.subplots(1, 3, figsize=(10.5, 3.2))
    for style, path in zip(("-", "--"), sys.argv[1:], strict=False):
        found = json.loads(Path(path).read_text())
        name = "int8" if found["quantize"] == "int8" else "bfloat16"
        contexts = sorted({one["context"] for one in found["contexts"]})
        for shade, context in zip(SHADES, (contexts[0], contexts[-1]), strict=False):
            own = [one for one in found["contexts"] if one["context"] == context]
            panels[0].plot(
                [o["rows"] for o in own], [o["ms"] for o in own], style, color=shade, label=f"{name}, {context}"
            )
        for shade, rows in zip(SHADES, (1, 16, 64), strict=False):
            own = [one for one in found["contexts"] if one["rows"] == rows]
            panels[1].plot(
                [o["context"] for o in own], [o["ms"] for o in own], style, color=shade, label=f"{name}, {rows}"
            )
        for shade, rows in zip(SHADES, (1, 4, 16), strict=False):
            own = [one for one in found["requests"] if one["rows"] == rows]
            panels[2].plot(
                [o["requests"] for o in own], [o["ms"] for o in own], style, color=shade, label=f"{name}, {rows}"
            )
    titles = ("rows of a pass, by tokens before", "tokens before, by rows", "requests, by rows of each")
    for panel, title in zip(panels, titles, strict=True):
        panel.set_xlabel(title)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=7, frameon=False)
    panels[0].set_ylabel("milliseconds of a pass")
    figure.tight_layout()
    figure.savefig(HERE / "costs.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
