"""A client against servers over real sockets, well-behaved and otherwise."""

import re
import sys
from time import perf_counter, sleep
from typing import Any

import pytest

from outpace.core.params import SamplingParams
from outpace.endpoint import client
from outpace.endpoint.client import Endpoint, ServerAway, events
from outpace.endpoint.server import (
    DRAFTED,
    RemoteChat,
    Server,
    SpeculationCounts,
    find_server,
    read_counts,
    sampling_fields,
)
from outpace.lib.errors import InvalidRequest, ModelError
from tests.unit.endpoint.fake import Reply, event, serving, streamed

PATH = "chat/completions"
STREAM, PAGE_OF_TEXT = {"Content-Type": "text/event-stream"}, {"Content-Type": "text/html"}
ZIPPED = {"Content-Encoding": "gzip"}
HALF = streamed(["He"]).pieces[:2]


def _ask(url: str, **options: Any) -> str:
    with Endpoint(url, **options) as endpoint, endpoint.stream(PATH, {"messages": []}) as stream:
        return "|".join(stream)


def test_an_answer_comes_piece_by_piece_with_its_facts() -> None:
    """Guards against usage, finish reason or report that are lost in chunks without text."""
    with serving(lambda path, body: streamed(["He", "llo"], report={"steps": 1})) as seen, Endpoint(seen.url) as one:
        with one.stream(PATH, {"messages": []}) as stream:
            assert list(stream) == ["He", "llo"]
        assert (stream.text, stream.pieces, stream.finish_reason) == ("Hello", 2, "stop")
        assert stream.usage["completion_tokens"] == 2
        assert stream.report == {"steps": 1}
    assert seen.bodies[0]["stream_options"] == {"include_usage": True}


def test_thoughts_are_text_too() -> None:
    """Guards against a model that thinks for a minute and seems to have a first token only then."""
    chunks = [{"choices": [{"delta": {"reasoning_content": "Hm."}}]}, {"choices": [{"delta": {"content": "Yes"}}]}]
    end = {"choices": [{"delta": {"content": None}, "finish_reason": "stop"}]}
    with serving(lambda path, body: Reply([event(chunk) for chunk in [*chunks, end]], headers=STREAM)) as seen:
        assert _ask(seen.url) == "Hm.|Yes"


def test_a_chunk_may_end_thoughts_and_begin_the_answer() -> None:
    """Guards against text that is lost where a speculative step crosses from thoughts to the answer: which chunks do
    depends on the load, and equal answers would seem to differ."""
    said = {"reasoning": "Hm.", "reasoning_content": "Hm.", "content": "Yes"}  # vLLM's name and its old one
    chunk = {"choices": [{"delta": said, "finish_reason": "stop"}]}
    with serving(lambda path, body: Reply([event(chunk)], headers=STREAM)) as seen:
        assert _ask(seen.url) == "Hm.Yes"


