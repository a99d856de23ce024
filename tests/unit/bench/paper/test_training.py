"""Losses of trainings in a paper's figure."""

import json
import subprocess
from pathlib import Path

import pytest

from outpace.bench.paper.exhibit import Exhibit, read_exhibits
from outpace.bench.paper.page import ShownExhibit
from outpace.bench.paper.sources import RecordFolder
from outpace.bench.paper.training import read_losses, run_outpace
from outpace.lib.errors import InvalidRequest

FALLING = [3.0 - n / 100 for n in range(100)]
FLAT = [3.2 - n / 1000 for n in range(100)]


def figure_4() -> Exhibit:
    (found,) = [one for one in read_exhibits("domino") if one.name == "figure 4"]
    return found


def shown(folder: Path, losses: dict[str, list[float]]) -> ShownExhibit:
    manifest = {"target": "t", "quick": False, "names": {}, "absent": {}, "losses": losses}
    return ShownExhibit(figure_4(), RecordFolder(folder, manifest))


def test_losses_decide_claims_about_the_backbone(tmp_path: Path) -> None:
    """Guards against rows that are swapped, and a loss that rises taken for one that falls."""
    verdicts = [
        {one.claim: one.verdict for one in shown(tmp_path, losses).findings}
        for losses in ({"tf-curr": FALLING, "tf": FLAT}, {"tf-curr": FLAT[::-1], "tf": FALLING})
    ]
    assert [one["D18a"] for one in verdicts] == ["holds", "does not hold"]
    assert [one["D18b"] for one in verdicts] == ["holds", "does not hold"]


def test_a_second_seed_is_judged_apart(tmp_path: Path) -> None:
    """Guards against a difference of one seed under the name of the strategies that it compares."""
    losses = {"tf-curr": FALLING, "tf": FLAT, "tf-curr-seed-1": FLAT[::-1], "tf-seed-1": FALLING}
    verdicts = {one.claim: one.verdict for one in shown(tmp_path, losses).findings}
    assert (verdicts["D18a"], verdicts["D18a second seed"]) == ("holds", "does not hold")


def test_losses_are_no_outputs(tmp_path: Path) -> None:
    """Guards against a table that calls steps of a training equal outputs, and a figure without the curves."""
    found = shown(tmp_path, {"tf-curr": FALLING, "tf": FLAT})
    (last,) = [one for one in found.table() if (one["run"], one["row"]) == ("last fifth", "TF")]
    assert (last["equal"], last["prompts"]) == (None, 20)
    assert abs(last["values"]["base_loss"]["value"] - sum(FLAT[80:]) / 20) < 1e-9
    assert last["values"]["tokens_per_step"] is None
    assert found.svg is not None
    assert "fifth of the training" in found.svg


def test_losses_are_read_where_a_drafter_was_trained(tmp_path: Path) -> None:
    """Guards against the loss of the final logits in the backbone's place, against measurements taken for steps, and
    against a traceback for a training that was killed as it wrote a line."""
    lines = [{"step": 1, "loss": 2.0, "base": 3.0}, {"step": 1, "held_out": {}}, {"step": 2, "loss": 1.0, "base": 2.5}]
    (tmp_path / "tf").mkdir()
    (tmp_path / "tf" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    given = {"tf": tmp_path / "tf" / "drafter", "ttt": tmp_path / "elsewhere", "other": tmp_path / "tf" / "x"}
    assert read_losses([figure_4()], {name: str(path) for name, path in given.items()}) == {"tf": [3.0, 2.5]}


def test_a_killed_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an index error, or a line about loading, as the reason that memory ran out."""
    monkeypatch.setattr("subprocess.run", lambda *args, **options: subprocess.CompletedProcess([], -9, stderr=""))
    with pytest.raises(InvalidRequest, match="ended by signal 9"):
        run_outpace("warmup", "x")
