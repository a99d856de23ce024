"""Who may come in, how many, for how long: keys, queue, timeouts, clients that leave or do not read, the drain."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from outpace.api import Model
from outpace.lib.errors import InvalidRequest
from outpace.lib.stages import advance, loading
from outpace.serve.engine_thread import EngineThread
from outpace.serve.errors import ApiError
from outpace.serve.prepare import _entries, parsed
from outpace.serve.requests import ChatRequest, CompletionRequest
from outpace.serve.run import DrainingServer, serve
from outpace.serve.service import Service
from outpace.serve.settings import ServeSettings
from tests.unit.serve.served import NAME, Lines, Served, serving, tiny_model
from tests.unit.serve.test_refusals import CHAT, COMPLETION, error_of

LONG = CHAT | {"max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("tiny"), slots=2)


def wait_until(is_so: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)


HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
"""A request whose body is not complete."""


def connect(one: Served, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(one.url.rpartition(":")[2])))
    connection.sendall(data)
    return connection


def raw(one: Served, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request and reads nothing."""
    data = json.dumps(body).encode()
    connection = connect(one)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_keys(model: Model) -> None:
    """Guards against requests without a key, with another, or with one that is no text."""
    with serving(model, api_keys=("sesame", "open")) as one:
        assert error_of(one.post(CHAT), 401)["code"] == "invalid_api_key"
        for wrong in ("Bearer ses", "sesame", b"Bearer \xff"):
            assert error_of(one.post(CHAT, headers={"Authorization": wrong}), 401)["code"] == "invalid_api_key"
        paths = ("/v1/models", "/health", "/ready", "/metrics")
        assert [one.get(path).status_code for path in paths] == [401, 200, 200, 200]
        for key in ("sesame", "open"):
            with one.client(api_key=key) as client:
                assert client.models.list().data[0].id == NAME


@pytest.mark.parametrize(("key", "said"), [(" ", "an empty key"), ("ключ", "other than ASCII")])
def test_empty_keys_and_keys_that_cannot_be_sent_are_refused(key: str, said: str) -> None:
    """Guards against a server that an empty variable opens to everybody, and one that answers to no client."""
    with pytest.raises(InvalidRequest, match=said):
        ServeSettings((NAME,), api_keys=(key,))


def test_an_empty_name_is_refused() -> None:
    """Guards against a server whose model, after an empty variable, has a name that no client sends."""
    with pytest.raises(InvalidRequest, match="served_model_name=''"):
        ServeSettings((NAME, ""))


def test_answers_name_the_first_of_several_names(model: Model) -> None:
    """Guards against answers that name what was asked for, which --help and vLLM do otherwise."""
    with serving(model, names=("first", "second")) as one:
        assert one.post(CHAT | {"model": "second"}).json()["model"] == "first"


def test_bodies_have_a_limit(model: Model) -> None:
    """Guards against a body that fills the memory, announced or in pieces without end."""
    with serving(model, max_body=10_000) as one:
        big = CHAT | {"user": "x" * 20_000}
        assert error_of(one.post(big), 413)["code"] == "body_too_large"

        def pieces() -> Iterator[bytes]:
            for _ in range(20):
                yield b" " * 1000

        assert error_of(one.post(path="/v1/completions", content=pieces()), 413)["code"] == "body_too_large"
        assert one.post(CHAT).status_code == 200


