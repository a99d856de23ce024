"""Models on the hub: how often it is asked, and what happens without it."""

import hashlib
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

import outpace
from outpace.models.loading import registry
from outpace.models.loading.load import load_vocabulary_facts
from tests.unit.models.tiny import save_tiny_model

NAME, COMMIT = "org/tiny", "a" * 40


class Hub(ThreadingHTTPServer):
    """A hub with one model, that remembers what it was asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.folder, self.asked = folder, list[str]()


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *given: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        self.answer(None)

    def answer(self, body: bytes | None) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        files, place = sorted(self.server.folder.iterdir()), self.path.partition("?")[0]
        made: Any = None
        if place.startswith(f"/{NAME}/resolve/"):
            made = (self.server.folder / Path(place).name).read_bytes()
        elif place.startswith(f"/api/models/{NAME}/revision/"):
            made = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": path.name} for path in files]}
        elif place.startswith(f"/api/models/{NAME}/tree/"):
            made = [{"type": "file", "path": path.name, "size": path.stat().st_size, "oid": COMMIT} for path in files]
        if made is None:
            self.send_error(404)
            return
        made = made if isinstance(made, bytes) else json.dumps(made).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(made)))
        self.send_header("ETag", f'"{hashlib.sha256(made).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        self.wfile.write(made if body is None else body)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that is asked instead of the real one, with an empty cache."""
    registry._snapshot.cache_clear()
    with Hub(save_tiny_model(tmp_path / "model")) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        own = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", own)
        files = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", own + "".join(files[1:]))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield server
        server.shutdown()
    registry._snapshot.cache_clear()


def test_the_hub_is_asked_once_for_each_file_and_not_at_all_for_weights_that_are_not_read(hub: Hub) -> None:
    """Guards against a request for each file at each of config, tokenizer and weights, and against gigabytes that are
    downloaded for a tokenizer."""
    facts = load_vocabulary_facts(NAME)
    assert facts[1] == 264
    assert not [line for line in hub.asked if "safetensors" in line]
    model = outpace.load(NAME, "plain", dtype="float32", device="cpu")
    for verb in ("HEAD", "GET"):
        files = [line for line in hub.asked if line.startswith(f"{verb} /{NAME}/resolve/")]
        assert len(files) == len(set(files)) == len(list(hub.folder.iterdir()))
    same = outpace.load(hub.folder, "plain", dtype="float32", device="cpu")
    answers = [one.generate([5, 9, 7], max_new_tokens=8).token_ids for one in (model, same)]
    assert answers[0] == answers[1]


def test_without_a_connection_what_was_downloaded_loads_at_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against 70 seconds of retries for files of a tokenizer that no model has."""
    outpace.load(NAME, "plain", dtype="float32", device="cpu")
    registry._snapshot.cache_clear()
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert outpace.load(NAME, "plain", dtype="float32", device="cpu").generate([5, 9, 7], max_new_tokens=2).token_ids
    assert not waits
