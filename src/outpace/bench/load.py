"""Load on a server: a number of requests in flight, each with its clocks."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import perf_counter
from typing import Any

from outpace.bench.records import TurnRun
from outpace.endpoint.client import Endpoint
from outpace.lib.errors import ModelError

Asked = tuple[str, Mapping[str, Any]]
REPORTED = ("steps", "drafted", "accepted", "accepted_per_depth", "reused_tokens", "plain_steps", "by_origin")


def under_load(endpoint: Endpoint, asked: Sequence[Asked], concurrency: int) -> list[TurnRun]:
    """Ask a server, so many requests at a time: as one ends, the next is sent.

    Args:
        endpoint: the server.
        asked: path and body of each request.
        concurrency: requests in flight.

    Returns:
        Answers in the order of the requests. Their counters hold times in milliseconds, the tokens that the server
        counts (its pieces of text where it counts none), and what an outpace server reports.

    Raises:
        InvalidRequest, ModelError: as `Endpoint.stream`; requests that were not sent yet are not sent any more.
    """
    start, is_over = perf_counter(), Event()

    def ask(one: Asked) -> TurnRun:
        return _ask(endpoint, *one, start, is_over)

    pool = ThreadPoolExecutor(concurrency)
    try:
        return list(pool.map(ask, asked))
    finally:
        is_over.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _ask(endpoint: Endpoint, path: str, body: Mapping[str, Any], start: float, is_over: Event) -> TurnRun:
    sent = perf_counter()
    first = last = 0.0
    with endpoint.stream(path, body) as stream:
        for _ in stream:
            last = perf_counter()
            first = first or last
            if is_over.is_set():
                raise ModelError("another request of the run failed")
        end = perf_counter()
    usage, report = stream.usage, stream.report
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    counters: dict[str, Any] = {
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "new_tokens": usage.get("completion_tokens", stream.pieces),
        "counted_by": "usage" if "completion_tokens" in usage else "pieces",
        "retries": stream.retries,
        "sent_ms": 1e3 * (sent - start),
        "ttft_ms": 1e3 * ((first or end) - sent),  # an answer without text has waited for its end
        "decode_ms": 1e3 * (last - first),
        "reused_tokens": cached,
    }
    counters |= {name: report[name] for name in REPORTED if report.get(name) is not None}
    return TurnRun((), stream.text, stream.finish_reason or "unknown", counters)
