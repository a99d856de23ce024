"""Our own client against our own server: `outpace bench --endpoint` and `outpace chat --url`."""

import json
from time import monotonic, sleep
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from outpace import cli
from outpace.core.params import SamplingParams
from outpace.endpoint.client import Endpoint
from outpace.endpoint.server import find_server, sampling_fields, speculation_counts
from outpace.lib.errors import InvalidRequest, ModelError
from tests.unit.serve.served import NAME, Served, serving

BENCH = ["-w", "builtin:6", "--max-new-tokens", "12", "--concurrency", "1,3", "--json"]


def _run(*arguments: str, lines: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), input=lines)


def test_bench_compares_methods_on_our_server(served: Served) -> None:
    """Guards against an extension that the server does not take, or a report that the bench does not read; and every
    method's answers are plain decoding's."""
    result = _run("bench", "--endpoint", served.url, "--methods", "lookup,recycle:budget=8", *BENCH)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["levels"]
    methods = ["plain", "lookup", "recycle:budget=8"]
    assert [(row["concurrency"], row["method"]) for row in rows] == [
        (level, name) for level in (1, 3) for name in methods
    ]
    assert {row["equal"] for row in rows} == {1.0}
    assert {row["told_by"] for row in rows} == {"report"}
    assert [row["tokens_per_step"] for row in rows if row["method"] == "plain"] == [1, 1]
    assert all(row["tokens_per_step"] > 1 for row in rows if row["method"] == "recycle:budget=8")
    assert {tuple(row["counted_by"]) for row in rows} == {("usage",)}
    served.assert_idle()


def test_our_metrics_say_what_our_reports_say(served: Served) -> None:
    """Guards against counters that a dashboard divides and that do not mean what vLLM's mean."""
    body = {"model": NAME, "prompt": "a b a b a b a b", "outpace": {"method": "recycle", "report": True}}
    with Endpoint(served.url) as endpoint:
        before = speculation_counts(endpoint)
        with endpoint.stream("completions", body | sampling_fields(SamplingParams(40))) as stream:
            assert "".join(stream) == stream.text
        after = speculation_counts(endpoint)
    assert before is not None
    assert after is not None
    grown = after - before
    assert (grown.drafted, grown.accepted) == (stream.report["drafted"], stream.report["accepted"])
    assert sum(grown.accepted_per_depth) == grown.accepted > 0


def test_chat_with_our_server(served: Served) -> None:
    """Guards against turns that the server's sharing of beginnings does not find."""
    talk = "Hello there, server\nAnd then?\n"
    result = _run("chat", "--url", served.url, "--max-new-tokens", "9", "--method", "recycle", lines=talk)
    assert result.exit_code == 0, result.output
    plain = _run("chat", "--url", served.url, "--max-new-tokens", "9", "--method", "plain", lines=talk)
    assert result.stdout == plain.stdout != "\n\n"
    assert result.stderr.count("tokens per step, ") == 2


def test_a_client_that_leaves_cancels_its_request(served: Served) -> None:
    """Guards against Ctrl-C that leaves the server computing: leaving the block early frees the slot."""
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]} | sampling_fields(
        SamplingParams(3000, ignore_eos=True)
    )
    with Endpoint(served.url) as endpoint, endpoint.stream("chat/completions", body) as stream:
        for _ in stream:
            assert not served.service.is_idle
            break
    until = monotonic() + 20
    while not served.service.is_idle and monotonic() < until:
        sleep(0.01)
    assert stream.finish_reason is None
    served.assert_idle()


def test_what_our_server_refuses_is_said(served: Served) -> None:
    """Guards against refusals whose field and remedy are lost on the way."""
    with Endpoint(served.url) as endpoint:
        assert find_server(endpoint).model == NAME
        cases: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"model": NAME, "prompt": "x", "min_p": 7}, InvalidRequest, "HTTP 400: .*min_p"),
            ({"model": NAME, "prompt": "x", "outpace": {"method": "nope"}}, InvalidRequest, "HTTP 400: .*nope"),
            ({"model": "other", "prompt": "x"}, ModelError, "HTTP 404: .*tiny"),
        ]
        for body, kind, said in cases:
            with pytest.raises(kind, match=said), endpoint.stream("completions", body) as stream:
                list(stream)


def test_keys(served: Served) -> None:
    """Guards against a key that is asked for and not sent, or sent in a form that our server does not read."""
    with serving(served.model, api_keys=("one", "two")) as locked:
        with Endpoint(locked.url) as endpoint, pytest.raises(ModelError, match="wants an API key: HTTP 401"):
            find_server(endpoint)
        for key in ("two", "one two"):
            with Endpoint(locked.url, key) as endpoint:
                assert find_server(endpoint).model == NAME
