"""`outpace chat --url`: a conversation with a server."""

from time import perf_counter
from typing import TYPE_CHECKING

from outpace.cli.conversation import converse
from outpace.cli.options import aside
from outpace.core.params import SamplingParams
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.endpoint.server import RemoteChat


def chat_endpoint(
    url: str,
    api_key: str | None,
    model: str | None,
    params: SamplingParams,
    system: str | None,
    *,
    method: str | None,
    budget: int | None,
) -> None:
    """Talk with a server.

    Args:
        url: base of its API.
        api_key: sent if there is one.
        model: the server's name of it, by default its only one.
        params: sampling parameters of every answer.
        system: a system message that opens the conversation.
        method, budget: how an outpace server drafts.

    Raises:
        InvalidRequest: a method or a budget for a server of others, or several models and no name.
        ModelError: no OpenAI-compatible server, or one that refuses the key.
    """
    from outpace.endpoint.client import Endpoint
    from outpace.endpoint.server import RemoteChat, find_server

    with Endpoint(url, api_key) as endpoint:
        server = find_server(endpoint, model)
        if not server.is_outpace and (method is not None or budget is not None):
            raise InvalidRequest(
                f"method={method!r}, budget={budget}: the server at {endpoint.url} is not outpace's and drafts as it "
                "was started; leave them out"
            )
        conversation = RemoteChat(endpoint, server, params, system, method, budget)
        decides = f"method {method or server.default_method}" if server.is_outpace else "a server that is not outpace's"
        greeting = f"{server.model} at {endpoint.url}, {decides}"
        if "max_model_len" in server.facts:
            greeting += f", context of {server.facts['max_model_len']} tokens"
        facts = [greeting, *(f"{name}: {_flat(value)}" for name, value in server.facts.items())]
        converse(lambda text: _answer(conversation, text), conversation.reset, greeting, lambda: facts)


def _flat(value: object) -> str:
    return ", ".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def _answer(conversation: "RemoteChat", text: str) -> None:
    """Print an answer as it comes, and its figures. Ctrl-C closes the connection, which cancels it at the server."""
    first = last = 0.0
    try:
        with conversation.send(text) as stream:
            try:
                for piece in stream:
                    print(piece, end="", flush=True)
                    last = perf_counter()
                    first = first or last
            except KeyboardInterrupt:
                stream.finish_reason = "cancelled"
            finally:
                print(flush=True)
    except KeyboardInterrupt:  # before the server said anything
        aside("ended by cancelled")
        return
    tokens = stream.usage.get("completion_tokens", stream.pieces)
    rate = (tokens - 1) / (last - first) if last > first else 0.0
    unit = "tokens" if "completion_tokens" in stream.usage else "pieces"
    facts = [f"{tokens} {unit}", f"{rate:.1f} {unit}/s"]
    if stream.report:
        facts.append(f"{stream.report['tokens_per_step']:.2f} tokens per step")
        facts.append(f"{stream.report['reused_tokens']} of {stream.usage.get('prompt_tokens')} prompt tokens reused")
    aside(", ".join([*facts, f"ended by {stream.finish_reason}"]))
