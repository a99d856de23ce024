"""`scripts/ship_drafter.py` on drafters of a tiny model, once run as a maintainer runs it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.drafters.ranked_vocabulary import FILE_NAME, load_vocabulary
from outpace.lib.checkpoint import INDEX, read_object, weight_map
from outpace.lib.int8 import SCALE, is_quantized
from outpace.models.loading import shipped
from scripts import ship_drafter
from tests.cli.runner import run_json
from tests.unit.models.tiny import save_tiny_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "ship_drafter.py"
NET = {"domino": ("net.emb_dim=32", "net.gru_hidden_dim=32"), "lattice": ("net.rank=32", "net.candidates=8")}


def ship(run: Path, folder: Path, *more: str) -> None:
    """In this process, which has loaded all that takes seconds to load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), str(run), str(folder), "--base", "someone/tiny", *more])
        ship_drafter.main()


def assert_refused(complaint: str, run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        ship(run, folder)
    assert refused.value.code == 2
    assert complaint in capsys.readouterr().err


def trained(kind: str, root: Path) -> Path:
    """A run of two steps below a folder, with 100 ids, for a target there."""
    target, prompts, out = root / "tiny", root / "prompts.jsonl", root / "run"
    save_tiny_model(target, eos_token_id=None, max_position_embeddings=512)
    prompts.write_text("".join(json.dumps({"id": f"p{at}", "turns": [f"Say {at}."]}) + "\n" for at in range(6)))
    where = ["--target", str(target), "--prompts", str(prompts), "--out", str(out), "--device", "cpu"]
    settings = ["training.max_steps=2", "training.batch_size=2", "data.held_out=2", "training.evaluate_every=1",
                "training.precision=float32", "regenerate.max_new_tokens=12", "objective.vocabulary=100",
                "net.layers=1", "net.block_size=4"]  # fmt: skip
    run_json("train", kind, *where, "--dtype", "float32", *settings, *NET[kind])
    return out


@pytest.mark.costly
@pytest.mark.parametrize("kind", NET)
def test_a_run_becomes_a_shipped_drafter(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against paths of the training machine in what ships, a drafter that its target does not find, and one that
    was stored with weights of other ids or bits than it drafts with."""
    run, folder = trained(kind, tmp_path), tmp_path / "drafters" / "tiny" / kind
    assert_refused("give --target and --names", run, folder, capsys)
    assert not folder.parent.exists()
    ship(run, folder, "--target", str(tmp_path / "tiny"), "--names", "tiny*", "--data", "six questions")
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["folder"], [path.name for path in folder.parent.glob("*.new")]) == (str(folder), [])
    for file in folder.iterdir():
        assert file.name.endswith(".safetensors") or str(tmp_path) not in file.read_text(), file
    provenance = read_object(folder / "provenance.json")
    assert (provenance["run"]["target"], provenance["run"]["prompts"]["names"]) == ("tiny", ["prompts.jsonl"])
    assert provenance["result"]["held_out"] == told["held_out"]
    written = (folder / "README.md").read_text()
    assert "prompts (six questions), answered" in written
    assert f"--config drafters/tiny/{kind}/recipe.yaml" in written
    assert is_quantized(read_object(folder / "config.json"))
    assert any(name.endswith(SCALE) for name in weight_map(folder, INDEX))
    assert len(load_vocabulary(folder / FILE_NAME, 264)) == 100
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path / "drafters")
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
    model = outpace.load(str(tmp_path / "tiny"), f"{kind}:budget=3", **options)
    drafted, plain = (model.generate("Say 3.", max_new_tokens=12, method=name) for name in (None, "plain"))
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.drafted > 0


def test_a_run_without_a_drafter_leaves_what_ships(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a shipped drafter that is lost to a run that failed, and a half-made one that `shipped` lists."""
    folder, run = tmp_path / "drafters" / "tiny" / "domino", tmp_path / "run"
    for made in (folder, run / "drafter"):
        made.mkdir(parents=True)
        (made / "config.json").write_text("{}")
    (folder.parent / "target.json").write_text("{}")
    assert_refused("no drafter yet", tmp_path, folder, capsys)
    command = [sys.executable, str(SCRIPT), str(run), str(folder)]
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == 1, "no weights"
    assert [path.name for path in sorted(folder.parent.iterdir())] == ["domino", "target.json"]
