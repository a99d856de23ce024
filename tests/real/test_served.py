"""`outpace serve` as a process, on the real model: answers, concurrency, SIGTERM."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from outpace.models.loading.pull import pull

NAME = "smollm2-135m"
QUESTIONS = ("Why is the sky blue?", "Name three colours.", "What is 7 times 8?", "Write a line about the sea.")
METHODS = ("outpace:draft=none", "recycle")  # all of them in tests/unit/serve/test_limits.py


class Process:
    """A running server.

    Args:
        folder: for its log.
        options: of `outpace serve`.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", folder / "log"
        serve = [sys.executable, "-m", "outpace", "serve", NAME, "--port", str(port), "--dtype", "float32", *options]
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(serve, stdout=log, stderr=log, env=os.environ)
        until = time.monotonic() + 120
        while True:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < until, self.log
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)

    @property
    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    pull(NAME)
    one = Process(tmp_path_factory.mktemp("serve"), "--max-num-seqs", "6", "--drain-timeout", "30")
    yield one
    if one.process.poll() is None:
        one.process.kill()


async def ask(client: openai.AsyncOpenAI, question: int, method: str, leaves: bool = False) -> str:
    """An answer, streamed; greedy for even questions. Who leaves reads a piece and goes."""
    stream = await client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": QUESTIONS[question]}], max_tokens=24, stream=True,
        temperature=question % 2, seed=question, extra_body={"outpace": {"method": method}},
    )  # fmt: skip
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if leaves and text:
            await stream.close()
            break
    return text


def test_every_method_says_what_plain_says_with_others_leaving(server: Process) -> None:
    """Guards against answers that depend on method or company, in a real process with real clients."""

    async def everything() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            plain = [await ask(client, question, "plain") for question in range(len(QUESTIONS))]
            asked = [ask(client, question, method) for method in METHODS for question in range(len(QUESTIONS))]
            leaving = [ask(client, question % len(QUESTIONS), "recycle", leaves=True) for question in range(6)]
            answers = await asyncio.gather(*asked, *leaving)
            return plain, answers[: len(asked)]

    plain, answers = asyncio.run(everything())
    assert len(set(plain)) == len(QUESTIONS)
    assert all(plain)
    assert answers == plain * len(METHODS)


@pytest.mark.skipif(os.name != "posix", reason="Windows ends processes at once")
def test_sigterm_drains_the_process(server: Process) -> None:
    """Guards against a kill that loses answers, a log that is no JSON, or an exit status that means failure."""
    body: dict[str, Any] = {
        "model": NAME, "messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 60, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        said = [line[6:] for line in lines if line.startswith("data: ")]
    assert said[-1] == "[DONE]"
    assert json.loads(said[-2])["usage"]["completion_tokens"] == 60
    assert server.process.wait(60) == 0
    events = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    assert [event["event"] for event in events[-1:]] == ["ended"]
    assert "error" not in [event["level"] for event in events]
    assert QUESTIONS[0] not in server.log
