"""`outpace tune` as a user runs it, on a tiny model. Which method wins there depends on a clock: no test asks."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import Result

from outpace.core.protocols import Verdict
from outpace.core.tree import Topology
from outpace.engine import round as engine_round
from outpace.methods import profile
from outpace.methods.profile import method_anywhere
from outpace.sampling.verification import Draw
from tests.cli.runner import assert_refused, run

FLOAT32 = ("--dtype", "float32")
METHODS = ("--methods", "recycle:budget=7,lookup")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(profile, "user_cache_path", lambda name: tmp_path)
    return tmp_path / "profiles"


def tuned(folder: str, *options: str) -> Result:
    return run("tune", folder, *FLOAT32, "-w", "builtin:3", "--max-new-tokens", "8", *options)


def test_a_profile_is_made_taken_and_deleted(folder: str, cache: Path) -> None:
    """Guards against a search whose result no command takes, and one that cannot be undone."""
    said = json.loads(tuned(folder, *METHODS, "--json").stdout)
    assert set(said["trials"]) == {"plain", "recycle:budget=7", "lookup"}
    (file,) = cache.iterdir()
    assert said["file"] == str(file)
    kept = json.loads(file.read_text())
    assert kept == said["profile"]
    assert (kept["workload"], kept["max_new_tokens"], kept["model"]) == (["builtin:3"], 8, folder)
    assert kept["prompts"].startswith("3 prompts, sha256 ")
    for trial in said["trials"].values():
        assert trial["refusal"] == ""
        assert trial["prompts"] == 3
    result = run("generate", "hello", "-m", folder, "--max-new-tokens", "4", *FLOAT32, "--json")
    answer = json.loads(result.stdout)
    assert answer["method"] == kept["method"]
    assert answer["method_from"] == f"from the profile of {kept['made']}, {file}"
    assert f"method {kept['method']}, from the profile of" in result.stderr
    assert "deleted" in run("tune", folder, *FLOAT32, "--forget").stdout
    assert not list(cache.iterdir())
    assert "there was none" in run("tune", folder, *FLOAT32, "--forget").stdout


def test_a_profile_names_files_by_whole_paths(
    folder: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a profile that in another folder is not used, or takes another file of the same name."""
    monkeypatch.chdir(tmp_path)
    warming = ("warmup", "-m", folder, "-w", "builtin:1", "--max-new-tokens", "4", "--out", "made.safetensors")
    assert run(*warming).exit_code == 0
    monkeypatch.setattr("outpace.bench.tune.decide", lambda plain, able: (able[0], "it is the only one"))
    report = json.loads(tuned(folder, "--methods", "recycle:budget=7,warm=made.safetensors", "--json").stdout)
    assert f"warm={(tmp_path / 'made.safetensors').resolve()}" in report["profile"]["method"]
    assert "budget=7" in report["profile"]["method"]
    monkeypatch.chdir(folder)
    answer = json.loads(run("generate", "hello", "-m", folder, "--max-new-tokens", "4", *FLOAT32, "--json").stdout)
    assert answer["method"] == report["profile"]["method"]
    assert answer["method_from"].startswith("from the profile of")
    assert method_anywhere("recycle:warm=none") == "recycle:warm=none"


def test_a_profile_keeps_its_budget(folder: str, cache: Path, tmp_path: Path) -> None:
    """Guards against a row recycle:budget=7 whose trees had as many nodes as --budget says of the other methods."""
    tuned(folder, *METHODS)
    (file,) = cache.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"method": "recycle:budget=7"}))
    prompts, out = ("-w", "builtin:1", "--max-new-tokens", "48"), tmp_path / "run"
    result = run("bench", folder, *FLOAT32, *prompts, "--budget", "1", "--no-check", "--out", str(out))
    assert result.exit_code == 0, (result.output, result.exception)
    records = map(json.loads, (out / "records.jsonl").read_text().splitlines())
    most = {record["method"]: max(nodes for turn in record["rounds"] for _, nodes, _ in turn) for record in records}
    assert most["recycle"] <= 1 < most["recycle:budget=7"] <= 7


def test_what_is_printed_and_not_written(folder: str, cache: Path) -> None:
    """Guards against a dry run that writes, a table without what decides, and a title with `auto` for a precision."""
    result = tuned(folder, *METHODS, "--dry-run")
    assert result.exit_code == 0, result.output
    for column in ("prompts", "speedup", "tok/step", "breaks even at", "drafting", "equal"):
        assert column in result.stdout
    assert "recycle:budget=7" in result.stdout
    assert " threads, float32, greedy" in result.stdout
    assert "nothing written" in result.stdout
    assert not cache.exists()


def trusting(topologies: Sequence[Topology], tokens: Sequence[Sequence[int]], draw: Draw) -> list[Verdict]:
    """A verdict that takes the first draft, whatever the target says."""
    paths = [(0, topology.children[0][0]) if topology.children[0] else (0,) for topology in topologies]
    following = draw([(tree, path[-1]) for tree, path in enumerate(paths)])
    return [Verdict(path, token) for path, token in zip(paths, following, strict=True)]


def test_a_candidate_that_changes_an_answer(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a race that does not compare, exit status 0 where an output was not plain decoding's, and a
    profile of that method."""
    monkeypatch.setattr(engine_round, "match", trusting)
    result = tuned(folder, "--methods", "recycle:budget=7")
    assert result.exit_code == 1
    assert "REFUSED recycle:budget=7: its output was not plain decoding's on " in result.stdout
    assert "plain: nothing is surely faster than plain decoding: no candidate is left" in result.stdout


def test_a_folder_that_cannot_be_written(folder: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against minutes of measuring whose result is lost, as with a home that is only read."""

    def measured(*arguments: object) -> None:
        raise AssertionError("measured before the place was looked at")

    monkeypatch.setattr("outpace.bench.tune.tune", measured)
    cache.write_text("in the way")
    assert_refused(tuned(folder, *METHODS), "cannot be written", "; set XDG_CACHE_HOME to another, or give --dry-run")


def test_bad_options(folder: str) -> None:
    """Guards against minutes of measuring before an error, a drafter that nothing would draft with, prompts blamed for
    answers that may have one token, and a profile of plain decoding because a script's variable was empty."""
    assert "unknown" in str(tuned(folder, "--methods", "magic").exception)
    assert_refused(tuned(folder, *METHODS, "--drafter", "early-exit:1"), "it would not be used")
    assert_refused(tuned(folder, *METHODS, "--max-new-tokens", "1"), "max_new_tokens=1: the first token of an answer")
    assert_refused(tuned(folder, "--methods", ""), "methods='': names none")
    assert_refused(tuned(folder, "--methods", "plain"), "methods='plain': is what candidates are compared with")
    assert "1 prompt; tune needs at least 3" in str(run("tune", folder, *FLOAT32, "-w", "builtin:1").exception)