def test_a_full_queue_says_when_to_come_again(model: Model) -> None:
    """Guards against a queue without end, and against places that are not given back."""
    with serving(model, max_queue=1) as one, ThreadPoolExecutor(3) as pool:
        running = [pool.submit(one.post, LONG | {"max_tokens": 500}) for _ in range(3)]
        wait_until(lambda: one.service.occupancy()[:2] == (2, 1))
        response = one.post(CHAT)
        assert error_of(response, 429)["code"] == "queue_full"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        for answer in running:
            assert answer.result().status_code == 200
        assert error_of(one.post(CHAT | {"n": 4}))["param"] == "n", "it could never be admitted"
        assert error_of(one.post(COMPLETION | {"prompt": ["a"] * 4}, "/v1/completions"))["param"] == "prompt"
        assert one.post(CHAT).status_code == 200
        one.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(model: Model, stream: bool) -> None:
    """Guards against answers that go on for nobody, streamed or not, decoded or waiting."""
    with serving(model) as one:
        connections = [raw(one, LONG | {"stream": stream}) for _ in range(4)]
        wait_until(lambda: one.service.occupancy()[:2] == (2, 2))
        for connection in connections:
            connection.close()
        one.assert_idle(3)
        wait_until(lambda: one.metric("request_success_total", finished_reason="abort") == 4)


