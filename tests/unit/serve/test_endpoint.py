"""Our own client against our own server: `outpace bench --endpoint` and `outpace chat --url`."""

from outpace.core.params import SamplingParams
from outpace.endpoint.client import Endpoint
from outpace.endpoint.server import sampling_fields, speculation_counts
from tests.cli.runner import last_json, run
from tests.unit.serve.served import NAME, Served

BENCH = ["-w", "builtin:6", "--max-new-tokens", "12", "--concurrency", "1,3", "--json"]


def test_bench_compares_methods_on_our_server(served: Served) -> None:
    """Guards against an extension that the server does not take, or a report that the bench does not read."""
    result = run("bench", "--endpoint", served.url, "--methods", "lookup,recycle:budget=8", *BENCH)
    rows = last_json(result)["levels"]
    methods = ["plain", "lookup", "recycle:budget=8"]
    assert [(row["concurrency"], row["method"]) for row in rows] == [
        (level, name) for level in (1, 3) for name in methods
    ]
    assert {row["equal"] for row in rows} == {1.0}
    assert {row["source"] for row in rows} == {"report"}
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
    result = run("chat", "--url", served.url, "--max-new-tokens", "9", "--method", "recycle", lines=talk)
    assert result.exit_code == 0, result.output
    plain = run("chat", "--url", served.url, "--max-new-tokens", "9", "--method", "plain", lines=talk)
    assert result.stdout == plain.stdout != "\n\n"
    assert result.stderr.count("tokens per step, ") == 2
