"""Two terminals side by side, in real time, from a recording: `python docs/figures/race.py`.

`race.json` is what `python -m benchmarks.peers.record` wrote: when each piece of both answers arrived. The picture is
race.svg, which plays by itself wherever an image is shown.
"""

import json
import math
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLUMNS, LINE, MARGIN, BAR = 60, 17, 12, 28  # characters of a terminal; pixels
WIDTH, GAP, CHARACTER = 474, 12, 7.5  # pixels; a character of 12.5 pixels is 0.6 times as wide in common fonts
PAUSE_S = 4
STYLE = """
text { font: 12.5px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #e6e6ef; white-space: pre }
.muted { fill: #a5a8c0 } .speed { fill: #8fd694 } .box { fill: #1d1f2e; stroke: #565a7a }
@media (prefers-reduced-motion: reduce) { .timed { fill-opacity: 1 !important } .clock { display: none } }
"""


def wrapped(pieces: list[tuple[float, str]]) -> Iterator[list[tuple[float, str]]]:
    """Lines of COLUMNS characters, each with the seconds at which its parts appear."""
    line: list[tuple[float, str]] = []
    used = 0
    for seconds, text in pieces:
        for number, part in enumerate(text.split("\n")):
            if number:
                yield line
                line, used = [], 0
            while part:
                if used == COLUMNS:
                    yield line
                    line, used = [], 0
                line.append((seconds, part[: COLUMNS - used]))
                used, part = min(COLUMNS, used + len(part)), part[COLUMNS - used :]
    yield line


def timed(text: str, total: float, start: float, end: float | None = None, kind: str = "timed") -> str:
    """A span that is seen from `start`, to `end` if there is one, of every `total` seconds."""
    moments = [0, start] if end is None else [0, start, end]
    values = "0;1" if end is None else "0;1;0"
    times = ";".join(f"{moment / total:.5g}" for moment in moments)
    how = f'calcMode="discrete" dur="{total:g}s" repeatCount="indefinite" values="{values}" keyTimes="{times}"'
    hidden = "" if end is None else ' fill-opacity="0"'
    animation = f'<animate attributeName="fill-opacity" {how}/>'
    return f'<tspan class="{kind}"{hidden}>{escape(text, quote=False)}{animation}</tspan>'


def terminal(run: dict[str, Any], left: float, top: float, height: float, total: float) -> Iterator[str]:
    """A window: title, answer as it arrives, clock and speed."""
    pieces = [(seconds, text) for seconds, _, text in run["pieces"]]
    end, tokens = pieces[-1][0], sum(count for _, count, _ in run["pieces"])
    x, title = left + MARGIN, f"{run['peer']} {run['version']}, {run['method']}"
    yield f'<rect class="box" x="{left}" y="{top}" width="{WIDTH}" height="{height}" rx="6"/>'
    yield f'<text class="muted" x="{x}" y="{top + 19}">{escape(title)}</text>'
    ticks = [timed(f"{second} s", total, second, min(second + 1, end), "clock") for second in range(math.ceil(end))]
    # Ticks lie on one another: each starts where the first does.
    for tick in ticks:
        yield f'<text class="muted" x="{left + WIDTH - MARGIN - 5 * CHARACTER}" y="{top + 19}">{tick}</text>'
    for number, line in enumerate(wrapped(pieces)):
        spans = "".join(timed(text, total, seconds) for seconds, text in line)
        if spans:
            yield f'<text x="{x}" y="{top + BAR + LINE * (number + 1)}">{spans}</text>'
    said = f"{tokens} tokens in {end:.1f} s; {run['tokens_per_second']:.1f} tokens/s after the first"
    yield f'<text class="speed" x="{x}" y="{top + height - MARGIN}">{timed(said, total, end)}</text>'


def drawn(recording: dict[str, Any]) -> str:
    """The picture: the prompt above, the faster of llama.cpp's methods on the left, ours on the right."""
    ours = [run for run in recording["runs"] if run["peer"] == "outpace"]
    others = [run for run in recording["runs"] if run["peer"] != "outpace"]
    shown = [max(runs, key=lambda run: run["tokens_per_second"]) for runs in (others, ours)]
    texts = [[(piece[0], piece[2]) for piece in run["pieces"]] for run in shown]
    total = math.ceil(max(text[-1][0] for text in texts)) + PAUSE_S
    rows = max(len(list(wrapped(text))) for text in texts)
    asked = textwrap.wrap(f"> {recording['prompt']['text']}", int((2 * WIDTH + GAP - 2 * MARGIN) / CHARACTER))
    width, above, height = 2 * WIDTH + GAP, LINE * len(asked) + 2 * MARGIN, BAR + LINE * (rows + 2) + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width + 2} {above + GAP + height + 2}">',
        f"<title>{' and '.join(run['peer'] for run in shown)} answer the same prompt, in real time</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="box" width="{width}" height="{above}" rx="6"/>',
    ]
    for number, text in enumerate(asked):
        y = MARGIN + LINE * (number + 1) - 4
        lines.append(f'<text class="muted" x="{MARGIN}" y="{y}">{escape(text, quote=False)}</text>')
    for number, run in enumerate(shown):
        lines += terminal(run, number * (WIDTH + GAP), above + GAP, height, total)
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    (HERE / "race.svg").write_text(drawn(json.loads((HERE / "race.json").read_text(encoding="utf-8"))))
