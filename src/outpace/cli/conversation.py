"""What is said in the terminal: lines, commands among them, and answers."""

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import typer

from outpace.cli.options import aside, complain, notes
from outpace.lib.errors import OutpaceError

HELP = (
    "/reset begins a new conversation, /info describes the model and how it decodes, /exit or Ctrl-D leaves, Ctrl-C "
    "stops an answer and leaves at the prompt."
)
LEAVE = "/exit or Ctrl-D leaves, /help lists the commands."


def converse(
    answer: Callable[[str], None], reset: Callable[[], None], greeting: str, info: Callable[[], Sequence[str]]
) -> None:
    """Answer line by line until the end.

    Args:
        answer: prints the answer to a message.
        reset: begins a new conversation.
        greeting: describes the model to a person, in one line.
        info: lines that describe it in full.

    Raises:
        typer.Exit: with status 2, if a message of a script was not answered.
    """
    has_failed = False
    if sys.stdin.isatty():
        aside(f"{greeting}; {LEAVE}")
    while (line := _read_line()) is not None:
        command = re.fullmatch(r"/\w+", line)
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            reset()
        elif line == "/info":
            for fact in info():
                aside(fact)
        elif command:
            aside(f"{'' if line == '/help' else f'no command {line}: '}{HELP}")
        elif line:
            try:
                answer(line)
            except OutpaceError as error:
                has_failed = True
                complain(error)
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
