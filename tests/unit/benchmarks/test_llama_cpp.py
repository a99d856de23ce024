"""The runner of llama.cpp's server, with a script that pretends to be one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import run_llama_cpp
from benchmarks.peers.contenders import DRAFTED, LLAMA_CPP, PEERS
from benchmarks.peers.environments import PeerMissing
from benchmarks.peers.processes import RunnerProcess
from benchmarks.peers.serve import Clock

SERVER = """#!{python}
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

if "broken.gguf" in sys.argv:
    sys.exit("error: no such model")
loaded = time.time() + 0.3

class Handler(BaseHTTPRequestHandler):
    def answer(self, body, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        is_loading = time.time() < loaded
        self.answer({{"build_info": "b1-abc"}}, 503 if is_loading else 200)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        open("{folder}/asked.json", "w").write(json.dumps([sys.argv, asked]))
        times = {{"prompt_ms": 250.0, "predicted_ms": 1000.0, "predicted_n": 6}}
        times |= {{"draft_n": 9, "draft_n_accepted": 3}} if asked["prompt"][0] == 1 else {{}}
        ids = [5, 6, 7, 8, 9, 2]
        if not asked.get("stream"):
            return self.answer({{"tokens": ids, "timings": times}})
        self.send_response(200)
        self.end_headers()
        for token in ids:
            self.wfile.write(b"data: " + json.dumps({{"tokens": [token]}}).encode() + b"\\n\\n")
            time.sleep(0.05)
        self.wfile.write(b'data: {{"tokens": [], "stop": true}}\\n\\n')

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "llama-server"
    program.write_text(SERVER.format(python=sys.executable, folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setattr(run_llama_cpp, "SERVER", program)
    return program


def _settings(method: str, **changes: Any) -> dict[str, Any]:
    settings = {"methods": [method], "weights": "model.gguf", "draft": "small.gguf", "threads": 2, "max_length": 99}
    return settings | {"eos": [2]} | changes


def test_answers_carry_the_servers_own_times_and_passes(server: Path) -> None:
    """Guards against HTTP in the server's times, a prefix that is kept from prompt to prompt, sampling, and accepted
    tokens that count as passes."""
    contender = run_llama_cpp.Contender(_settings("draft-3"))
    for prompt, passes in (([1, 4], 3), ([3, 4], 6)):
        clock = Clock([2], 20)
        measured = contender.generate("draft-3", prompt, 20, clock)
        assert (clock.ids, clock.first, clock.has_ended) == ([5, 6, 7, 8, 9, 2], 1, True)
        assert measured == {"prompt_seconds": 0.25, "decode_seconds": 1.0, "arrivals": passes}
    arguments, asked = json.loads((server.parent / "asked.json").read_text())
    assert asked["prompt"] == [3, 4]
    assert (asked["temperature"], asked["cache_prompt"], asked["n_predict"]) == (0.0, False, 20)
    flags = dict(zip(arguments[1::2], arguments[2::2], strict=False))
    assert (flags["--threads"], flags["--ctx-size"], flags["--model"]) == ("2", "99", "model.gguf")
    assert contender.facts["versions"] == {"llama.cpp": "b1-abc"}
    contender._server.terminate()


def test_a_stream_is_timed_as_it_arrives(server: Path) -> None:
    """Guards against tokens that all have the time of the last one, and a last event without tokens that is counted."""
    contender = run_llama_cpp.Contender(_settings("plain", streamed=True))
    clock = Clock([99], 20)
    assert contender.generate("plain", [1, 4], 20, clock) is None
    answer = clock.answer()
    assert answer["token_ids"] == [5, 6, 7, 8, 9, 2]
    seconds, sizes = zip(*answer["chunks"], strict=True)
    assert sizes == (1,) * 6
    assert seconds[-1] - seconds[0] > 0.1, "six tokens, 0.05 s apart or more"
    contender._server.terminate()


def test_each_method_has_its_flags() -> None:
    """Guards against a draft model that drafts nothing because the kind of speculation was not named with it, and
    against the same flags for all lengths."""
    assert run_llama_cpp._drafting("plain", None, None, "2") == ["--spec-type", "none"]
    assert run_llama_cpp._drafting("ngram-map-k", "small.gguf", "qwen2", "2") == ["--spec-type", "ngram-map-k"]
    drafting = run_llama_cpp._drafting("draft-4", "small.gguf", "qwen2", "2")
    assert drafting[:4] == ["--spec-type", "draft-simple", "--spec-draft-n-max", "4"]
    assert drafting[4:6] == ["--spec-draft-model", "small.gguf"]
    assert run_llama_cpp._drafting("draft-4", "d.gguf", "dflash", "2")[:2] == ["--spec-type", "draft-dflash"]
    services = PEERS["llama.cpp"].of_gguf
    assert [service.methods for service in services] == [(method,) for method in (*LLAMA_CPP, *DRAFTED)]


def test_a_server_that_does_not_load_says_why(server: Path, tmp_path: Path) -> None:
    """Guards against a contender that is missing with the reason of our runner instead of the server's."""
    runner = tmp_path / "run.py"
    source = Path(run_llama_cpp.__file__).read_text()
    runner.write_text(source.replace('Path(sys.executable).with_name("llama-server")', f"Path({str(server)!r})"))
    settings = _settings("plain", weights="broken.gguf")
    with pytest.raises(PeerMissing, match="error: no such model"):
        RunnerProcess(Path(sys.executable), runner, settings, tmp_path / "log.log", {})
