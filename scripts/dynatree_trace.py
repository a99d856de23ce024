"""How DynaTree's history moves its settings: D0, tau_h and acceptance per round, as JSON lines and as a figure.

    pip install -e '.[plots]'
    python scripts/dynatree_trace.py --model TARGET --drafter DRAFTER --workload FILE:8 --out docs/figures/trace

writes OUT.jsonl and OUT.png.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer

import outpace
from outpace.core.params import SamplingParams
from outpace.data.workload import read_workloads


def main(
    model: Annotated[str, typer.Option()],
    workload: Annotated[list[str], typer.Option()],
    out: Annotated[Path, typer.Option()],
    drafter: Annotated[str | None, typer.Option()] = None,
    method: Annotated[str, typer.Option()] = "dynatree:budget=255",
    max_new_tokens: Annotated[int, typer.Option()] = 512,
    temperature: Annotated[float, typer.Option()] = 0.0,
    dtype: Annotated[str, typer.Option()] = "auto",
) -> None:
    """Decode the prompts one by one, EOS ignored, and record the settings after every round."""
    loaded = outpace.load(model, method, drafter=drafter, dtype=dtype, max_num_seqs=1)
    params = SamplingParams(max_new_tokens, temperature, seed=0, ignore_eos=True)
    rows: list[dict[str, Any]] = []
    for item in read_workloads(workload, max_turns=1):
        rows += trace(loaded, item.id, loaded.encode(item.prompt(0, [])), params)
        print(f"{item.id}: {sum(row['id'] == item.id for row in rows)} rounds")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw(rows, out.with_suffix(".png"), f"{Path(model).name}, {method}")


def trace(model: outpace.Model, name: str, prompt: list[int], params: SamplingParams) -> list[dict[str, Any]]:
    """The settings after each round of one answer."""
    (session,) = model.engine.add(prompt, params, model.proposer(model.method))
    rows: list[dict[str, Any]] = []
    while session.finish_reason is None:
        model.engine.step()
        if session.state is not None and session.metrics.steps > len(rows):
            state = session.state.of_shape
            rates = list(state.rates)
            rows.append(
                {
                    "id": name,
                    "round": session.metrics.steps,
                    "base_depth": round(state.base_depth, 4),
                    "high_confidence": round(state.high_confidence, 5),
                    "acceptance": round(sum(rates) / len(rates), 4) if rates else None,
                }
            )
    return rows


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Three panels over rounds, a line per prompt."""
    figure, panels = plt.subplots(3, 1, sharex=True, figsize=(8, 7), layout="constrained")
    names = {"base_depth": "$D_0$", "high_confidence": r"$\tau_h$", "acceptance": "mean acceptance, last 10 rounds"}
    for panel, (field, label) in zip(panels, names.items(), strict=True):
        for name in dict.fromkeys(row["id"] for row in rows):
            line = [(row["round"], row[field]) for row in rows if row["id"] == name and row[field] is not None]
            panel.plot(*zip(*line, strict=True), linewidth=1, label=name)
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    panels[2].axhline(0.7, color="black", linewidth=0.8, linestyle="--")
    panels[2].set_xlabel("round")
    panels[0].set_title(title)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=7, ncols=4, loc="outside lower center")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
