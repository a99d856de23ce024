"""`outpace warmup`, run as a user runs it, on a tiny model: transitions, gates, and what is refused in time."""

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.drafters.kinds import write_net
from tests.cli.runner import assert_refused, last_json, run
from tests.unit.drafters.source.learned import random_net
from tests.unit.methods.test_trained_drafters import OURS


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> str:
    net = random_net(Eagle3Net(Eagle3Config(**OURS, taps=(0, 1, 2), draft_vocab_size=264)))
    folder = tmp_path_factory.mktemp("eagle3")
    write_net(net, folder, "speculators")
    return str(folder)


def test_warmup_writes_what_recycling_starts_from(folder: str, tmp_path: Path) -> None:
    """Guards against a matrix saved empty or unread, rounds other than the prompts that were asked for, sizes that are
    not the file's, and methods that have nothing to save."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"turns": ["question {number}"], "raw": true}}\n' for number in range(7)))
    options = ["warmup", "-m", folder, "--max-new-tokens", "6"]
    reports = []
    for limit, rounds in (("", 5), (":2", 2), (":0", 0)):
        out = tmp_path / f"{rounds}.safetensors"
        report = last_json(run(*options, "-w", f"{texts}{limit}", "--out", str(out)))
        assert report["rounds"] == rounds
        assert (report["file"], report["bytes"]) == (str(out), out.stat().st_size)
        assert report["rows"] == len(load_file(out)["tokens"])
        assert (report["of"], report["memory"]) == (264, 264 * 64)
        reports.append(report)
    assert reports[0]["rows"] > reports[1]["rows"] > reports[2]["rows"] == 0
    answers = []
    for method in ("recycle", f"recycle:warm={tmp_path / '5.safetensors'}"):
        drafting = ["--method", method, "--max-new-tokens", "1", "--json"]
        answers.append(last_json(run("generate", "question 1", "-m", folder, *drafting))["samples"][0]["token_ids"])
    assert answers[0] == answers[1]
    assert "checkpoints" not in reports[0]
    assert load_file(tmp_path / "5.safetensors").keys() == {"tokens", "successors"}
    nothing = run(*options[:-1], "0", "-w", str(texts), "--out", str(tmp_path / "none"))
    assert_refused(nothing, "max_new_tokens=0: nothing would be decoded or learned")
    for method in ("lookup", "recycle:matrix=private", "magicdec:shape=gated"):
        assert_refused(
            run(*options, "-w", str(texts), "--out", str(tmp_path / "other"), "--method", method),
            "keeps no transition matrix and has no gates of a drafter",
        )


def test_gates_of_a_method_without_a_drafter_are_refused_as_such(folder: str, tmp_path: Path) -> None:
    """Guards against `self:shape=gated,warm=FILE` that asks for a trained drafter of kind None."""
    drafting = ["--method", f"magicdec:shape=gated,warm={tmp_path / 'gates'}"]
    complaint = "its gates are for one drafter; name checkpoints= and thresholds="
    assert_refused(run("generate", "question 1", "-m", folder, *drafting), complaint)


def test_warmup_calibrates_the_gates_of_a_gated_method(folder: str, eagle: str, tmp_path: Path) -> None:
    """Guards against gates that are reported and not written, or written and not closed."""
    (tmp_path / "texts.jsonl").write_text('{"turns": ["a question"], "raw": true}\n' * 3)
    method, reports = "graft:budget=6,depth=5,breadth=2,checkpoints=1/2/4", []
    options = ["-m", folder, "--drafter", eagle, "--dtype", "float32", "--max-new-tokens"]
    for tokens in ("5", "60"):
        out = tmp_path / tokens
        naming = ["-w", str(tmp_path / "texts.jsonl"), "--out", str(out), "--method", method]
        result = run("warmup", *options, tokens, *naming)
        reports.append(last_json(result))
        assert ("takes 100 rounds of drafting" in " ".join(result.stderr.split())) == (tokens == "5")
        assert (reports[-1]["rows"], reports[-1]["bytes"]) == (len(load_file(out)["tokens"]), out.stat().st_size)
    few, enough = reports
    assert (few["calibrated"], enough["calibrated"]) == (False, True)
    assert 0 < few["drafted_rounds"] < 100 <= enough["drafted_rounds"] < 180
    assert (few["checkpoints"], few["thresholds"]) == ([1, 2, 4], [0.15, 0.13, 0.51])
    assert "gate_checkpoints" not in load_file(tmp_path / "5")
    kept = load_file(tmp_path / "60")
    with safe_open(tmp_path / "60", framework="pt") as opened:
        about = opened.metadata()
    assert (about["gates_drafter"], about["gates_budget"]) == (enough["drafter"], "6")
    assert (enough["budget"], enough["temperature"], about["gates_temperature"]) == (6, 0.0, "0.0")
    assert kept["gate_checkpoints"].tolist() == enough["checkpoints"]
    assert kept["gate_thresholds"].tolist() == enough["thresholds"] == [0.99] * 3, "drafts of a random net are in vain"
    passes = []
    for gates in ("thresholds=0/0/0", "retrieve=matrix"):
        drafting = ["--method", f"graft:budget=6,depth=5,breadth=2,warm={tmp_path / '60'},{gates}", "--json"]
        passes.append(last_json(run("generate", "a question", *options, "20", *drafting))["samples"][0]["metrics"])
    assert passes[0]["draft_passes"] > 4 * passes[1]["draft_passes"] > 0


def test_warmup_writes_gates_alone_where_there_is_no_matrix(folder: str, eagle: str, tmp_path: Path) -> None:
    """Guards against gates that only methods with retrieval can have calibrated."""
    texts, method = tmp_path / "texts.jsonl", "eagle3:shape=gated,depth=5,breadth=2"
    texts.write_text('{"turns": ["a question"], "raw": true}\n' * 3)
    options = ["-m", folder, "--drafter", eagle, "--dtype", "float32", "--budget", "6", "--max-new-tokens"]
    assert_refused(
        run("warmup", *options, "5", "-w", str(texts), "--out", str(tmp_path / "few"), "--method", method),
        "nothing to write, because it keeps no transition matrix and no gates could be",
    )
    assert not (tmp_path / "few").exists()
    out = tmp_path / "gates"
    report = last_json(run("warmup", *options, "60", "-w", str(texts), "--out", str(out), "--method", method))
    assert (report["calibrated"], report["rows"], report["memory"], report["budget"]) == (True, 0, 0, 6)
    passes = []
    for warm in (",thresholds=0/0/0", f",warm={out}"):
        answer = run("generate", "a question", *options, "20", "--method", method + warm, "--json")
        passes.append(last_json(answer)["samples"][0]["metrics"]["draft_passes"])
    assert 0 < passes[1] < passes[0]


def test_warmup_answers_at_a_temperature(folder: str, eagle: str, tmp_path: Path) -> None:
    """Guards against options that never reach the requests, so that gates for sampling are calibrated greedily."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"turns": ["a question"], "raw": true}\n' * 3)
    options = ["warmup", "-m", folder, "--drafter", eagle, "--dtype", "float32", "--max-new-tokens", "90"]
    options += ["-w", str(texts), "--method", "graft:budget=6,depth=5,breadth=2"]
    learned: dict[tuple[str, str], dict[str, Any]] = {}
    for temperature, seed in (("0", "1"), ("1", "1"), ("1", "2")):
        out = tmp_path / f"{temperature}-{seed}"
        report = last_json(run(*options, "--out", str(out), "--temperature", temperature, "--seed", seed))
        assert (report["temperature"], report["calibrated"]) == (float(temperature), True), report["drafted_rounds"]
        with safe_open(out, framework="pt") as opened:
            assert opened.metadata()["gates_temperature"] == str(float(temperature))
        learned[temperature, seed] = {name: tensor.tolist() for name, tensor in load_file(out).items()}
    assert learned["1", "1"]["tokens"] != learned["1", "2"]["tokens"] != learned["0", "1"]["tokens"]


def test_a_file_that_cannot_be_written_is_reported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an hour of answers thrown away because the file exists: not even the model is looked for."""
    (tmp_path / "there").write_text("")
    for out in (tmp_path / "there", tmp_path / "nowhere" / "warm"):
        assert_refused(
            run("warmup", "-m", str(tmp_path / "none"), "-w", str(tmp_path / "none"), "--out", str(out)),
            f"{out}: exists already, or its folder does not; name a new file",
        )
    assert (tmp_path / "there").read_text() == ""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    out = tmp_path / "new"
    said = f"{out}: its folder cannot be written; name a file in another"
    assert_refused(run("warmup", "-m", str(tmp_path / "none"), "-w", "builtin:1", "--out", str(out)), said)
