"""How commands load their models: what they share, and what they say of it."""

import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outpace import Model, cli
from outpace.cli.options import progress_bar
from outpace.lib.errors import PerformanceWarning
from tests.cli.runner import assert_loaded_once, assert_refused, run
from tests.unit.models.tiny import byte_tokenizer, save_tiny_model

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
    assert_loaded_once(result.stderr, folder)


def test_tuning_and_serving_say_how_long_loading_took(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against commands that load in silence."""
    assert_loaded_once(run("tune", folder, "--forget").stderr, folder)
    pytest.importorskip("structlog")
    monkeypatch.setattr("outpace.serve.run.serve", lambda load, settings: load())
    assert_loaded_once(run("serve", folder).stderr, folder)


@pytest.mark.parametrize("options", [("--method", "recycle"), ("--method", "recycle", "--budget", "4")], ids=str)
def test_no_request_waits_for_what_a_server_can_do_before(
    folder: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against streams that stand still: for seconds where the first two requests of a method without prices
    share a round, and for a second at the first grammar."""
    pytest.importorskip("structlog")
    pytest.importorskip("llguidance")
    models: list[Model] = []
    monkeypatch.setattr("outpace.serve.run.serve", lambda load, settings: models.append(load()))
    result = run("serve", folder, *options)
    assert result.exit_code == 0, result.output
    engine = models[0].engine
    assert engine._costs is not None
    assert engine._costs.is_known
    assert engine._grammars is not None
    assert engine._grammars._tokenizer is not None
    assert engine.is_idle
    assert engine.free_slots == models[0].target.max_slots


def test_a_server_whose_model_has_no_chat_template_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server for completions that ends as it tries what its model, or an older llguidance that another
    package has pinned, cannot do."""

    def older(grammars: Any) -> None:
        raise ImportError("cannot import name 'TokenizerWrapper' from 'llguidance._tokenizer'")

    pytest.importorskip("structlog")
    monkeypatch.setattr("outpace.sampling.grammar.Grammars.prepare", older)
    save_tiny_model(tmp_path)
    byte_tokenizer(None).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    monkeypatch.setattr("outpace.serve.run.serve", lambda load, settings: load())
    result = run("serve", str(tmp_path))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (" \n", "is empty; give a Jinja template"),
        ("{% for m in messages %}{{ m['content'] }", "refuses these messages"),
        ("You are a pirate.", "leaves messages out"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", ""),
        ("{{ raise_exception('no system') if not messages[1:] }}{{ messages[-1]['content'] }}", ""),
    ],
)
def test_a_chat_template_is_tried_before_the_server_is_ready(
    folder: str, template: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a server that starts with a wrong file as its template and refuses every chat, or answers it
    without having read a word of it."""
    pytest.importorskip("structlog")
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    monkeypatch.setattr("outpace.serve.run.serve", lambda load, settings: load())
    result = run("serve", folder, "--chat-template", str(file))
    if said:
        assert_refused(result, f"chat_template={str(file)!r}: ", said)
    else:
        assert result.exit_code == 0, result.output


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


def test_a_terminal_that_draws_no_bars_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against hours of training without a word where TERM=dumb, as in Emacs."""
    monkeypatch.setenv("TERM", "dumb")
    notes = Console(file=(written := io.StringIO()), force_terminal=True, markup=False)
    monkeypatch.setattr(sys.modules["outpace.cli.options"], "notes", notes)
    with progress_bar("answers", 4) as advance:
        advance(2)
        advance(2)
    assert [line.split(",")[0] for line in written.getvalue().splitlines()] == ["answers: 2/4", "answers: 4/4"]


def test_a_drafter_that_one_method_uses_is_taken(folder: str) -> None:
    """Guards against a race refused because its baselines need no drafter, an unknown method reported as an unused
    drafter, and a refusal where nothing is named and the default follows the drafter."""
    options = ("-m", folder, "--drafter", "early-exit:1", "--max-new-tokens", "6", "--json")
    raced = run("bench", "-w", "builtin:1", "--methods", "recycle,linear:budget=2", *options)
    assert raced.exit_code == 0, raced.output
    assert list(json.loads(raced.stdout.splitlines()[-1])["methods"]) == ["plain", "recycle", "linear:budget=2"]
    certified = run("verify", "-w", "builtin:1", "--method", "recycle,linear:budget=2", *options)
    assert json.loads(certified.stdout)["bugs"] == 0
    assert json.loads(run("generate", "hello", *options).stdout)["method"] == "outpace:draft=linear"
    unknown = run("generate", "hello", "--method", "magic", *options)
    assert "method='magic': unknown" in str(unknown.exception)
