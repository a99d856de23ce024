"""`outpace chat`: a conversation in the terminal."""

import re
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from outpace.cli.options import (
    Budget,
    Device,
    Drafter,
    Dtype,
    Exact,
    Loading,
    MaxModelLen,
    MaxNewTokens,
    Method,
    MinP,
    ModelName,
    Quantize,
    Seed,
    SpeculativeConfig,
    Temperature,
    TopK,
    TopP,
    notes,
)
from outpace.core.errors import OutpaceError
from outpace.core.params import SamplingParams

if TYPE_CHECKING:
    from outpace import Chat, TokenStream

HELP = "/reset begins a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer and leaves at the prompt."


def chat(
    model: ModelName,
    method: Method = None,
    drafter: Drafter = None,
    system: Annotated[str | None, typer.Option(help="A system message that opens the conversation.")] = None,
    budget: Budget = None,
    speculative_config: SpeculativeConfig = None,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    exact: Exact = False,
) -> None:
    """Talk with a model. Each line is a message, from a terminal or a pipe; what was said is not computed again."""
    params = SamplingParams(
        max_new_tokens, temperature, top_k, top_p, min_p, seed, stop=tuple(stop or ())
    )  # checked before a model is loaded
    loaded = Loading(
        model,
        drafter,
        budget,
        dtype,
        quantize,
        device,
        max_model_len=max_model_len,
        speculative_config=speculative_config,
        exact=exact,
    ).load(method, 1)
    has_failed = False
    with loaded.chat(system, params) as conversation:
        if sys.stdin.isatty():
            notes.print(f"[dim]{HELP}[/dim]", highlight=False)
        while (line := _read_line()) is not None:
            command = re.fullmatch(r"/\w+", line)
            if line in ("/exit", "/quit"):
                break
            if line == "/reset":
                conversation.reset()
            elif command:
                notes.print(f"[dim]{'' if line == '/help' else f'no command {line}: '}{HELP}[/dim]", highlight=False)
            elif line:
                try:
                    _answer(conversation, line)
                except OutpaceError as error:
                    has_failed = True
                    notes.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
    if has_failed and not sys.stdin.isatty():
        raise typer.Exit(2)  # a script must see it; a person has


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


def _answer(conversation: "Chat", text: str) -> None:
    with conversation.send(text) as stream:
        before = _stop_on_interrupt(stream)
        try:
            for event in stream:
                print(event.text, end="", flush=True)
        finally:
            signal.signal(signal.SIGINT, before)
            print(flush=True)
    assert stream.result is not None
    metrics = stream.result.metrics
    rate = 1e3 / metrics.tpot_ms if metrics.tpot_ms else 0.0
    notes.print(
        f"[dim]{metrics.new_tokens} tokens, {rate:.1f} tokens/s, {metrics.tokens_per_step:.2f} tokens per step, "
        f"{metrics.reused_tokens} of {metrics.prompt_tokens} prompt tokens reused, "
        f"ended by {stream.result.finish_reason}[/dim]",
        highlight=False,
        soft_wrap=True,
    )


def _stop_on_interrupt(stream: "TokenStream") -> Any:
    """Make Ctrl-C end the answer between two steps, where everything is in order; returns the handler before."""

    def stop(number: int, frame: object) -> None:
        stream.stop()

    return signal.signal(signal.SIGINT, stop)
