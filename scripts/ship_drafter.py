"""Put the drafter of a finished training run where drafters ship from, with its provenance and a model card.

python scripts/ship_drafter.py RUN drafters/TARGET/KIND
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from outpace.drafters.domino.files import write_domino
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.load import load_net
from outpace.drafters.ranked_vocabulary import FILE_NAME, load_vocabulary
from outpace.lib.checkpoint import write_index
from outpace.models.loading.shipped import size_of

LIMIT_MB, RECIPE = 16.0, "recipe.yaml"
CARD = """---
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
license: apache-2.0
tags: [speculative-decoding, outpace]
---

# {kind} drafter for {target}

Drafts for SmolLM2-135M-Instruct in Outpace: `outpace.load("{target}", "{method}")`. The output is the target's,
token for token; the drafter only makes it faster.

- **Weights**: {parameters:,} parameters in {dtype}, {megabytes:.1f} MB. Embedding and LM head are the
  target's and not included.
- **Trained by**: `outpace train {kind}` with the settings in `recipe.yaml`, on {device} ({precision}).
{note}- **Data**: {sequences:,} prompts (conversations shared by users, and the training parts of GSM8K and MATH),
  answered by the target itself, greedily, with at most {answer} tokens. No prompt of a benchmark's test set was used.
- **Seen**: {start}{epochs:g} epochs, {steps:,} steps of {batch} sequences, {tokens:,} tokens, of which
  {supervised:,} were the target's own. Earlier stages: `drafters/README.md`.
- **Held out**: {rate:.3f} tokens per step in greedy chains of {depth} on half of {held_out} held-out prompts,
  whose other half chose this checkpoint. Acceptance by position, given that the earlier drafts were accepted:
  {positions}.
- **Measured**: `docs/results.md` has speeds and tokens per step, compared with the other methods.
- **Limits**: made on {hardware} in about {hours:.1f} hours, far from convergence. To continue with more compute:
  `outpace train {kind} --target {target} --start {target}/{kind} --config {folder}/recipe.yaml`
  with `--prompts`, `--answers` and `--out`.
- **Licence**: Apache-2.0, as the target's.
"""
METHODS = {"draft-lm": "dynatree"}
NOTES = {
    "domino": "- **Layout**: the authors', but W2 has only the rows of `vocabulary.safetensors` (`embed_proj.ids`);\n"
    "  `outpace convert` writes all rows for other engines, the missing ones as zeros.\n"
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hardware", default="one CPU core")
    given = parser.parse_args()
    target, kind = given.folder.parts[-2:]
    scratch = given.folder.with_name(f"{kind}.new")  # what ships now stays until all is there
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(given.run / "drafter", scratch)
    if kind == "domino":
        drop_rows(scratch)
    provenance = without_folders(json.loads((given.run / "provenance.json").read_text()))
    log = [json.loads(line) for line in (given.run / "log.jsonl").read_text().splitlines()]
    best = kept_by([line for line in log if "held_out" in line], provenance["run"]["settings"]["training"]["min_gain"])
    measured, steps = best["held_out"], best["step"]
    hours = sum(line["seconds"] for line in log if "loss" in line and line["step"] <= steps) / 3600
    provenance["result"] = {"steps": steps, "hours": round(hours, 2), "held_out": measured}
    (scratch / RECIPE).write_text(yaml.safe_dump(recipe(provenance["run"]["settings"]), sort_keys=False))
    (scratch / "provenance.json").write_text(json.dumps(provenance, indent=1))
    size = size_of(scratch).megabytes
    if size > LIMIT_MB:
        parser.error(f"{scratch}: {size:.1f} MB, and a drafter that ships may have {LIMIT_MB:g}")
    shutil.rmtree(given.folder, ignore_errors=True)
    scratch.rename(given.folder)
    (given.folder / "README.md").write_text(card(target, kind, given, provenance, measured, steps, hours))
    print(json.dumps({"folder": str(given.folder), "megabytes": size, **provenance["result"]}))


def kept_by(measured: list[dict[str, Any]], min_gain: float) -> dict[str, Any]:
    """The measurement whose drafter was kept: the last that was better than those before."""
    kept = measured[0]
    for line in measured[1:]:
        if line["chosen_by"]["tokens_per_step"] > kept["chosen_by"]["tokens_per_step"] + min_gain:
            kept = line
    return kept


def drop_rows(folder: Path) -> None:
    """Leave of a Domino head's W2 the rows of the vocabulary that it drafts from."""
    vocabulary = folder / FILE_NAME
    if not vocabulary.is_file():
        return
    net = load_net(str(folder))
    assert isinstance(net, DominoNet)
    ids = load_vocabulary(vocabulary, net.config.vocab_size)
    for file in (*folder.glob("model*"), folder / "config.json"):
        file.unlink()
    write_domino(net, folder, ids=ids)
    write_index(folder)


def without_folders(provenance: dict[str, Any]) -> dict[str, Any]:
    """The same with the names of files alone: their folders mean nothing on another machine."""
    run = provenance["run"]
    run["prompts"]["names"] = [Path(name).name for name in run["prompts"]["names"]]
    if run["features"]:
        run["features"] = Path(run["features"]).name
    return provenance


def recipe(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What `--config` needs to train such a drafter again, or on; for how many steps is said by who does."""
    sections = {name: settings[name] for name in ("net", "objective", "data", "training")}
    return {
        name: {field: value for field, value in fields.items() if value not in (None, []) and field != "max_steps"}
        for name, fields in sections.items()
    }


def card(
    target: str,
    kind: str,
    given: argparse.Namespace,
    provenance: dict[str, Any],
    measured: dict[str, Any],
    steps: int,
    hours: float,
) -> str:
    run, data, size = provenance["run"], provenance["data"], size_of(given.folder)
    training = run["settings"]["training"]
    epochs = steps * training["batch_size"] / data["sequences"]
    return CARD.format(
        kind=kind,
        note=NOTES.get(kind, ""),
        start=f"from the weights of `{run['start']['sha256'][:16]}` on, " if run["start"] else "",
        folder=given.folder,
        method=METHODS.get(kind, kind),
        target=target,
        parameters=size.parameters,
        dtype=training["dtype"],
        megabytes=size.megabytes,
        device=provenance["device"],
        precision="bfloat16 where it multiplies" if provenance["precision"] == "bf16" else "float32",
        sequences=data["sequences"],
        answer=run["answers"]["about"]["sampling"]["max_new_tokens"],
        epochs=round(epochs, 2),
        steps=steps,
        batch=training["batch_size"],
        tokens=round(data["tokens"] * epochs),
        supervised=round(data["supervised"] * epochs),
        rate=measured["tokens_per_step"],
        depth=len(measured["by_position"]),
        held_out=data["held_out"],
        positions=", ".join(f"{rate:.2f}" for rate in measured["by_position"]),
        hardware=given.hardware,
        hours=hours,
    )


if __name__ == "__main__":
    main()
