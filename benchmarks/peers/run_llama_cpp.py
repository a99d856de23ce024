"""llama.cpp's server: plain, or with one of its kinds of drafts; each needs a process of its own."""

import atexit
import json
import socket
import subprocess
import sys
from pathlib import Path
from time import sleep
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

SERVER = Path(sys.executable).with_name("llama-server")
TRAINED = ("dflash", "eagle3")
_POLL_S, _ANSWER_S = 0.02, 600.0
_EVENT = b"data: "


class Contender:
    """A server with its defaults, except for threads, context, and caches that would last from prompt to prompt.

    Args:
        settings: as `serve` describes; "weights" and "draft" are GGUF files. With "streamed" ids arrive as the server
            sends them, and times are those of arrival; a race excludes HTTP's time.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        (method,) = settings["methods"]
        self._is_streamed = settings.get("streamed", False)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        threads = str(settings["threads"])
        drafting = _drafting(method, settings.get("draft"), settings.get("draft_architecture"), threads)
        self._server = subprocess.Popen(
            [
                *(str(SERVER), "--model", settings["weights"], "--ctx-size", str(settings["max_length"])),
                *("--threads", threads, "--threads-batch", threads, "--parallel", "1", "--cache-ram", "0"),
                *("--host", "127.0.0.1", "--port", port, "--offline", *drafting),
            ]
        )
        atexit.register(self._server.terminate)
        self._address = f"http://127.0.0.1:{port}"
        self._wait()
        build = self._call("/props")["build_info"]
        self.facts = {"versions": {"llama.cpp": build}, "threads": settings["threads"], "note": " ".join(drafting)}

    def generate(self, method: str, prompt: list[int], max_new_tokens: int, clock: Any) -> dict[str, Any] | None:
        """Decode greedily. Times are the server's own, so that HTTP costs it nothing."""
        asked = {"prompt": prompt, "n_predict": max_new_tokens, "temperature": 0.0, "top_k": 1}
        asked |= {"return_tokens": True, "cache_prompt": False}
        if self._is_streamed:
            with self._open("/completion", asked | {"stream": True}) as answer:
                for line in answer:
                    if line.startswith(_EVENT):
                        clock.put(json.loads(line.removeprefix(_EVENT))["tokens"])
            return None
        said = self._call("/completion", asked)
        ids, times = said["tokens"], said["timings"]
        clock.put(ids[:1])
        clock.put(ids[1:])
        return {
            "prompt_seconds": times["prompt_ms"] / 1e3,
            "decode_seconds": times["predicted_ms"] / 1e3,
            "arrivals": max(1, times["predicted_n"] - times.get("draft_n_accepted", 0)),
        }

    def _wait(self) -> None:
        """Wait until the model is loaded. If the server ends, it has printed the reason, and this process ends too."""
        while self._server.poll() is None:
            try:
                self._call("/health")
                return
            except URLError:  # the server does not listen yet, or answers "loading model"
                sleep(_POLL_S)
        sys.exit(1)

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._open(path, body) as answer:
            return json.load(answer)

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._address + path, data, {"Content-Type": "application/json"})
        return urlopen(request, timeout=_ANSWER_S)


def _drafting(method: str, draft: str | None, architecture: str | None, threads: str) -> list[str]:
    """Flags of a method: "plain", a kind of n-grams, or "draft-N" for N tokens of a draft model, a DFlash or an EAGLE-3
    by the architecture that its file states."""
    if not method.startswith("draft-"):
        return ["--spec-type", {"plain": "none"}.get(method, method)]
    assert draft is not None
    model = ["--spec-draft-model", draft, "--spec-draft-threads", threads]
    kind = architecture if architecture in TRAINED else "simple"
    return ["--spec-type", f"draft-{kind}", "--spec-draft-n-max", method.removeprefix("draft-"), *model]
