"""`scripts/serving_race.py`: the prompts that both servers are asked."""

import json
from argparse import Namespace
from importlib import import_module
from pathlib import Path

from outpace.data.workload import read_workload


def test_prompts_are_asked_as_they_were_given(tmp_path: Path) -> None:
    """Guards against raw text that is asked as a chat, and against a load that has the prompts of another."""
    file = tmp_path / "set.jsonl"
    rows = [{"id": str(number), "raw": number % 2 == 0, "turns": [f"text {number}"]} for number in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = Namespace(workload=[str(file)], levels=[1, 2], shares=[], out=tmp_path)
    loads = import_module("scripts.serving_race").loads(options)
    asked = [item for load in loads for item in read_workload(str(load["prompts"]))]
    assert len({item.id for item in asked}) == len(asked) == 16
    assert all(item.raw == (int(item.id.removeprefix("set-")) % 2 == 0) for item in asked)
