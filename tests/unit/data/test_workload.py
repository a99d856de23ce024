"""Workloads: what is read, and how a bad file is refused."""

import json
from pathlib import Path

import pytest

from outpace.data.workload import WorkItem, read_workload, read_workloads
from outpace.lib.errors import InvalidRequest


def _write(folder: Path, *lines: str) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def test_limit_ids_and_datasets(tmp_path: Path) -> None:
    """Guards against a limit that is ignored and records that cannot be told apart."""
    lines = [json.dumps({"turns": [f"question {index}"]}) for index in range(5)]
    path = _write(tmp_path, *lines, json.dumps({"id": "x", "dataset": "d", "turns": ["a", "b"], "raw": True}))
    assert [item.turns[0] for item in read_workload(path + ":2")] == ["question 0", "question 1"]
    items = read_workload(path)
    assert len({item.id for item in items}) == len(items) == 6
    assert items[-1] == WorkItem("x", "d", ("a", "b"), True)
    assert len(read_workloads([path + ":1", "builtin:2"])) == 3
    assert len(read_workloads([path + ":1", path], limit=4)) == 5, "a limit for those that name none"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"turns": ["a"]', "line 2: not JSON"),
        ('{"prompt": "a"}', "line 2: needs 'turns'"),
        ('{"turns": []}', "line 2: needs 'turns'"),
        ('{"turns": [""]}', "line 2: needs 'turns'"),
        ('["a"]', "line 2: needs 'turns'"),
        (r'{"turns": ["a", "cut \ud83d"]}', "line 2: turns='cut .*': character 4 is a lone surrogate"),
        (r'{"id": "a\ud83d", "turns": ["a"]}', "line 2: id='a.*': character 1 is a lone surrogate"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    """Guards against a bad line that is skipped, so that a figure speaks of fewer prompts than it says, and against one
    that ends a run in the middle."""
    with pytest.raises(InvalidRequest, match=complaint):
        read_workload(_write(tmp_path, '{"turns": ["fine"]}', line))


def test_files_without_prompts(tmp_path: Path) -> None:
    """Guards against an empty run that reports success, and a traceback for a compressed or binary file."""
    with pytest.raises(InvalidRequest, match="no such file"):
        read_workload(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(InvalidRequest, match="no prompts"):
        read_workload(_write(tmp_path, "", " "))
    (tmp_path / "prompts.jsonl.gz").write_bytes(b"\x1f\x8b\x08\xff\xfe")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        read_workload(str(tmp_path / "prompts.jsonl.gz"))


def test_prompts_of_later_turns_hold_the_answers() -> None:
    """Guards against a second turn that is asked without its history."""
    chat = WorkItem("a", "d", ("one", "two"))
    assert [message["content"] for message in chat.prompt(1, ["reply"])] == ["one", "reply", "two"]
    assert [message["role"] for message in chat.prompt(1, ["reply"])] == ["user", "assistant", "user"]
    assert WorkItem("a", "d", ("one", "two"), raw=True).prompt(1, [" reply "]) == "one reply two"


def test_the_built_in_prompts_are_a_workload() -> None:
    """Guards against data files missing from the package: the demo and the README run on them."""
    items = read_workload("builtin")
    assert len(items) >= 5
    assert any(item.raw for item in items)
    assert any(len(item.turns) > 1 for item in items)


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    """Guards against prompts cut at the separators that Python's splitlines knows and JSON allows in a string."""
    said = "one\u2028two\x85three"
    (item,) = read_workload(_write(tmp_path, json.dumps({"turns": [said]}, ensure_ascii=False) + "\r", "", ""))
    assert item.turns == (said,)


def test_a_race_over_nothing_is_refused() -> None:
    """Guards against "LOSSLESS: 0 of 0", a certificate without evidence, and a race that ends in a traceback."""
    with pytest.raises(InvalidRequest, match="workload 'builtin:0': its limit leaves no prompts; give 1 or more"):
        read_workloads(["builtin:0"])
    assert read_workloads(["builtin:0"], may_be_empty=True) == ()
    assert len(read_workloads(["builtin:0", "builtin:2"])) == 2
