"""`outpace bench --endpoint` and `outpace chat --url`, as a user runs them, against servers over real sockets."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from typer.testing import Result

from outpace.lib.errors import ModelError
from tests.cli.runner import assert_refused, last_json, run
from tests.unit.bench.test_endpoint import honest
from tests.unit.endpoint.fake import Reply, serving, streamed


def _bench(url: str, *arguments: str) -> Result:
    return run("bench", "--endpoint", url, "-w", "builtin:4", "--max-new-tokens", "9", *arguments)


def test_bench_prints_a_table_and_json_and_keeps_records(tmp_path: Path) -> None:
    """Guards against a summary that differs from the records kept, and a run that asks again for what is kept."""
    with serving(honest()) as seen:
        result = _bench(seen.url, "--concurrency", "1,2", "--out", str(tmp_path / "run"))
        assert result.exit_code == 0, result.output
        asked = len(seen.bodies)
        again = _bench(seen.url, "--concurrency", "1,2", "--out", str(tmp_path / "run"), "--json")
        assert len(seen.bodies) == asked
    (line,) = again.stdout.strip().splitlines()
    levels = json.loads(line)["levels"]
    assert levels == json.loads(result.stdout.strip().splitlines()[-1])["levels"]
    assert [(row["concurrency"], row["equal"]) for row in levels] == [(1, 1.0), (2, 1.0)]
    assert "tiny at http://" in result.stdout
    assert len((tmp_path / "run" / "records.jsonl").read_text().splitlines()) == 4


def test_bench_of_a_method_that_only_the_server_has() -> None:
    """Guards against a method of a package at the server that is refused here, before the server is asked."""
    pages = {"/v1/outpace/methods": {"default": "theirs"}, "/v1/outpace/info": {"model": "tiny"}}

    def answer(path: str, body: dict[str, Any]) -> Reply:
        return Reply([pages[path]]) if path in pages else honest()(path, body)

    with serving(answer) as seen:
        rows = last_json(_bench(seen.url, "--methods", "theirs:budget=3", "--json"))["levels"]
    assert [row["method"] for row in rows] == ["plain", "theirs:budget=3"]


def test_options_that_are_our_defaults_reach_a_server_with_others() -> None:
    """Guards against `--repetition-penalty 1` and `--top-p 1` that are dropped, so that vLLM takes those of the model's
    generation_config.json, and a record that says otherwise; and against a window that a server of others ignores."""
    with serving(honest()) as seen:
        assert _bench(seen.url, "--repetition-penalty", "1").exit_code == 0
        measured = len(seen.bodies)
        assert run("chat", "--url", seen.url, "--top-p", "1", lines="Hi\n").exit_code == 0
        refused = _bench(seen.url, "--repetition-penalty", "1.2", "--penalty-window", "64")
    assert {body["repetition_penalty"] for body in seen.bodies[:measured]} == {1.0}
    assert [body["top_p"] for body in seen.bodies[measured:]] == [1.0]
    assert not any("top_k" in body for body in seen.bodies)
    assert_refused(refused, "penalty_window=64: is a field of outpace's servers alone")


SERVER = ("--endpoint", "http://127.0.0.1:1", "-w", "builtin:4")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("bench", *SERVER, "--dtype", "float32"), "dtype='float32': cannot be used when a server is measured"),
        (("bench", *SERVER, "--phases"), "phases=True: cannot be used when a server is measured"),
        (("bench", *SERVER, "--batch-size", "2"), "batch_size=2: cannot be used when a server is measured"),
        (("chat", "--url", "http://127.0.0.1:1", "--exact"), "exact=True: cannot be used when a server answers"),
        (("bench", "-w", "builtin"), "model: name one, as in `outpace chat smollm2-135m`, or a server with --endpoint"),
        (("chat",), "model: name one, as in `outpace chat smollm2-135m`, or a server with --url"),
        (("bench", "-m", "x", "-w", "builtin", "--concurrency", "1,2"), "several levels are for servers"),
        (("bench", "-m", "x", "-w", "builtin", "--concurrency", "two"), "concurrency='two': give whole numbers"),
    ],
)
def test_what_is_missing_or_too_much(arguments: tuple[str, ...], complaint: str) -> None:
    """Guards against options that a server ignores, and a traceback where neither a model nor a server is named."""
    assert_refused(run(*arguments), complaint)


def test_chat_sends_the_conversation_and_prints_what_comes() -> None:
    """Guards against turns that do not know of each other, and /reset that keeps the server's memory of them."""
    with serving(honest()) as seen:
        said = run("chat", "--url", seen.url, "--system", "Be brief.", "--seed", "3", lines="Hi\nMore\n/reset\nHi\n")
    assert said.exit_code == 0, said.output
    talks = [[message["content"] for message in body["messages"]] for body in seen.bodies]
    first, second, third = said.stdout.splitlines()
    assert talks == [["Be brief.", "Hi"], ["Be brief.", "Hi", first, "More"], ["Be brief.", "Hi"]]
    assert first == third != second
    assert seen.bodies[0]["seed"] == 3
    assert not seen.bodies[0].keys() & {"outpace", "max_tokens"}, "the rest of its context is the limit"
    assert said.stderr.count("4 tokens, ") == said.stderr.count("ended by stop") == 3