def test_a_client_that_does_not_read_delays_no_other(model: Model) -> None:
    """Guards against an engine that waits for a socket: the answer ends, and in the end so does the connection."""
    with serving(model, send_timeout=1.0) as one:
        body = LONG | {"stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 400}
        listening = one.server.servers[0].sockets[0]
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # the system would buffer megabytes
        connections = [raw(one, body) for _ in range(2)]
        wait_until(lambda: one.service.occupancy()[0] == 2)
        assert one.chat().choices[0].message.content
        one.assert_idle(20)
        assert [line["error"] for line in one.log.lines if "error" in line] == ["the client did not read for 1 s"] * 2
        wait_until(lambda: not one.server.server_state.connections)
        for connection in connections:
            connection.close()


def test_a_client_that_reads_slowly_gets_the_whole_answer(model: Model) -> None:
    """Guards against an answer in one piece that is cut off while its client is reading it."""
    body = LONG | {"logprobs": True, "top_logprobs": 20, "max_tokens": 90}  # which take 3 s to read
    with serving(model, send_timeout=0.5) as one:
        one.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        with raw(one, body) as connection:
            connection.settimeout(20)
            head, _, got = connection.recv(8000).partition(b"\r\n\r\n")
            (length,) = map(int, re.findall(rb"content-length: (\d+)", head.lower()))
            while len(got) < length:
                piece = connection.recv(8000)
                assert piece, f"cut off after {len(got)} of {length} bytes"
                got += piece
                time.sleep(0.05)


def test_a_request_for_another_protocol_does_not_end_the_server(model: Model) -> None:
    """Guards against one request, before any key is read, whose connection ends the server."""
    head = b"POST /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 0\r\n\r\n"
    with serving(model) as one, connect(one, head) as connection:
        connection.settimeout(5)
        assert connection.recv(1000).startswith(b"HTTP/1.1 4")
        time.sleep(1.3)  # all connections are looked at once a second
        assert one.get("/health").status_code == 200


def test_connections_stay_open_between_requests(model: Model) -> None:
    """Guards against uvicorn's 5 seconds, when openai's client may send a request into a closing connection."""
    with serving(model, send_timeout=7.5) as one:
        assert one.server.config.timeout_keep_alive == 8


def test_an_address_that_cannot_be_had_is_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a start that loads gigabytes and then cannot listen, for others have the port or the address, and
    against "Unknown error", which C libraries of Windows call all that sockets meet."""
    monkeypatch.setattr("os.strerror", lambda number: "Unknown error")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, port, said in (
            ("127.0.0.1", taken.getsockname()[1], r"port=\d+: (Address already in use|Only one usage .*); choose"),
            ("203.0.113.1", 0, r"host='203\.0\.113\.1': .+; give an address of this machine"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                serve(lambda: pytest.fail("was loaded"), ServeSettings((NAME,), host=host, port=port))


def test_a_request_that_takes_too_long(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against requests that hold a slot for ever, and a time limit that begins after prompts were encoded."""

    async def slowly(work: Any) -> Any:
        await asyncio.sleep(30)

    with serving(model, timeout=0.3) as one:
        late = error_of(one.post(LONG), 504)
        assert late["type"] == "timeout_error"
        assert "shorten the prompt" in late["message"], "a long prompt alone may take as long"
        with pytest.raises(openai.APIError, match="took longer"):
            one.chat(max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
        one.assert_idle()
        monkeypatch.setattr(one.service, "in_thread", slowly)
        assert error_of(one.post(CHAT), 504)["type"] == "timeout_error"
        one.assert_idle()


def test_a_prompts_time_is_not_the_queues(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a dashboard on which writing prompts looks like waiting for a slot."""
    usual = model.target.run_pass

    def slowly(chunks: Any, *trees: Any) -> Any:
        time.sleep(0.5 if chunks else 0)
        return usual(chunks, *trees)

    with serving(model) as one, monkeypatch.context() as patch:
        patch.setattr(model.target, "run_pass", slowly)
        assert one.chat(max_tokens=2).choices[0].message.content
        one.assert_idle()
        phases = [f"request_{phase}_time_seconds_sum" for phase in ("queue", "prefill", "inference")]
        queue, prefill, inference = (one.metric(phase) or 0.0 for phase in phases)
    assert queue < 0.5 <= prefill <= inference


def test_a_body_that_does_not_come(model: Model) -> None:
    """Guards against clients that open a request and say no more."""
    with serving(model, send_timeout=0.3) as one, connect(one, HALF) as connection:
        connection.settimeout(5)
        assert b" 408 " in connection.recv(1000).split(b"\r\n")[0]


def test_a_drain_finishes_what_runs_and_turns_others_away(model: Model) -> None:
    """Guards against answers that SIGTERM cuts short, and requests that are taken in meanwhile."""
    with serving(model, drain_timeout=30) as one, ThreadPoolExecutor(2) as pool:
        traced = {"stream": True, "outpace": {"trace": True}}
        running = [pool.submit(one.post, LONG | {"max_tokens": 300} | more) for more in ({}, traced)]
        wait_until(lambda: one.service.occupancy()[0] == 2)
        one.server.handle_exit(signal.SIGTERM, None)
        with one.http as http:
            assert http.get("/ready").status_code == 503
            assert error_of(http.post("/v1/chat/completions", json=CHAT), 503)["code"] == "unavailable"
            assert http.get("/health").status_code == 200
        assert running[0].result().json()["usage"]["completion_tokens"] == 300
        events = running[1].result().text
        assert events.count('"finish_reason":"length"') == 1
        assert '"error"' not in events
        wait_until(lambda: one.server.should_exit)


def test_a_second_signal_ends_at_once(model: Model) -> None:
    """Guards against an operator whose second Ctrl-C is ignored until the drain is over."""
    with serving(model, drain_timeout=30) as one, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(one.post, LONG)
        wait_until(lambda: one.service.occupancy()[0] == 1)
        for ends in (False, True):
            one.server.handle_exit(signal.SIGINT, None)
            assert (one.server.should_exit, one.server.force_exit) == (ends, ends)
        with contextlib.suppress(httpx.HTTPError):
            answer.result()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_has_lost_its_engine_says_so(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a dead server that a supervisor keeps alive, and requests that hang."""
    with serving(model, timeout=1.0) as one:
        with monkeypatch.context() as patch:
            patch.setattr(EngineThread, "_news_of", None)
            assert error_of(one.post(CHAT), 504)["code"] == "timeout"
        wait_until(lambda: not one.service.is_healthy)
        assert [one.get(path).status_code for path in ("/health", "/ready")] == [503, 503]
        assert "lost its engine" in error_of(one.post(CHAT), 503)["message"]
        for session in model.engine._roster.unfinished():  # the model serves other tests
            model.engine.cancel(session)


def test_a_drain_has_an_end(model: Model) -> None:
    """Guards against a server that cannot be stopped: what takes longer gets an error, not silence."""
    with serving(model, drain_timeout=0.2) as one, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(one.post, LONG)
        streamed = pool.submit(one.post, LONG | {"stream": True})
        wait_until(lambda: one.service.occupancy()[0] == 2)
        one.server.handle_exit(signal.SIGTERM, None)
        assert error_of(whole.result(), 503)["code"] == "unavailable"
        assert whole.result().headers["Retry-After"] == "5"
        last = streamed.result().text.strip().split("\n\n")[-2:]
        assert json.loads(last[0].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert last[1] == "data: [DONE]"


def test_ids_logs_and_prompts(model: Model) -> None:
    """Guards against a chosen port or requests that the log does not show, prompts that are there unasked, and logged
    bodies that cannot be sent again."""
    secret = CHAT | {"messages": [{"role": "user", "content": "my secret"}]}
    with serving(model) as one:
        assert [line["url"] for line in one.log.lines if line["event"] == "listening"] == [one.url]
        assert one.post(secret, headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
        assert one.post(secret, headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"
        one.post(CHAT | {"messages": [{"role": "user", "content": ["my secret"]}]})
        one.post(CHAT | {"messages": "my secret"})
        wait_until(lambda: sum(line["event"] == "request" for line in one.log.lines) == 4)
        (line,) = [line for line in one.log.lines if line.get("request_id") == "abc-1"]
        assert (line["path"], line["status"]) == ("/v1/chat/completions", 200)
        assert "secret" not in str(one.log.lines)
    with serving(model, log_prompts=True) as one:
        one.post(secret | {"structured_outputs": {"json": {"type": "object"}}})
        wait_until(lambda: "my secret" in str(one.log.lines))
        assert "'structured_outputs': {'json': {'type': 'object'}}" in str(one.log.lines)


def test_metrics_count_what_was_answered(model: Model) -> None:
    """Guards against dashboards for vLLM that find no figures, or wrong ones."""
    with serving(model) as one:
        told = one.chat("hello hello", max_tokens=30, extra_body={"outpace": {"report": True, "method": "recycle"}})
        one.assert_idle()
        value, report = one.metric, told.choices[0].outpace
        assert value("generation_tokens_total") == 30
        assert value("prompt_tokens_total") == told.usage.prompt_tokens
        assert value("request_success_total", finished_reason="length") == 1
        assert value("spec_decode_num_draft_tokens_total") == report["drafted"]
        assert value("spec_decode_num_accepted_tokens_total") == report["accepted"]
        assert value("spec_decode_num_accepted_tokens_per_pos_total", position="0") == report["accepted_per_depth"][0]
        for histogram, count in (
            ("time_to_first_token_seconds", 1), ("inter_token_latency_seconds", 29), ("e2e_request_latency_seconds", 1),
            ("request_queue_time_seconds", 1), ("request_prefill_time_seconds", 1),
        ):  # fmt: skip
            assert value(f"{histogram}_count") == count, histogram
        page = one.get("/metrics")
        assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in page.text
        assert "vllm:prefix_cache_queries_total" in page.text


def test_usage_is_of_the_memory_there_is(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a cache that looks half empty while requests wait for memory: slots may share less than their
    longest requests need."""
    with serving(model) as one:
        monkeypatch.setattr(EngineThread, "sessions", lambda self: [SimpleNamespace(slot=0, written=1024)])
        monkeypatch.setattr(model.target.kv, "budget", None)
        assert one.service.occupancy() == (1, 0, 1024 / (2 * model.target.max_length))
        monkeypatch.setattr(model.target.kv, "budget", 4096)
        assert one.service.occupancy() == (1, 0, 0.25)
        monkeypatch.undo()


def test_answers_of_every_method_are_plains_with_cancels_going_on(model: Model) -> None:
    """Guards against a method that says something else in company, or when its neighbours are cut short."""
    methods = ("outpace:draft=none", "recycle", "lookup", "lookahead", "samd", "linear:budget=3")
    asked = [(method, temperature, index) for method in methods for index, temperature in enumerate((0.0, 1.0))]
    known = []
    for index, temperature in enumerate((0.0, 1.0)):
        options: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": index, "method": "plain"}
        known.append(model.generate(f"go {index} go {index}", **options).text)

    with serving(model) as one:

        def ask(method: str, temperature: float, index: int) -> Any:
            body = {"model": NAME, "prompt": f"go {index} go {index}", "temperature": temperature, "seed": index}
            answer = one.post(body | {"max_tokens": 24, "outpace": {"method": method}}, "/v1/completions")
            return answer.json()["choices"][0]["text"]

        def leave(index: int) -> None:
            with one.client(_strict_response_validation=False) as client:
                stream = client.completions.create(model=NAME, prompt="x" * index, max_tokens=500, stream=True)
                next(stream)
                stream.close()

        for concurrency in (1, 16):
            with ThreadPoolExecutor(8) as leavers, ThreadPoolExecutor(concurrency) as pool:
                leaving = leavers.map(leave, range(1, 9))
                answers = list(pool.map(lambda case: ask(*case), asked))
                assert list(leaving) == [None] * 8
            assert answers == known * len(methods)
        one.assert_idle()


def test_loading_and_a_model_that_cannot_be_loaded(model: Model) -> None:
    """Guards against a server that says it is ready before it is, or stays up without a model."""
    may_go_on = threading.Event()

    def load() -> Model:
        may_go_on.wait(10)
        raise failure

    failure = RuntimeError("no such model")
    service = Service(ServeSettings((NAME,), port=0), Lines())
    server = DrainingServer(service, load)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    one = Served(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", model, service, server, Lines())
    assert [one.get(path).status_code for path in ("/health", "/ready", "/v1/models")] == [200, 503, 503]
    assert "loading" in error_of(one.post(CHAT), 503)["message"]
    may_go_on.set()
    thread.join(10)
    assert not thread.is_alive()
    assert service.load_error is failure


def test_a_signal_ends_a_load() -> None:
    """Guards against a server that loads on for minutes after SIGTERM, until its supervisor kills it."""

    def load() -> Model:
        with loading(NAME, is_shown=False):
            for _ in range(3000):
                time.sleep(0.01)
                advance()
        raise RuntimeError("it was not ended")

    server = DrainingServer(Service(ServeSettings((NAME,), port=0), Lines()), load)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    server.handle_exit(signal.SIGTERM, None)
    thread.join(10)
    assert not thread.is_alive()


def test_connections_that_say_nothing_are_dropped(model: Model) -> None:
    """Guards against clients that open connections by the thousand and never ask."""
    with serving(model, send_timeout=0.5) as one:
        silent = [connect(one) for _ in range(30)]
        for connection in silent[::2]:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-A: ")
        assert one.post(CHAT).status_code == 200
        wait_until(lambda: len(one.server.server_state.connections) <= 1)
        for connection in silent:
            connection.close()
        assert one.post(CHAT | {"max_tokens": 300, "stream": True}).text.endswith("data: [DONE]\n\n")


def test_a_connection_of_many_short_requests_is_kept(model: Model) -> None:
    """Guards against connections that count as idle because no request is open at the moments of two looks."""
    with serving(model, send_timeout=0.5) as one, one.http as http:
        assert http.get("/health").status_code == 200
        before = set(one.server.server_state.connections)
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            assert http.get("/health").status_code == 200
            time.sleep(0.05)
        assert one.server.server_state.connections == before


def test_too_many_connections_make_room(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that runs out of file descriptors."""
    monkeypatch.setattr("outpace.serve.run.MOST_CONNECTIONS", 10)
    with serving(model) as one, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(one.post, LONG | {"max_tokens": 1500})
        wait_until(lambda: one.service.occupancy()[0] == 1)
        silent = [connect(one) for _ in range(40)]
        wait_until(lambda: len(one.server.server_state.connections) > 10)
        wait_until(lambda: len(one.server.server_state.connections) <= 10)
        assert answer.result().status_code == 200
        for connection in silent:
            connection.close()


def test_a_body_that_comes_by_the_byte(model: Model) -> None:
    """Guards against clients that hold a connection for ever by sending a little now and then."""
    with serving(model, send_timeout=5, timeout=0.6) as one, connect(one, HALF) as connection:
        connection.settimeout(0.1)
        answer = b""
        until = time.monotonic() + 20
        while not answer and time.monotonic() < until:
            connection.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(1000)
        assert b" 408 " in answer.split(b"\r\n")[0]
        connection.settimeout(10)
        while b"whole within 0.6 s" not in answer:
            piece = connection.recv(1000)
            assert piece, answer
            answer += piece


def test_a_client_that_leaves_in_its_body_is_no_fault(model: Model) -> None:
    """Guards against a traceback in the log for whoever hangs up, and a place that is not given back."""
    with serving(model) as one:
        connect(one, HALF).close()
        wait_until(lambda: any(line["event"] == "request" for line in one.log.lines))
        assert [line["event"] for line in one.log.lines if line["event"] == "unforeseen"] == []
        assert [line.get("error") for line in one.log.lines if line["event"] == "request"] == ["the client went away"]
        one.assert_idle()


def test_what_cannot_fit_is_refused_before_it_is_encoded(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against megabytes of text that are encoded, for seconds, while all others wait to come in."""
    with serving(model) as one:
        monkeypatch.setattr(model.codec, "render_chat", None)
        monkeypatch.setattr(model.codec, "encode", None)
        text, chats = "x" * 1_000_000, "/v1/chat/completions"
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
        for body, path in (
            (CHAT | {"messages": [{"role": "user", "content": text}]}, chats),
            ({"model": NAME, "prompt": ["a", text]}, "/v1/completions"),
            (CHAT | {"messages": [CHAT["messages"][0], {"role": "assistant", "tool_calls": [call]}]}, chats),
        ):
            error = error_of(one.post(body, path))
            assert error["code"] == "context_length_exceeded"
            assert "1,000,0" in error["message"]


def test_bodies_that_wait_to_be_understood_are_counted(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against thousands of bodies in memory while one takes long to be encoded."""
    may_go_on = threading.Event()
    encode = model.codec.encode_rendered

    def slow(text: str) -> list[int]:
        may_go_on.wait(20)
        return encode(text)

    monkeypatch.setattr(model.codec, "encode_rendered", slow)
    with serving(model, max_queue=1) as one, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(one.post, CHAT) for _ in range(3)]
        wait_until(lambda: one.service._bodies == 3)
        error = error_of(one.post(CHAT), 429)
        assert (error["code"], error["message"][:9]) == ("queue_full", "3 samples"), "not 0, for a limit of 3"
        may_go_on.set()
        assert [answer.result().status_code for answer in waiting] == [200] * 3
        assert one.service._bodies == 0


PROMPT = b'{"model": "tiny", "prompt": '
NONSENSE = {
    "numbers": PROMPT + b"[" + b"7," * 2_000_000 + b"7]}",
    "words": PROMPT + b"[" + b'"",' * 1_300_000 + b'""]}',
    "lists": PROMPT + b"[" + b"[]," * 1_300_000 + b"[]]}",
    "escapes": PROMPT + b'"' + rb"\u4e00" * 690_000 + b'"}',
    "text": PROMPT + b'"' + b'\\"x, ' * 830_000 + b'"}',
}
"""Bodies of 4 MB."""


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_does_not_hold_the_event_loop(model: Model, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Guards against bodies of 4 MB that are parsed, or complained about, in the event loop: for lists it stood still
    for 5 s each. What takes long is in another thread, and short enough not to keep the interpreter from the loop.

    The loop's own longest pause is measured, by a task that asks to be woken every 5 ms. It is 0.02 to 0.1 s, which a
    busy machine makes longer; the bound of 1 s lets it be ten times as long, in one of three rounds.
    """
    threads = set()

    def watched(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        return parsed(*arguments)

    async def longest_pause(work: Future[Any]) -> float:
        loop, longest = asyncio.get_running_loop(), 0.0
        while not work.done():
            before = loop.time()
            await asyncio.sleep(0.005)
            longest = max(longest, loop.time() - before)
        return longest

    monkeypatch.setattr("outpace.serve.prepare.parsed", watched)
    with serving(model) as one, ThreadPoolExecutor(4) as pool:
        loop = one.server._loop
        assert loop is not None
        pauses = list[float]()
        while len(pauses) < 3 and min(pauses, default=1) >= 1:
            posts = [pool.submit(one.post, path="/v1/completions", content=NONSENSE[kind]) for _ in range(2)]
            pauses.append(asyncio.run_coroutine_threadsafe(longest_pause(posts[0]), loop).result(60))
            assert {error_of(post.result())["code"] for post in posts} <= {"body_too_large", "context_length_exceeded"}
        assert {name.rpartition("_")[0] for name in threads} == {"prepare"}
    assert min(pauses) < 1, pauses


@pytest.mark.parametrize("kind", ["numbers", "lists", "messages", "calls", "objects", "fields"])
def test_bodies_within_the_bound_have_few_complaints(kind: str) -> None:
    """Guards against a complaint for each entry of a list, which took pydantic 1 to 3 us each and 200 bytes."""
    body: dict[str, Any] = {
        "numbers": COMPLETION | {"prompt": [-1] * 30_000},
        "lists": COMPLETION | {"prompt": [[]] * 15_000},
        "objects": COMPLETION | {"prompt": [{}] * 15_000},
        "messages": CHAT | {"messages": [{}] * 9_000},
        "calls": CHAT | {"messages": [{"role": "assistant", "tool_calls": [{}] * 15_000}]},
        "fields": CHAT | {"messages": [{"role": "user", "content": "a", "name": [0] * 30_000}]},
    }[kind]
    with pytest.raises(ValidationError) as raised:
        (ChatRequest if "messages" in body else CompletionRequest).model_validate_json(json.dumps(body))
    assert raised.value.error_count() < 300


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (r'{"a": "x, [y: {", "b": [1, 2]}', 6),  # two colons, two commas, two brackets
        (r'{"a": "\\", "b": [1]}', 5),
        (r'{"a": "\\\", [", "b": 1}', 4),
        (r'{"a\"": "\\\\", "\u005c": "\"[\""}', 4),
        ('{"a": "é, ü", "b": []}', 5),
    ],
)
def test_entries_are_counted_outside_strings(text: str, entries: int) -> None:
    """Guards against prose and code whose commas and brackets are taken for a body's."""
    json.loads(text)
    assert _entries(text.encode()) == entries


def test_a_body_of_too_many_entries_says_how_many(model: Model) -> None:
    """Guards against ids of several prompts that are refused without a remedy."""
    with serving(model) as one:
        error = error_of(one.post(COMPLETION | {"prompt": [7] * 40_000}, "/v1/completions"))
        assert re.search(r"40,00\d list entries and fields, and this server reads 36,864: send fewer", error["message"])
        body = COMPLETION | {"prompt": [[7, 8] * 2000] * 8, "max_tokens": 1}
        assert error_of(one.post(COMPLETION | {"prompt": [7] * 36_000}, "/v1/completions"))["param"] == "prompt"
        assert one.post(body, "/v1/completions").status_code == 200
    many = json.dumps(CHAT | {"messages": CHAT["messages"] * 10_001}).encode()
    with pytest.raises(ApiError, match="messages="):
        parsed(ChatRequest, many, 1 << 20)
