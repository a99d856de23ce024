"""A server that behaves like the hub: metadata of files, redirects to storage, ranges, the listing of a repository."""

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

COMMIT = "a" * 40
STORAGE = "/storage"  # large files are redirected there, as to a content delivery network


class Hub(ThreadingHTTPServer):
    """Serves the repositories below a folder, at folder/OWNER/NAME. A GGUF file counts as large.

    Attributes:
        asked: a line "METHOD path range" for each request.
        cut: bytes of a large file after which a connection breaks.
        breaks: how many of the next connections break.
        goes_down: whether the server answers no more (`is_down`) after the last of these.
        damages: whether the last byte of large files is changed on the way.
        waits: the connection does not break, but stays silent until this is set.
        is_gated: files are for those alone who are known, and nobody is.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.folder, self.asked = folder, list[str]()
        self.cut = self.breaks = 0
        self.goes_down = self.is_down = self.ignores_ranges = self.damages = self.is_gated = False
        self.waits = Event()
        self.waits.set()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.storage = f"http://localhost:{self.server_port}{STORAGE}"  # on another host

    def __enter__(self) -> "Hub":
        Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def ranges(self) -> list[str]:
        """The ranges asked of large files, "" for all of one."""
        return [line.split(" ")[2] for line in self.asked if line.startswith(f"GET {STORAGE}")]


def asked_instead(hub: Hub, patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Ask this hub instead of the real one, with a cache of its own, as HF_ENDPOINT and HF_HUB_CACHE do at import."""
    patch.setattr(constants, "ENDPOINT", hub.url)
    pattern = constants.HUGGINGFACE_CO_URL_TEMPLATE
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + pattern[pattern.index("/{repo_id}") :])
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))


class _Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        place = unquote(self.path.partition("?")[0])
        self.server.asked.append(f"{self.command} {place} {self.headers.get('Range', '')}")
        kind, _, rest = place.removeprefix("/").partition("/")
        if kind == "api":
            self._answer_api(rest)
        elif place.startswith(f"{STORAGE}/"):
            self._send_content(self.server.folder / rest)
        elif "/resolve/" in place:
            repository, _, file = place.strip("/").partition("/resolve/")
            self._answer_file(self.server.folder / repository / file.partition("/")[2])
        else:
            self._send_content(self.server.folder / place.strip("/"))

    def _answer_api(self, place: str) -> None:
        owner, _, name = place.removeprefix("models/").partition("/")
        name = name.partition("/")[0]
        folder = self.server.folder / owner / (name or "none")  # the client also asks for what is no model
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
        if not files:
            self._refuse(404, {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in place:
            sizes = [path.stat().st_size for path in files]
            entries = [{"type": "file", "path": one, "size": size, "oid": COMMIT} for one, size in zip(names, sizes)]
            self._send(json.dumps(entries).encode(), {})
        else:
            about = {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": [{"rfilename": one} for one in names]}
            self._send(json.dumps(about).encode(), {})

    def _answer_file(self, path: Path) -> None:
        if self.server.is_gated:
            self._refuse(401, {"X-Error-Code": "GatedRepo"})
            return
        if not path.is_file():
            self._refuse(404, {"X-Error-Code": "EntryNotFound"})
            return
        content = path.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{sha256}"'}
        if path.suffix.lower() == ".gguf":
            headers |= {"ETag": f'"{COMMIT}"', "X-Linked-ETag": f'"{sha256}"', "X-Linked-Size": str(len(content))}
            headers["Location"] = f"{self.server.storage}/{path.relative_to(self.server.folder).as_posix()}"
            self._refuse(302, headers)
        else:
            self._send(content, headers)

    def _send_content(self, path: Path) -> None:
        """A file, or the range that is asked for; cut off as the server is set to."""
        hub = self.server
        if not path.is_file() or hub.is_down:
            self._refuse(503 if hub.is_down else 404, {})
            return
        content, status, headers = path.read_bytes(), 200, {"Accept-Ranges": "bytes"}
        if hub.damages:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if (asked := self.headers.get("Range")) and not hub.ignores_ranges:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            if start >= len(content):
                self._refuse(416, {"Content-Range": f"bytes */{len(content)}"})
                return
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content, status = content[start:], 206
        sent = None
        if hub.breaks:
            sent, hub.breaks = hub.cut, hub.breaks - 1
            hub.is_down = hub.goes_down and not hub.breaks
        self._send(content, headers, status, sent)

    def _refuse(self, status: int, headers: dict[str, str]) -> None:
        self._send(b"", headers, status)

    def _send(self, body: bytes, headers: dict[str, str], status: int = 200, sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:sent])
            self.wfile.flush()
            self.server.waits.wait(60 if sent is not None else 0)
        self.close_connection = self.close_connection or sent is not None
