"""`outpace chat`: a conversation in the terminal, with a model here or with a server."""

import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.from_settings import from_settings, options
from outpace.cli.options import (
    LOADING,
    SAMPLING,
    ApiKey,
    aside,
    complain,
    given_of,
    is_given,
    load,
    loading_options,
    model_of,
    notes,
    refuse_key,
    refuse_options,
    speed_of,
)
from outpace.core.params import SamplingParams
from outpace.core.settings import LoadSettings
from outpace.lib.errors import InvalidRequest, OutpaceError
from outpace.lib.stages import short_name

if TYPE_CHECKING:
    from outpace import Chat, Model
    from outpace.endpoint.server import RemoteChat

HELP = (
    "/reset begins a new conversation, /info describes the model and how it decodes, /exit or Ctrl-D leaves, Ctrl-C "
    "stops an answer and leaves at the prompt."
)
NOT_OF_SERVERS = tuple(name for name in LOADING if name not in ("model", "method", "budget"))


@from_settings(
    loading=loading_options(model=None),
    params=options(
        SamplingParams, *(name for name in SAMPLING if name != "max_new_tokens"), "seed", "stop", max_new_tokens=1024
    ),
)
def chat(
    context: typer.Context,
    loading: LoadSettings,
    params: SamplingParams,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Talk with an OpenAI-compatible server instead: the base URL of its API, such as http://host:8000/v1. "
            "MODEL is then the name that the server has for the model, by default its only one. Without "
            "--max-new-tokens the server limits the answers.",
        ),
    ] = None,
    api_key: ApiKey = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message that opens the conversation.")
    ] = None,
) -> None:
    """Talk with a model. Each line is a message, from a terminal or a pipe; earlier turns are not computed again."""
    if url is not None:
        from outpace.endpoint.server import OPTIONAL, sampling_fields

        refuse_options(context, NOT_OF_SERVERS, f"a server answers, url={url!r}")
        fields = sampling_fields(params, given_of(context, OPTIONAL))
        if not is_given(context, "max_new_tokens"):
            del fields["max_tokens"]  # for servers a limit beyond the rest of the context is an error
        _chat_with_server(url, api_key, loading, fields, system)
        return
    model_of(loading, "--url")
    refuse_key(context, "--url")
    loaded = load(loading, 1)
    with loaded.chat(system, params) as conversation:
        greeting = (
            f"{short_name(loaded.name)}, method {loaded.method_name}, context of {loaded.target.max_length} tokens"
        )
        converse(lambda text: _answer(conversation, text), conversation.reset, greeting, lambda: _info(loaded))


def _info(model: "Model") -> list[str]:
    """The lines that /info prints."""
    import torch

    from outpace.kernels.build import loaded_kernels, why_none

    target = model.target
    dtype = str(target.rounded_to).removeprefix("torch.")
    precision = dtype if target.quantize == "none" else f"{target.quantize}, from {dtype}"
    lines = [
        f"model: {model.name}, {precision}, on {target.device}",
        f"context: {target.max_length} tokens, prompt and answers together",
        f"method: {model.method_name} ({model.method_from})",
    ]
    if model.drafter is not None:
        lines.append(f"drafter: {model.drafter}")
    if target.device.type == "cpu":
        kernels = "compiled" if loaded_kernels() is not None else f"none, {why_none()}"
        lines.append(f"threads: {torch.get_num_threads()}; kernels: {kernels}")
    return [*lines, str(model.exactness), f"for measurements of this machine: outpace doctor {model.name}"]


def _answer(conversation: "Chat", text: str) -> None:
    with conversation.send(text) as stream:
        # Ctrl-C ends the answer between two steps, where the state is consistent.
        before = signal.signal(signal.SIGINT, lambda number, frame: stream.stop())
        try:
            for event in stream:
                print(event.text, end="", flush=True)
        finally:
            signal.signal(signal.SIGINT, before)
            print(flush=True)
    assert stream.result is not None
    metrics = stream.result.metrics
    aside(speed_of(stream.result, f"{metrics.reused_tokens} of {metrics.prompt_tokens} prompt tokens reused"))


def _chat_with_server(
    url: str, api_key: str | None, loading: LoadSettings, fields: dict[str, Any], system: str | None
) -> None:
    """Talk with a server."""
    from outpace.endpoint.client import Endpoint
    from outpace.endpoint.server import RemoteChat, find_server, speculation_fields

    method, budget = loading.method, loading.budget
    with Endpoint(url, api_key) as endpoint:
        server = find_server(endpoint, loading.model)
        if not server.is_outpace and (method is not None or budget is not None):
            raise InvalidRequest(
                f"method={method!r}, budget={budget}: the server at {endpoint.url} is not outpace's and drafts as it "
                "was started; leave them out"
            )
        if server.is_outpace:
            fields |= speculation_fields(method, budget)
        conversation = RemoteChat(endpoint, server, fields, system)
        decides = f"method {method or server.default_method}" if server.is_outpace else "a server that is not outpace's"
        greeting = f"{server.model} at {endpoint.url}, {decides}"
        if "max_model_len" in server.facts:
            greeting += f", context of {server.facts['max_model_len']} tokens"
        facts = [greeting, *(f"{name}: {_flat(value)}" for name, value in server.facts.items())]
        converse(lambda text: _answer_of_server(conversation, text), conversation.reset, greeting, lambda: facts)


def _flat(value: object) -> str:
    return ", ".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def _answer_of_server(conversation: "RemoteChat", text: str) -> None:
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
    except KeyboardInterrupt:  # before the first piece of text
        aside("ended by cancelled")
        return
    tokens = stream.usage.get("completion_tokens", stream.pieces)
    unit = "tokens" if "completion_tokens" in stream.usage else "pieces"
    facts = [f"{tokens} {unit}"]
    if last > first:  # an answer in one piece has no speed
        facts.append(f"{(tokens - 1) / (last - first):.1f} {unit}/s")
    if stream.report:
        facts.append(f"{stream.report['tokens_per_step']:.2f} tokens per step")
        facts.append(f"{stream.report['reused_tokens']} of {stream.usage.get('prompt_tokens')} prompt tokens reused")
    aside(", ".join([*facts, f"ended by {stream.finish_reason}"]))


def converse(
    answer: Callable[[str], None], reset: Callable[[], None], greeting: str, info: Callable[[], Sequence[str]]
) -> None:
    """Answer line by line until the end."""
    has_failed = False
    if sys.stdin.isatty():
        aside(f"{greeting}; /exit or Ctrl-D leaves, /help lists the commands.")
    while (line := _read_line()) is not None:
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            reset()
        elif line == "/info":
            for fact in info():
                aside(fact)
        elif re.fullmatch(r"/\w+", line):
            aside(f"{'' if line == '/help' else f'no command {line}: '}{HELP}")
        elif line:
            try:
                answer(line)
            except OutpaceError as error:
                has_failed = True
                complain(error)
    if has_failed and not sys.stdin.isatty():
        raise typer.Exit(2)  # a script needs the exit status; a person has seen the error


def _read_line() -> str | None:
    """The next message without surrounding space, None at the end."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with suppress(ImportError):  # not built on every platform
            import readline  # noqa: F401  input() then edits lines and remembers them
    elif sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return input("> " if is_terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            notes.print()
        return None
