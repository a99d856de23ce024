"""A server over real sockets that speaks the OpenAI API as far as a test wants it to, faults included."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}


@dataclass(frozen=True)
class Reply:
    """What a server says. `pieces`: of the body, each written by itself; objects become JSON."""

    pieces: Sequence[Any]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    breaks_off: bool = False
    gate: Event | None = None


Answer = Callable[[str, dict[str, Any]], Reply]


@dataclass
class Seen:
    """What a server saw: requests in their order, keys, and whether a client went away."""

    url: str
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    gone: Event = field(default_factory=Event)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Of the requests for answers."""
        return [body for _, body in self.requests if body]


@contextmanager
def serving(answer: Answer) -> Iterator[Seen]:
    """A server that says what `answer` makes of a path and a body, empty for GET. /v1/models is answered here."""
    lock = Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._serve({})

        def do_POST(self) -> None:
            self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _serve(self, body: dict[str, Any]) -> None:
            with lock:
                seen.requests.append((self.path, body))
                seen.keys.append(self.headers["Authorization"])
            try:
                self._write(Reply([MODELS]) if self.path == "/v1/models" else answer(self.path, body))
            except (BrokenPipeError, ConnectionResetError):
                seen.gone.set()
                self.close_connection = True

        def _write(self, reply: Reply) -> None:
            self.send_response(reply.status)
            for name, value in {"Content-Type": "application/json", **reply.headers}.items():
                self.send_header(name, value)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number, piece in enumerate(reply.pieces, start=1):
                if number == 3 and reply.gate is not None:
                    while not reply.gate.wait(0.01):  # write on, to notice that nobody reads any more
                        self._chunk(b": still there\n\n")
                self._chunk(piece if isinstance(piece, bytes) else json.dumps(piece).encode())
            if reply.breaks_off:
                self.close_connection = True
            else:
                self._chunk(b"")

        def _chunk(self, content: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
            self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # clients may leave
                super().handle_error(request, client_address)

    server = Quiet(("127.0.0.1", 0), Handler)
    seen = Seen(f"http://127.0.0.1:{server.server_port}/v1")
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def event(chunk: Any) -> bytes:
    """A server-sent event."""
    return f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


def streamed(
    texts: Sequence[str], is_chat: bool = True, report: Any = None, has_usage: bool = True, **options: Any
) -> Reply:
    """A stream of pieces as ours and vLLM's: role, pieces, finish reason, usage, [DONE]."""

    def choice(text: str, reason: str | None = None) -> dict[str, Any]:
        said = {"delta": {"content": text} if text else {}} if is_chat else {"text": text}
        return {"choices": [{"index": 0, "finish_reason": reason, **said}]}

    chunks: list[Any] = [choice(""), *map(choice, texts), choice("", "stop")]
    if report is not None:
        chunks[-1]["choices"][0]["outpace"] = report
    if has_usage:
        usage = {"prompt_tokens": 7, "completion_tokens": len(texts), "total_tokens": 7 + len(texts)}
        chunks.append({"choices": [], "usage": usage})
    return Reply([*map(event, chunks), event("[DONE]")], headers={"Content-Type": "text/event-stream"}, **options)
