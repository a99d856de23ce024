"""How commands load their models: what they share, and what they say of it."""

import json
import warnings
from pathlib import Path

import pytest

from outpace import cli
from outpace.lib.errors import PerformanceWarning
from tests.cli.runner import assert_refused, run

EARLY_EXIT = ("--drafter", "early-exit:1")


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "hello", "--method", "recycle"),
        ("generate", "hello", "--method", "outpace:draft=none"),
        ("chat", "--method", "lookup"),
        ("verify", "-w", "builtin:1", "--method", "plain,samd"),
        ("bench", "-w", "builtin:1", "--methods", "lookup,transformers"),
        ("bench", "-w", "builtin:1", "--methods", "transformers"),
        ("warmup", "-w", "builtin:1", "--out", "never-written"),
    ],
)
def test_a_drafter_that_no_method_uses_is_refused(
    folder: str, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a drafter that was asked for, loaded and left aside without a word, in any command."""
    monkeypatch.chdir(tmp_path)
    texts = (
        "drafter='early-exit:1': it would not be used, for ",
        "leave it out, or choose a method that drafts with one",
    )
    assert_refused(run(*command, "-m", folder, *EARLY_EXIT), *texts)


PLAIN_RUNS = {
    "generate": ("generate", "hello", "--max-new-tokens", "4"),
    "verify": ("verify", "-w", "builtin:1", "--max-new-tokens", "4", "--method", "plain"),
    "bench": ("bench", "-w", "builtin:1", "--max-new-tokens", "4", "--methods", "plain"),
}


@pytest.mark.parametrize("command", PLAIN_RUNS.values(), ids=PLAIN_RUNS.keys())
def test_times_of_loading_are_one_line_on_stderr(folder: str, command: tuple[str, ...]) -> None:
    """Guards against a load without times, and against times or bars in what scripts read."""
    result = run(*command, "-m", folder, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    json.loads(line)
    _loaded_once(result.stderr, folder)


def _loaded_once(said: str, folder: str) -> None:
    lines = [line for line in said.splitlines() if line.startswith("loaded ")]
    assert len(lines) == 1, said
    assert lines[0].startswith(f"loaded {Path(folder).name} in ")
    assert "\x1b" not in said


def test_tuning_and_serving_say_how_long_loading_took(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against commands that load in silence."""
    _loaded_once(run("tune", folder, "--forget").stderr, folder)
    pytest.importorskip("structlog")
    monkeypatch.setattr("outpace.serve.run.serve", lambda load, settings: load())
    _loaded_once(run("serve", folder).stderr, folder)


def test_training_says_how_long_loading_took(folder: str, tmp_path: Path) -> None:
    """Guards against steps of training that load their target in silence."""
    data = ("--target", folder, "--prompts", "builtin:4")
    answers = run("train", "regenerate", *data, "--out", str(tmp_path / "a"), "--max-new-tokens", "12")
    _loaded_once(answers.stderr, folder)
    made = ("--answers", str(tmp_path / "a"))
    ranked = run("train", "transitions", *data, *made, "--out", str(tmp_path / "t.safetensors"))
    assert ranked.exit_code == 0, ranked.output
    _loaded_once(ranked.stderr, folder)
    captured = run("train", "capture", "eagle3", "data.held_out=2", *data, *made, "--out", str(tmp_path / "f"))
    assert captured.exit_code == 0, captured.output
    _loaded_once(captured.stderr, folder)


def test_warnings_of_the_package_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a remedy hidden between a file name and a line of code."""
    others: list[str] = []
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *where, **options: others.append(str(message))  # the interpreter's own
        cli._show_warnings_in_a_line()
        warnings.simplefilter("always")
        warnings.warn("slow: do this", PerformanceWarning, stacklevel=1)
        warnings.warn("another", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: slow: do this\n"
    assert others == ["another"]


def test_a_drafter_that_one_method_uses_is_taken(folder: str) -> None:
    """Guards against a race refused because its baselines need no drafter, an unknown method told as an unused drafter,
    and a refusal where nothing is named and the default follows the drafter."""
    options = ("-m", folder, *EARLY_EXIT, "--max-new-tokens", "6", "--json")
    raced = run("bench", "-w", "builtin:1", "--methods", "recycle,linear:budget=2", *options)
    assert raced.exit_code == 0, raced.output
    assert list(json.loads(raced.stdout.splitlines()[-1])["methods"]) == ["plain", "recycle", "linear:budget=2"]
    certified = run("verify", "-w", "builtin:1", "--method", "recycle,linear:budget=2", *options)
    assert json.loads(certified.stdout)["bugs"] == 0
    assert json.loads(run("generate", "hello", *options).stdout)["method"] == "outpace:draft=linear"
    unknown = run("generate", "hello", "--method", "magic", *options)
    assert "method='magic': unknown" in str(unknown.exception)
