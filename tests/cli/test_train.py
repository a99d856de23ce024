"""`outpace train`, run as a user runs it, on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest

from outpace.data.answers import read_about, read_answers
from outpace.lib.errors import InvalidRequest
from tests.cli.runner import run_json
from tests.unit.endpoint.fake import Reply, serving
from tests.unit.models.tiny import byte_tokenizer, save_tiny_model


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": f"p{number}", "turns": ["Hi."]}) + "\n" for number in range(5)))
    return file


def run(folder: str, prompts: str, out: Path, *more: str) -> Any:
    options = ["--target", folder, "--prompts", prompts, "--out", str(out), "--max-new-tokens", "6", *more]
    return run_json("train", "regenerate", *options)


def test_regenerate_goes_on_where_it_stopped(folder: str, prompts: Path, tmp_path: Path) -> None:
    """Guards against a second run that begins again, or counts the first one's answers as its own."""
    first = run(folder, f"{prompts}:2", tmp_path / "answers")
    again = run(folder, str(prompts), tmp_path / "answers", "--batch-size", "2")
    assert (first["answered"], first["before"]) == (2, 0)
    assert (again["answered"], again["before"]) == (3, 2)
    answers = list(read_answers(tmp_path / "answers"))
    assert {one.id for one in answers} == {f"p{number}" for number in range(5)}
    assert len({one.answers for one in answers}) == 1, "greedy answers to the same words"
    assert read_about(tmp_path / "answers")["sampling"]["max_new_tokens"] == 6


def test_a_target_without_a_chat_template_needs_raw_prompts(prompts: Path, tmp_path: Path) -> None:
    """Guards against answers to prompts in a format the target never saw."""
    plain = save_tiny_model(tmp_path / "plain")
    byte_tokenizer(chat_template=None).save_pretrained(plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(InvalidRequest, match="no chat template"):
        run(str(plain), str(prompts), tmp_path / "answers")
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"id": "r", "turns": ["def f("], "raw": true}\n')
    assert run(str(plain), str(raw), tmp_path / "answers")["answered"] == 1


@pytest.mark.parametrize(("option", "value"), [("method", "lookup"), ("dtype", "float32"), ("device", "cpu")])
def test_an_endpoint_takes_no_options_of_the_model(
    option: str, value: str, folder: str, prompts: Path, tmp_path: Path
) -> None:
    """Guards against an option that is ignored, and a record of a number format that the server never had."""
    with pytest.raises(InvalidRequest, match=f"{option}='{value}'"):
        run(folder, str(prompts), tmp_path / "x", "--endpoint", "http://127.0.0.1:9/v1", f"--{option}", value)


def test_a_server_with_a_key_answers_under_its_own_name(folder: str, prompts: Path, tmp_path: Path) -> None:
    """Guards against a key that the error asks for and no option takes, and a path sent as the model's name."""

    def answer(path: str, body: dict[str, Any]) -> Reply:
        assert path == "/v1/chat/completions" or not body
        choice = {"message": {"content": "Hi."}, "finish_reason": "stop", "token_ids": [5, 6]}
        return Reply([{"choices": [choice]}]) if body else Reply([{}], 404)

    with serving(answer) as seen:
        report = run(folder, str(prompts), tmp_path / "x", "--endpoint", seen.url, "--api-key", "secret")
    assert report["answered"] == 5
    assert {body["model"] for body in seen.bodies} == {"tiny"}
    assert set(seen.keys) == {"Bearer secret"}