def test_thoughts_are_not_a_part_of_the_conversation() -> None:
    """Guards against thoughts that are sent back as answers: they fill the context, and the model takes them for what
    it said."""
    deltas = [{"reasoning": "Hm."}, {"reasoning": "Well.", "content": "Ye"}, {"content": "s"}]
    chunks: list[Any] = [{"choices": [{"delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    reply = Reply([event(chunk) for chunk in chunks], headers=STREAM)
    with serving(lambda path, body: reply) as seen, Endpoint(seen.url) as endpoint:
        conversation = RemoteChat(endpoint, Server("tiny", None, {}), {})
        with conversation.send("Is it?") as stream:
            assert list(stream) == ["Hm.", "Well.Ye", "s"]
    assert conversation.messages[1:] == [{"role": "assistant", "content": "Yes"}]


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        (Reply([{"error": {"message": "Bad key"}}], 401), ModelError, "wants an API key: HTTP 401: Bad key; give --a"),
        (Reply([{"detail": "Not Found"}], 404), ModelError, r"HTTP 404: Not Found; is this the base .*have this model"),
        (Reply([{"error": {"message": "No 'x'", "param": "x"}}], 400), InvalidRequest, "^HTTP 400: No 'x'$"),
        (Reply([{"error": {"message": "broken"}}], 500), ModelError, "HTTP 500: broken"),
        (Reply([b"half an err"], 500, breaks_off=True), ModelError, "HTTP 500$"),
        (Reply([b"<html>hello</html>"], headers=PAGE_OF_TEXT), ModelError, "no OpenAI.*text/html.*hello"),
        (Reply([b"no gzip"], 500, headers=ZIPPED), ModelError, "HTTP 500$"),
        (Reply([{"choices": []}]), ModelError, "no OpenAI-compatible stream, but application/json"),
        (Reply([b'{"half'], breaks_off=True), ModelError, "broke off after 0 characters"),
        (Reply([event("nonsense")], headers=STREAM), ModelError, "no OpenAI-compatible chunk .*nonsense"),
        (Reply([event(["a list"])], headers=STREAM), ModelError, "no OpenAI-compatible chunk .*a list"),
        (Reply([event("[" * 200_000)], headers=STREAM), ModelError, "no OpenAI-compatible chunk .*RecursionError"),
        (Reply([b"[" * 200_000], 500), ModelError, r"HTTP 500: \[\["),
        (Reply([event({"error": {"message": "out of memory"}})], headers=STREAM), ModelError, "out of memory"),
        (streamed(["He", "llo"], breaks_off=True), None, ""),
        (Reply(HALF, headers=STREAM, breaks_off=True), ModelError, "broke off after 2 characters"),
        (Reply([b"data: \xff\n\n"], headers=STREAM), ModelError, "broke off after 0"),
        (Reply(HALF, headers=STREAM), ModelError, "after 2 characters: it ended without a finish"),
    ],
)
def test_what_a_server_does_wrong_is_one_line(reply: Reply, kind: type[Exception] | None, said: str) -> None:
    """Guards against tracebacks, and against half an answer taken for a whole one. Behind [DONE] nothing matters."""
    with serving(lambda path, body: reply) as seen:
        if kind is None:
            assert _ask(seen.url) == "He|llo"
        else:
            with pytest.raises(kind, match=said):
                _ask(seen.url)


def test_a_busy_server_is_asked_again_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a 429 that ends a run, and against a client that does not wait as long as it is asked to."""
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.0)
    busy = [Reply([{}], 429, {"Retry-After": "1"}), Reply([{}], 503), Reply([{}], 503, {"Retry-After": "²"})]
    with serving(lambda path, body: busy.pop(0) if busy else streamed(["yes"])) as seen, Endpoint(seen.url) as endpoint:
        start = perf_counter()
        with endpoint.stream(PATH, {"messages": []}) as stream:
            assert "".join(stream) == "yes"
        assert stream.retries == 3
    assert perf_counter() - start >= 1


def test_a_server_that_stays_busy_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against waiting for ever."""
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.0)
    with serving(lambda path, body: Reply([{"error": {"message": "full"}}], 429)) as seen:
        with pytest.raises(ServerAway, match="HTTP 429: full, 4 times"):
            _ask(seen.url)
        assert len(seen.bodies) == client.ATTEMPTS


def test_a_server_that_does_not_answer_is_an_error() -> None:
    """Guards against a traceback of the HTTP library for a wrong port, and against waiting for it."""
    with serving(lambda path, body: Reply([{}])) as seen:
        pass
    with pytest.raises(ServerAway, match=r"no server answers .*is the server running"):
        _ask(seen.url)


def test_a_whole_answer_may_take_longer_than_a_stream_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against long answers for training that are broken off without a byte, asked for again, and never come."""
    monkeypatch.setattr(client, "TIMEOUT_S", 0.2)

    def slowly(path: str, body: dict[str, Any]) -> Reply:
        sleep(0.6)
        return Reply([{"choices": [{"text": "yes"}]}])

    with serving(slowly) as seen, Endpoint(seen.url) as endpoint:
        assert endpoint.post(PATH, {"messages": []})[0] == "yes"
        with pytest.raises(ServerAway, match="timed out"):
            endpoint.get("outpace/methods")


def test_a_whole_answer_that_is_not_what_its_headers_say() -> None:
    """Guards against a traceback of the HTTP library at the first look at a server."""
    with (
        serving(lambda path, body: Reply([b"no gzip"], headers=ZIPPED)) as seen,
        Endpoint(seen.url) as endpoint,
        pytest.raises(ServerAway, match="the answer broke off: Error -3"),
    ):
        endpoint.get("outpace/methods")


def test_half_a_character_is_refused_before_it_is_sent() -> None:
    """Guards against a traceback for what was typed in another encoding than UTF-8, or escaped in a file of prompts."""
    said = "'.*Caf' comes a lone surrogate, '.udce9'.*whole characters"
    with Endpoint("http://127.0.0.1:1") as endpoint, pytest.raises(InvalidRequest, match=said):
        endpoint.post(PATH, {"messages": [{"role": "user", "content": "Caf\udce9"}]})


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host/v1", "http://", "http://host:port/v1", "http://host/\udce9"]
)
def test_invalid_addresses_are_refused(url: str) -> None:
    """Guards against a request that cannot be sent, and an error of the HTTP library for it."""
    with pytest.raises(InvalidRequest, match=re.escape(f"endpoint={url!r}: ")):
        Endpoint(url)


def test_the_base_may_be_the_host_alone() -> None:
    """Guards against 404 for the address that a server prints when it starts; other bases are taken as they are."""
    assert Endpoint("http://host:8000").url == Endpoint("http://host:8000/").url == "http://host:8000/v1"
    assert Endpoint("https://host/api/v3/").url == "https://host/api/v3"


def test_the_key_is_sent_and_no_message_says_it() -> None:
    """Guards against a key that is not sent or stands in a log, and a traceback of the HTTP library for its letters."""
    no = Reply([{"error": {"message": "no"}}], 403)
    with serving(lambda path, body: no) as seen, pytest.raises(ModelError, match="refuses the API key") as raised:
        _ask(seen.url, api_key="secret-1 secret-2")
    assert seen.keys == ["Bearer secret-1"]
    assert "HTTP 403: no" in str(raised.value)
    assert "secret-1" not in str(raised.value)
    with pytest.raises(InvalidRequest, match="api_key: has characters other than ASCII"):
        Endpoint("http://host:8000", "ключ")


def test_what_a_server_is() -> None:
    """Guards against our extension sent to servers of others, and against a server of ours not known as one."""
    pages = {"/v1/outpace/methods": {"default": "lookup", "methods": [{"name": "lookup"}]}}
    pages |= {"/v1/outpace/info": {"model": "m"}, "/version": {"version": "1.0"}}

    def answer(path: str, body: dict[str, Any]) -> Reply:
        return Reply([pages[path]]) if path in pages else Reply([{"detail": "Not Found"}], 404)

    with serving(answer) as seen, Endpoint(seen.url) as endpoint:
        server = find_server(endpoint)
        assert (server.model, server.default_method, server.facts) == ("m", "lookup", {"model": "m"})
        del pages["/v1/outpace/methods"]
        server = find_server(endpoint, "other")
        assert (server.model, server.is_outpace, server.facts) == ("other", False, {"version": "1.0"})


@pytest.mark.parametrize(
    ("page", "kind", "said"),
    [
        (b"<html>", ModelError, "no OpenAI-compatible server, its /models is '<html>'"),
        ({"data": "none"}, ModelError, "no OpenAI-compatible server"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, InvalidRequest, "the server has a, b; name the one to ask"),
        ({"data": []}, InvalidRequest, "the server has none; name the one to ask"),
    ],
)
def test_servers_that_do_not_say_their_model(page: Any, kind: type[Exception], said: str) -> None:
    """Guards against a web page taken for a server of models, and against a model that nobody chose."""
    answer = Reply([page])
    with (
        serving(lambda path, body: answer) as seen,
        Endpoint(f"{seen.url}/api") as one,
        pytest.raises(kind, match=said),
    ):
        find_server(one)


def test_fields_at_their_defaults_are_not_sent() -> None:
    """Guards against servers that refuse fields which the user did not set, and fields that the user did set to our
    defaults and that are lost: llama-server's are others."""
    assert sampling_fields(SamplingParams(9)) == {"max_tokens": 9, "temperature": 0.0}
    sent = {"max_tokens": 9, "temperature": 0.0, "top_k": -1, "min_p": 0.0}  # 0 is an error for SGLang
    assert sampling_fields(SamplingParams(9), ("top_k", "min_p", "temperature")) == sent
    params = SamplingParams(9, 0.5, 3, 0.9, 0.1, 7, stop=("x",), presence_penalty=1.0, ignore_eos=True)
    assert sampling_fields(params) == {
        "max_tokens": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 7, "stop": ("x",),
        "presence_penalty": 1.0, "ignore_eos": True,
    }  # fmt: skip


PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 20.0
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 10.0
# HELP vllm:spec_decode_num_draft_tokens_created Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_created gauge
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="m"} 1.795414135e+09
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 15.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 10.0
"""
"""As vLLM writes it, and a second engine."""


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1080", "httpx.socks."),
        ("https_proxy", "ftp://proxy", "Unknown scheme"),
        ("NO_PROXY", "[::1", "Invalid port"),
        ("SSL_CERT_FILE", "/nowhere/certificates.pem", "No such file"),
    ],
)
def test_an_environment_that_no_client_can_be_made_in(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a traceback, or "No such file" without a name, where a proxy or certificates are set."""
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidRequest, match=f"^endpoint='http://h/v1': .*{variable}.*{said}.*; correct or unset it"):
        Endpoint("http://h")


