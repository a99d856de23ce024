"""`outpace chat` as a user runs it: lines in, answers out."""

import io
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from outpace import cli
from outpace.models.target import PackedTarget
from tests.cli.runner import run
from tests.unit.models.tiny import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny"), eos_token_id=None, generation_eos=None))


def _chat(folder: str, lines: str, *arguments: str) -> Result:
    command = ["chat", "-m", folder, "--max-new-tokens", "12", "--dtype", "float32", *arguments]
    return run(*command, lines=lines)


def _reused(result: Result) -> list[tuple[int, int]]:
    return [(int(old), int(all_)) for old, all_ in re.findall(r"(\d+) of (\d+) prompt tokens reused", result.stderr)]


def test_lines_of_a_pipe_are_turns(folder: str) -> None:
    """Guards against turns that do not know of each other, prompts or control codes in a script's output."""
    result = _chat(folder, "Hello\n\nAnd then?\n", "--system", "Be brief.")
    assert result.exit_code == 0, result.output
    (first, second) = _reused(result)
    assert first[0] == 0
    assert second[0] > first[1]
    assert "> " not in result.stdout
    assert "\x1b" not in result.output
    assert result.stdout == _chat(folder, "Hello\nAnd then?", "--system", "Be brief.", "--method", "plain").stdout


def test_commands(folder: str) -> None:
    """Guards against commands sent to the model, messages taken for commands, and lines read after /exit."""
    result = _chat(folder, "Hello\n/reset\nHello\n/help\n/nope\n/usr/bin is a path\n/exit\nnever\n")
    assert result.exit_code == 0
    reused = _reused(result)
    assert len(reused) == 3
    assert reused[1] == (reused[0][1] - 1, reused[0][1]), "after /reset the same prompt stands in the slot"
    assert result.stderr.count("/reset begins a new conversation") == 2
    assert "no command /nope" in result.stderr


class Terminal(io.StringIO):
    """Lines that a person types."""

    def isatty(self) -> bool:
        return True


def test_a_person_is_greeted_briefly(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a greeting that explains numerics before anybody asked."""
    monkeypatch.setattr(sys, "stdin", Terminal("/info\n/exit\n"))
    cli.app(["chat", "-m", folder, "--method", "recycle", "--dtype", "float32"], standalone_mode=False)
    loaded, greeting, *info = capsys.readouterr().err.replace("> ", "").splitlines()
    assert loaded.startswith("loaded ")
    name = Path(folder).name
    assert (
        greeting == f"{name}, method recycle, context of 256 tokens; /exit or Ctrl-D leaves, /help lists the commands."
    )
    assert info[0] == f"model: {folder}, float32, on cpu"
    assert info[1].startswith("context: 256 tokens")
    assert info[2] == "method: recycle (named)"
    assert sum(line.startswith(("exactness: bitwise - ", "exactness: rounding - ")) for line in info) == 1
    assert f"outpace doctor {folder}" in info[-1]


def test_ctrl_c_stops_the_answer_and_not_the_conversation(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an interrupt that ends the program, or leaves the next turn with half a step in its KV."""
    run_pass = PackedTarget.run_pass
    rounds: list[None] = []

    def interrupted(self: PackedTarget, chunks: Any, slots: Any, *trees: Any) -> Any:
        rounds.extend([None] if slots else [])
        if len(rounds) == 4 and slots:
            signal.raise_signal(signal.SIGINT)
        return run_pass(self, chunks, slots, *trees)

    monkeypatch.setattr(PackedTarget, "run_pass", interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = _chat(folder, "Hello\nGo on\n", "--method", "plain")
    assert result.exit_code == 0
    loaded, first, second = result.stderr.splitlines()
    assert loaded.startswith("loaded ")
    assert "5 tokens" in first
    assert [line.split()[-1] for line in (first, second)] == ["cancelled", "length"]
    assert _reused(result)[1][0] >= _reused(result)[0][1]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_full_context_is_one_line_and_the_conversation_goes_on(folder: str) -> None:
    """Guards against a traceback, and against a script that takes a refused turn for an answered one."""
    result = _chat(folder, "Hello\n" + "long " * 100 + "\n/reset\nHello again\n")
    assert result.exit_code == 2
    assert len(_reused(result)) == 2
    assert re.search(r"error: with this message the conversation has \d+ tokens.* /reset", result.stderr)
