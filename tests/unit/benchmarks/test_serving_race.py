"""`scripts/serving_race.py`: the servers, the prompts that they are asked, and their table."""

import json
from argparse import Namespace
from contextlib import ExitStack, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from outpace.data.workload import read_workload
from outpace.lib import threads


def test_prompts_are_asked_as_they_were_given(tmp_path: Path) -> None:
    """Guards against raw text that is asked as a chat, and against a load that has the prompts of another."""
    file = tmp_path / "set.jsonl"
    rows = [{"id": str(number), "raw": number % 2 == 0, "turns": [f"text {number}"]} for number in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = Namespace(workload=[str(file)], levels=[1, 2], out=tmp_path)
    loads = import_module("scripts.serving_race").loads(options)
    asked = [item for load in loads for item in read_workload(str(load["prompts"]))]
    assert len({item.id for item in asked}) == len(asked) == 16
    assert all(item.raw == (int(item.id.removeprefix("set-")) % 2 == 0) for item in asked)


Started = list[tuple[list[str], dict[str, str]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Commands and environments of servers, which are not run."""
    race, started = import_module("scripts.serving_race"), Started()

    def popen(command: list[str], env: dict[str, str], **options: Any) -> Mock:
        started.append((command, env))
        return Mock(poll=Mock(return_value=None))

    monkeypatch.setattr(race.subprocess, "Popen", popen)
    monkeypatch.setattr(race, "urlopen", lambda address: nullcontext())
    monkeypatch.setattr(race, "processors", lambda: Mock(best_threads=6))
    return started


def options(folder: Path, **changes: Any) -> Namespace:
    given = {"levels": [1], "model": "x.gguf", "out": folder, "spec": ["none"], "llama_server": None, "vllm": []}
    return Namespace(**given | changes)


def test_llama_cpp_runs_as_its_user_would_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    """Guards against a rival whose threads sleep because ours do, which has two of them on any machine, and which
    refuses prompts that ours takes where few requests are in flight; and against `--spec` without its plain decoding,
    with which the others are compared."""
    race = import_module("scripts.serving_race")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setitem(threads._CHOSEN, "OMP_WAIT_POLICY", "passive")
    with ExitStack() as stack:
        asked = options(tmp_path, llama_server=Path("llama-server"), spec=["ngram-mod"])
        assert list(race.servers(stack, asked)) == ["outpace", "llama.cpp/none", "llama.cpp/ngram-mod"]
    (_, (theirs, variables), _) = started
    assert [theirs[theirs.index(flag) + 1] for flag in ("--threads", "--threads-batch")] == ["6", "6"]
    assert int(theirs[theirs.index("--ctx-size") + 1]) == race.MOST_LENGTH
    assert "OMP_WAIT_POLICY" not in variables


def test_vllm_has_a_server_for_each_method_and_is_compared_with_itself(tmp_path: Path, started: Started) -> None:
    """Guards against our options among vLLM's own, which follow `--`, and ratios to another server's plain decoding."""
    race = import_module("scripts.serving_race")
    with ExitStack() as stack:
        names = list(race.servers(stack, options(tmp_path, vllm=["domino"])))
    assert names == ["outpace", "vllm/plain", "vllm/domino"]
    command, _ = started[-1]
    assert command[command.index("--method") + 1] == "domino"
    assert "--max-queue" not in command
    assert command.index("--port") < command.index("--") < command.index("--enforce-eager")
    texts = {"outpace/plain": ["a"], "outpace/outpace": ["a"], "vllm/plain": ["b"], "vllm/domino": ["b"]}
    rows = [
        {"name": name, "tokens_per_second": speed, "texts": {"1": text}}
        for speed, (name, text) in zip((10.0, 20.0, 4.0, 6.0), texts.items(), strict=True)
    ]
    race.compare(rows)
    assert [(row["over_plain"], row["equal"]) for row in rows] == [(1, 1), (2, 1), (1, 1), (1.5, 1)]