def test_counts_are_read_from_vllms_page() -> None:
    """Guards against times of creation taken for counts, and engines or positions left out."""
    assert read_counts(PAGE) == SpeculationCounts(110, 15, (10, 5), 20)
    assert SpeculationCounts(9, 5, (4, 1), 3) - SpeculationCounts(2, 1, (1,), 1) == SpeculationCounts(7, 4, (3, 1), 2)


def test_no_speculation_and_no_metrics() -> None:
    """Guards against an acceptance of nothing where nothing is told, and a benchmark that ends at another page."""
    for page in (
        "# TYPE up gauge\nup 1.0\n",
        f"{DRAFTED} +Inf\n",
        f"{DRAFTED} NaN\n",
        "<html>sign in</html>",
        '{"error":"Unexpected endpoint (GET /metrics)"}',
    ):
        assert read_counts(page) is None


TALK = (
    'data: {"text": "a\u2028b\x85ö"}\r\n\r\n: a comment\nevent: chunk\ndata:first\ndata: second\n\n\n\ndata: [DONE]\n\n'
)
SAID = ['{"text": "a\u2028b\x85ö"}', "first\nsecond", "[DONE]"]


def test_events_do_not_depend_on_where_the_network_cuts() -> None:
    """Guards against characters and lines that are lost where a packet ends, and lines that end at U+2028."""
    content = TALK.encode()
    for size in range(1, len(content) + 1):
        chunks = [content[start : start + size] for start in range(0, len(content), size)]
        assert list(events(chunks)) == SAID, size


def test_an_incomplete_event_is_dropped() -> None:
    """Guards against half a chunk taken for a whole one where a server breaks off."""
    assert list(events([b"data: whole\n\ndata: ha"])) == ["whole"]
