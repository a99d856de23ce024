"""A server in a thread of the test's process, on a tiny model, at a free port."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

import outpace
from outpace.api import Model
from outpace.serve.run import DrainingServer
from outpace.serve.service import Service
from outpace.serve.settings import ServeSettings
from tests.unit.models.tiny import save_tiny_model

NAME = "tiny"
HERMES = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }} {% endfor %}"
    "Call within <tool_call></tool_call>.\n{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template with tools, in the form that Qwen's has."""


class Lines:
    """A log that is kept."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def info(self, event: str, **told: Any) -> None:
        self.lines.append({"event": event, **told})

    error = info


@dataclass
class Served:
    """What a test has of a running server."""

    url: str
    model: Model
    service: Service
    server: DrainingServer
    log: Lines

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def client(self, **options: Any) -> openai.OpenAI:
        given: dict[str, Any] = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)

    def chat(self, text: str = "Hi", **options: Any) -> Any:
        """An answer by the openai package, by default greedy and of 12 tokens. Of a stream, its chunks."""
        given: dict[str, Any] = {"temperature": 0, "max_tokens": 12} | options
        with self.client() as client:
            said: Any = client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": text}], **given
            )
            return list(said) if given.get("stream") else said

    def post(self, body: Any = None, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
        with self.http as http:
            return http.post(path, json=body, **options) if body is not None else http.post(path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.http as http:
            return http.get(path, **options)

    def metric(self, name: str, **labels: str) -> float | None:
        """A figure of vLLM's name, as `/metrics` would say it."""
        labels = {"model_name": NAME, "engine": "0"} | labels
        return self.service.metrics.registry.get_sample_value(f"vllm:{name}", labels)

    def assert_idle(self, seconds: float = 10) -> None:
        """Nothing runs and every slot is free, soon."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not (self.service.is_idle and self.model.engine.is_idle):
            time.sleep(0.01)
        assert self.service.is_idle
        assert self.model.engine.is_idle
        assert self.service.occupancy()[:2] == (0, 0)


def tiny_model(folder: Path, slots: int = 4, **changes: Any) -> Model:
    """Greedy answers of it are nonsense, and long."""
    save_tiny_model(folder, **({"max_position_embeddings": 4096} | changes))
    model = outpace.load(str(folder), "outpace:draft=none", dtype="float32", device="cpu", max_num_seqs=slots)
    model.codec.tokenizer.chat_template = HERMES
    return model


@contextmanager
def serving(model: Model, **settings: Any) -> Iterator[Served]:
    """A server on a model, drained and ended behind the block."""
    log = Lines()
    service = Service(ServeSettings(settings.pop("names", (NAME,)), port=0, **settings), log)
    server = DrainingServer(service, lambda: model)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until = time.monotonic() + 30
        while not (server.started and service.is_ready) and thread.is_alive():
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Served(f"http://127.0.0.1:{port}", model, service, server, log)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive(), "the server did not end"
