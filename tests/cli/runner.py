"""Commands in the process of the test, as a user types them."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from outpace import cli
from outpace.lib.errors import InvalidRequest


def run(*arguments: str, lines: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), input=lines)


def last_json(result: Result) -> Any:
    assert result.exit_code == 0, (result.output, result.exception)
    lines = result.stdout.strip().splitlines()
    begins = max(index for index, line in enumerate(lines) if line.startswith(("{", "[")))
    return json.loads("\n".join(lines[begins:]))


def run_json(*arguments: str) -> Any:
    """The JSON that a command prints last, on one line or several; its error is raised."""
    result = run(*arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return last_json(result)


def assert_loaded_once(said: str, folder: str) -> None:
    """On standard error there is one line about loading a model, without bars."""
    (line,) = [line for line in said.splitlines() if line.startswith("loaded ")]
    assert line.startswith(f"loaded {Path(folder).name} in ")
    assert "\x1b" not in said


def assert_refused(result: Result, *texts: str, kind: type[Exception] = InvalidRequest) -> None:
    """The command ended with an error that contains the texts."""
    assert isinstance(result.exception, kind), (result.output, result.exception)
    assert all(text in str(result.exception) for text in texts), result.exception
