"""Every command and option of the command line with what nobody should give it: exit status 2 and one line."""

import io
import random
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from outpace import cli
from tests.fuzz.campaign import Tally, counts
from tests.fuzz.commands import Files, commands, line_of
from tests.unit.models.tiny import save_tiny_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("lines")
    (root / "files").mkdir()
    return Files(root / "files", save_tiny_model(root / "model"))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, no threads beside the tests' own, a server that loads and does not listen, and a folder for what is
    written to paths like `builtin:0`: a campaign once left fifteen such files in the checkout."""

    def offline(*given: Any, **options: Any) -> Any:
        raise OSError("no network in tests")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(cli, "choose_threads", lambda: None)
    monkeypatch.setattr("outpace.serve.run.serve", lambda loads, settings: loads())


def run(line: list[str]) -> tuple[Any, str, str]:
    """Exit status, standard output and standard error of the command as it is installed."""
    out, err, before = io.StringIO(), io.StringIO(), (sys.argv, sys.stdin)
    sys.argv, sys.stdin = ["outpace", *line], io.StringIO("hello\n")
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main()
        return 0, out.getvalue(), err.getvalue()
    except SystemExit as ended:
        return ended.code, out.getvalue(), err.getvalue()
    finally:
        sys.argv, sys.stdin = before


def complaint(status: Any, err: str, must_fail: bool) -> str | None:
    """What is wrong with how a command ended; None if nothing is."""
    if status not in (0, 1, 2) or (must_fail and status != 2):
        return f"status {status}"
    if "Traceback" in err or (status == 2 and not err.strip()):
        return "a traceback, or no word"
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    is_usage = "Usage:" in err or "Error" in err
    if status == 2 and len(errors) != 1 and not is_usage:
        return f"{len(errors)} lines that say what is wrong"
    if errors and (err.rstrip().splitlines()[-1] != errors[0] or "\x1b" in errors[0]):
        return "an error of more than a line, or one that a terminal obeys"
    return None


def judge(tally: Tally, line: list[str], what: str, must_fail: bool) -> None:
    try:
        status, _, err = run(line)
    except Exception as error:
        tally.outcomes["traceback"] += 1
        tally.failures.append(f"traceback: {what}: {type(error).__name__}: {str(error)[:200]!a}")
        return
    tally.outcomes[f"status {status}"] += 1
    if wrong := complaint(status, err, must_fail):
        tally.failures.append(f"{wrong}: {what}: {err[-200:]!a}")


@counts(46, 230)
def test_wrong_values_of_all_options(files: Files, cases: int) -> None:
    """Guards against a traceback, a silent default, an answer, or brackets of a name that are taken for markup, for any
    option of any command."""
    tally, rng = Tally("command lines"), random.Random(2305)
    known, tried = list(commands(cli.app)), set[tuple[str, ...]]()
    for case in range(cases):
        words, takes = known[case % len(known)]
        if not takes:
            continue
        line, must_fail = line_of(rng, words, takes, files)
        what = f"{case}: {' '.join(ascii(one)[1:-1][:80] for one in line)}"

        judge(tally, line, what, must_fail)
        tried.add(words)
    assert len(tried) > 20
    tally.check()


def test_brackets_are_no_markup(files: Files) -> None:
    """Guards against a path that is told without its brackets, and one whose brackets end the program."""
    for name in ("nothing [here]", "no [such] file.jsonl", "[/] x", "[bold"):
        for line in (["generate", "x", "-m", str(files.folder / name)], ["verify", "-m", "m", "-w", f"./{name}"]):
            status, _, err = run(line)
            assert status == 2
            assert name in err
            assert err.count("\n") == 1
    status, _, err = run(["generate", "Hi", "-m", str(files.model), "--raw", "--max-new-tokens", "1"])
    assert (status, "error" in err) == (0, False)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (["generate", "caf\udce9", "--raw"], "prompt='caf\\udce9': character 3 is a lone surrogate"),
        (["generate", "caf\udce9"], "content='caf\\udce9': character 3"),
        (["generate", "x", "--bad-word", "\udcff"], "bad_words='\\udcff': character 0"),
        (["generate", "x", "--stop", "\udcff"], "stop='\\udcff': character 0"),
        (["generate", "x", "--speculative-config", "[" * 100_000], "not JSON: "),
        (["verify", "-w", "builtin:²"], "workload 'builtin:²': no such file"),
        (["verify", "-w", "builtin:0"], "workload 'builtin:0': its limit leaves no prompts"),
        (["verify", "-w", "builtin:1", "--max-new-tokens", "0"], "max_new_tokens=0: "),
        (["bench", "-w", "builtin:1", "--methods", "transformers", "--max-new-tokens", "0"], "max_new_tokens=0: "),
        (["generate", "x", "--drafter", "early-exit:²", "--method", "linear"], "drafter='early-exit:²': give the"),
        (["serve", "--host", "nobody:9", "--api-key", "x"], "host='nobody:9': "),
        (["serve", "--timeout", "inf"], "timeout=inf: must be a finite number"),
    ],
)
def test_what_was_a_traceback_or_an_answer(files: Files, line: list[str], wanted: str) -> None:
    """Guards against each of the mistakes that once ended in a traceback, or in a certificate without evidence."""
    where = [str(files.model)] if line[0] == "serve" else ["-m", str(files.model)]
    status, out, err = run([*line, *where])
    assert status == 2
    assert "LOSSLESS" not in out
    (said,) = [one for one in err.splitlines() if one.startswith("error:")]
    assert wanted in said
