"""`scripts/serving_race.py`: the prompts that both servers are asked."""

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


def test_llama_cpp_runs_as_its_user_would_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a rival whose threads sleep because ours do, which has two of them on any machine, and which
    refuses prompts that ours takes where few requests are in flight."""
    race, started = import_module("scripts.serving_race"), list[tuple[list[str], dict[str, str]]]()

    def popen(command: list[str], env: dict[str, str], **options: Any) -> Mock:
        started.append((command, env))
        return Mock(poll=Mock(return_value=None))

    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setitem(threads._CHOSEN, "OMP_WAIT_POLICY", "passive")
    monkeypatch.setattr(race.subprocess, "Popen", popen)
    monkeypatch.setattr(race, "urlopen", lambda address: nullcontext())
    monkeypatch.setattr(race, "processors", lambda: Mock(best_threads=6))
    options = Namespace(levels=[1], model="x.gguf", out=tmp_path, spec=["none"], llama_server=Path("llama-server"))
    with ExitStack() as stack:
        assert list(race.servers(stack, options)) == ["outpace", "llama.cpp/none"]
    (_, (theirs, variables)) = started
    assert [theirs[theirs.index(flag) + 1] for flag in ("--threads", "--threads-batch")] == ["6", "6"]
    assert int(theirs[theirs.index("--ctx-size") + 1]) == race.MOST_LENGTH
    assert "OMP_WAIT_POLICY" not in variables
