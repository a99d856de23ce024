"""Options are written once: defaults of signatures, commands and requests against the settings classes."""

import inspect
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

import outpace
from outpace.cli import app
from outpace.core.params import SamplingParams
from outpace.core.settings import LoadSettings, default_of, settings_of
from outpace.serve.requests import ChatRequest, CompletionRequest
from outpace.serve.settings import ServeSettings
from tests.cli.test_help import commands

CLASSES = (LoadSettings, SamplingParams, ServeSettings)
OWN_DEFAULTS = {  # of commands, for a reason: long answers in chats, short ones for tuning, runs that can be repeated
    ("chat", "max_new_tokens"): 1024,
    ("tune", "max_new_tokens"): 64,
    ("warmup", "method"): "recycle",
    ("convert", "dtype"): None,  # of the file that is written: by default as it is
    ("regenerate", "method"): "plain",
    ("regenerate", "max_new_tokens"): 512,  # as in training
    **{(name, "seed"): 0 for name in ("verify", "bench", "warmup", "regenerate", "transitions")},
}
TEMPERATURE_OF_OPENAI = 1.0


def test_every_field_is_described() -> None:
    """Guards against an option without a meaning, a unit or its choices in help, documentation and API."""
    for kind in CLASSES:
        for name, about in settings_of(kind).items():
            assert about.description.endswith("."), name
            assert name in (kind.__doc__ or ""), f"{kind.__name__}: {name} is not documented"
            unsaid = [word for word in about.choices if not re.search(rf"\b{word}\b(?!')", about.description)]
            assert not unsaid, f"{kind.__name__}: {name} takes {unsaid}, and does not say what for"
    assert "max_num_seqs: " in (outpace.load.__doc__ or "")


def test_signatures_have_the_defaults_of_settings() -> None:
    """Guards against a default of `outpace.load` that differs from the one that commands and documentation show."""
    parameters = inspect.signature(outpace.load).parameters
    assert list(parameters) == list(settings_of(LoadSettings))
    for name, parameter in parameters.items():
        default = default_of(LoadSettings, name)
        assert (parameter.default if parameter.default is not inspect.Parameter.empty else ...) == default, name


def test_commands_have_the_defaults_of_settings() -> None:
    """Guards against an option of a command with another default than the class, other than the few listed here."""
    found = dict[tuple[str, str], Any]()
    for words, command in commands().items():
        for one in command.params:
            for kind in CLASSES:
                if one.name in settings_of(kind) and one.param_type_name == "option" and not one.multiple:
                    default = default_of(kind, one.name)
                    if one.default != default and default != () and not one.required:
                        found[words.rpartition(" ")[2], one.name] = one.default
    assert {key: value for key, value in found.items() if OWN_DEFAULTS.get(key, key) != value} == {}


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_requests_have_the_defaults_of_settings(kind: Any) -> None:
    """Guards against a field of the server with another default than `SamplingParams`; OpenAI's temperature is 1."""
    names = {"min_tokens": "min_new_tokens"}
    compared = 0
    for name, field in kind.model_fields.items():
        own = names.get(name, name)
        if own in settings_of(SamplingParams) and own not in ("logprobs", "stop", "logit_bias", "bad_words"):
            wanted = TEMPERATURE_OF_OPENAI if own == "temperature" else default_of(SamplingParams, own)
            assert field.default == wanted, name
            assert field.description, name
            compared += 1
    assert compared >= 10


@pytest.mark.parametrize(
    "line",
    [
        ["verify", "none", "-w", "builtin:1"],
        ["verify", "-w", "builtin:1", "--model", "none"],
        ["verify", "-mnone", "-w", "builtin:1"],
        ["verify", "--model=none", "-w", "builtin:1"],
        ["generate", "none", "Hi"],
        ["generate", "Hi", "--model", "none"],
        ["generate", "--model", "none", "--", "-Hi"],
    ],
)
def test_model_is_the_first_argument_or_an_option(line: list[str]) -> None:
    """Guards against `--model NAME` that no longer works, and a prompt taken for the model where it comes later."""
    result = CliRunner().invoke(app, line)
    assert isinstance(result.exception, outpace.ModelError)
    assert "none" in str(result.exception)
    assert "requires an argument" in CliRunner().invoke(app, ["generate", "Hi", "--model"]).output


COMPLETED = {"--method loo": "lookup"} | dict.fromkeys(("smollm2", "--model smollm2", "Hi -m smollm2"), "smollm2-135m")
COMPLETE = """
import os, sys
typed, sys.argv[:] = sys.argv[1:], ["outpace"]
from outpace.cli import app
for each in typed:
    line = f"outpace chat {each}"
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    try:
        app()
    except SystemExit:
        print("END", flush=True)
"""


def test_shell_completion() -> None:
    """Guards against a shell that completes neither names of methods nor those of built-in models, or gets a traceback
    behind `--model`."""
    command, asked = [sys.executable, "-c", COMPLETE, *COMPLETED], {"_OUTPACE_COMPLETE": "complete_bash"}
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=False)
    answers = done.stdout.split("END\n")
    assert len(answers) == len(COMPLETED) + 1, done.stderr
    for (typed, wanted), answer in zip(COMPLETED.items(), answers, strict=False):
        assert wanted in answer.split(), typed
