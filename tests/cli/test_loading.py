"""How commands load their models: what they share, and what they say of it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outpace import cli
from outpace.core.errors import InvalidRequest
from tests.unit.models.tiny import save_tiny_model

EARLY_EXIT = ("--drafter", "early-exit:1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny"), eos_token_id=None, max_position_embeddings=2048))


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), catch_exceptions=True)


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
    refused = _run(*command, "-m", folder, *EARLY_EXIT)
    assert isinstance(refused.exception, InvalidRequest)
    assert "drafter='early-exit:1': it would not be used, for " in str(refused.exception)
    assert "leave it out, or choose a method that drafts with one" in str(refused.exception)


def test_a_drafter_that_one_method_uses_is_taken(folder: str) -> None:
    """Guards against a race refused because its baselines need no drafter, an unknown method told as an unused drafter,
    and a refusal where nothing is named and the default follows the drafter."""
    options = ("-m", folder, *EARLY_EXIT, "--max-new-tokens", "6", "--json")
    raced = _run("bench", "-w", "builtin:1", "--methods", "recycle,linear:budget=2", *options)
    assert raced.exit_code == 0, raced.output
    assert list(json.loads(raced.stdout.splitlines()[-1])["methods"]) == ["plain", "recycle", "linear:budget=2"]
    certified = _run("verify", "-w", "builtin:1", "--method", "recycle,linear:budget=2", *options)
    assert json.loads(certified.stdout)["bugs"] == 0
    assert json.loads(_run("generate", "hello", *options).stdout)["method"] == "outpace:draft=linear"
    unknown = _run("generate", "hello", "--method", "magic", *options)
    assert "method='magic': unknown" in str(unknown.exception)
