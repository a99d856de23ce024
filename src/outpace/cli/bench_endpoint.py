"""`outpace bench --endpoint`: a server under load."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cli.collect import collect
from outpace.cli.options import notes, progress_bar

if TYPE_CHECKING:
    from outpace.bench.endpoint import EndpointPlan


def bench_endpoint(
    url: str, api_key: str | None, model: str | None, plan: "EndpointPlan", out: Path | None, as_json: bool
) -> None:
    """Measure a server; the last line is JSON.

    Args:
        url: base of its API.
        api_key: sent if there is one.
        model: the server's name of it, by default its only one.
        plan: what to measure.
        out: folder for records and summary, if they are kept.
        as_json: print nothing else.

    Raises:
        InvalidRequest: a request, a name or an option that the server does not take.
        ModelError: no OpenAI-compatible server, one that refuses the key, or one that fails.
    """
    from outpace.bench.endpoint import EndpointRun
    from outpace.bench.endpoint_report import endpoint_line, endpoint_table, summarise_endpoint
    from outpace.bench.environment import client_environment
    from outpace.endpoint.client import Endpoint
    from outpace.endpoint.server import find_server

    with Endpoint(url, api_key) as endpoint:
        server = find_server(endpoint, model)
        run = EndpointRun(endpoint, server, plan, client_environment())
        with progress_bar("bench", len(plan.items)) as advance:
            say = lambda found: endpoint_line(summarise_endpoint(found))  # noqa: E731
            records = collect(run, len(plan.items), out, advance, say)
    summary = summarise_endpoint(records)
    if out is not None:
        (out / "summary.json").write_text(json.dumps({"levels": summary}, indent=2))
    if not as_json:
        title = f"{server.model} at {endpoint.url}, {len(plan.items)} prompts, asked from {records[0]['hardware']}"
        endpoint_table(summary, title).show()
        retries = sum(row["retries"] for row in summary)
        if retries:
            notes.print(f"the server was busy {retries} times; these waits are part of the TTFT", highlight=False)
        if any("pieces" in row["counted_by"] for row in summary):
            notes.print("the server counts no tokens in streams: pieces of text are counted instead", highlight=False)
    print(json.dumps({"levels": summary}))
