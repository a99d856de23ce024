"""Compare training runs, as in Domino's figure 4: losses over steps, and tokens per step on held-out answers.

    pip install -e '.[plots]'
    python scripts/plot_training.py docs/figures/ablation --run curriculum=runs/c0,runs/c1 --run teacher-forcing=runs/t0

writes OUT.json, the numbers, and OUT.png. Several runs of a name are seeds: a line each, in one colour.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer

PIECES = 40  # points of a loss curve, each the mean of the steps between


def main(
    out: Annotated[Path, typer.Argument(help="Without suffix.")],
    run: Annotated[list[str], typer.Option(help="NAME=FOLDER,FOLDER")],
) -> None:
    """Draw losses and tokens per step of training runs."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for text in run:
        name, equals, folders = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"--run {text!r}: give NAME=FOLDER,FOLDER")
        curves[name] = [read(Path(folder)) for folder in folders.split(",")]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(curves) + "\n")
    draw(curves, out.with_suffix(".png"))


def read(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Curves of a run: the losses of base and final logits, and tokens per step."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return {
        "base loss": smooth([(line["step"], line.get("base", line["loss"])) for line in steps]),
        "final loss": smooth([(line["step"], line.get("final", line["loss"])) for line in steps]),
        "tokens per step, held out": [
            (line["step"], line["held_out"]["tokens_per_step"]) for line in lines if "held_out" in line
        ],
    }


def smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of about PIECES intervals, as losses of small steps are noisy."""
    size = max(1, len(points) // PIECES)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [(one[-1][0], round(sum(value for _, value in one) / len(one), 4)) for one in stretches if len(one) == size]


def draw(curves: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A panel per curve, a colour per name."""
    figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for panel, title in zip(panels, ("base loss", "final loss", "tokens per step, held out"), strict=True):
        for colour, (name, runs) in enumerate(curves.items()):
            for seed, run in enumerate(runs):
                panel.plot(
                    *zip(*run[title], strict=True), color=f"C{colour}", linewidth=1, label=name if not seed else None
                )
        panel.set_title(title)
        panel.set_xlabel("optimizer steps")
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