def test_chat_with_a_server_of_ours_says_what_speculation_did() -> None:
    """Guards against a method that is not sent, a report that is not shown, and 0 tokens/s of one piece."""
    report = {"tokens_per_step": 2.5, "reused_tokens": 6, "steps": 2}

    def answer(path: str, body: dict[str, Any]) -> Reply:
        pages = {"/v1/outpace/methods": {"default": "lookup"}, "/v1/outpace/info": {"model": "m"}}
        return streamed(["Yes"], report=report) if body else Reply([pages[path]])

    with serving(answer) as seen:
        options = ["--method", "recycle", "--budget", "4", "--max-new-tokens", "9"]
        said = run("chat", "--url", seen.url, *options, lines="Hi\n")
    assert seen.bodies[0]["max_tokens"] == 9
    assert seen.bodies[0]["outpace"] == {"method": "recycle", "budget": 4, "report": True}
    assert "tokens, 2.50 tokens per step, 6 of 7 prompt tokens reused, ended by stop" in said.stderr
    assert "/s" not in said.stderr


def test_chat_goes_on_behind_an_answer_that_broke_off() -> None:
    """Guards against half an answer that stays in the conversation, and a script that takes it for a whole one."""
    replies = [streamed(["Yes"]), Reply([b""], headers={"Content-Type": "text/event-stream"}), streamed(["Yes"])]
    with serving(lambda path, body: replies.pop(0) if body else Reply([{}], 404)) as seen:
        said = run("chat", "--url", seen.url, lines="Hi\nTwo\nThree\n")
    assert said.exit_code == 2
    assert "error: endpoint=" in said.stderr
    assert [message["content"] for message in seen.bodies[-1]["messages"]] == ["Hi", "Yes", "Three"]


COMMAND = [sys.executable, "-c", "from outpace.cli import main; main()", "chat", "--url"]


def test_a_character_that_the_terminal_lacks_does_not_end_the_answer() -> None:
    """Guards against a traceback in the middle of a sentence, and a conversation that is lost."""
    with serving(lambda path, body: streamed(["It", "\u2019s"]) if body else Reply([{}], 404)) as seen:
        environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
        options: dict[str, Any] = {"input": "Hi\n", "env": environment, "encoding": "latin-1", "timeout": 60}
        done = subprocess.run([*COMMAND, seen.url], capture_output=True, check=False, **options)
    assert (done.returncode, done.stdout) == (0, "It\\u2019s\n"), done.stderr


@pytest.mark.skipif(os.name != "posix", reason="Windows sends no Ctrl-C to one process")
def test_ctrl_c_cancels_the_request_and_not_the_conversation() -> None:
    """Guards against a server that computes on for nobody: the connection is closed, and the next line is answered."""
    gate = Event()
    replies = [streamed(["Half", "of it"], gate=gate), streamed(["Yes"])]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with serving(lambda path, body: replies.pop(0) if body else Reply([{}], 404)) as seen:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # What starts the tests may ignore Ctrl-C, as jobs in the background do; a child would, too.
        pipes["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        with subprocess.Popen([*COMMAND, seen.url], text=True, env=environment, **pipes) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write("Hi\n")
                process.stdin.flush()
                assert process.stdout.read(4) == "Half"
                process.send_signal(signal.SIGINT)
                assert seen.gone.wait(20), "the server still has its client"
                out, notes = process.communicate("Two\n", timeout=20)
            finally:
                gate.set()
                process.kill()
    assert process.returncode == 0
    assert out.splitlines()[-1] == "Yes"
    assert "ended by cancelled" in notes
    assert [message["content"] for message in seen.bodies[1]["messages"]] == ["Hi", "Half", "Two"]


def test_a_wrong_key_is_one_line() -> None:
    """Guards against a traceback where the first look at a server fails."""
    with serving(lambda path, body: Reply([{"error": {"message": "who are you?"}}], 401)) as seen:
        refused = run("chat", "--url", f"{seen.url}/x", "--api-key", "k")
    assert_refused(refused, "refuses the API key", kind=ModelError)
    assert seen.keys == ["Bearer k"]
