"""What an answer must look like: a JSON schema, a regular expression, a grammar or a choice."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from outpace.lib.checks import check_text, shown
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = ("json", "regex", "lark")
_SHOWN = 60  # characters of a text in an error


@dataclass(frozen=True)
class Grammar:
    """What an answer must match as a whole. Made by one of the methods below; equal texts make equal grammars.

    It is compiled for a model's tokenizer when a request is added (llguidance, https://github.com/guidance-ai/llguidance),
    and refused there if it cannot be or if nothing satisfies it.

    Attributes:
        kind: "json", "regex" or "lark".
        text: a JSON schema, a regular expression, or a grammar in llguidance's variant of Lark.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _KINDS:
            raise InvalidRequest(f"grammar kind={shown(self.kind)}: choose {', '.join(map(repr, _KINDS))}")
        check_text("grammar", self.text)

    @staticmethod
    def json_schema(schema: dict[str, Any] | bool | str) -> "Grammar":
        """JSON that a schema validates: properties in the schema's order, one space behind commas and colons and none
        elsewhere, so that as much as possible is forced. A schema's own `x-guidance` says otherwise.

        Args:
            schema: as an object or as its JSON text.

        Raises:
            InvalidRequest: it is neither.
        """
        text = schema
        if isinstance(text, str):
            try:
                schema = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"grammar: the JSON schema {_shown(text)} is not JSON: {error}") from error
        if not isinstance(schema, dict | bool):
            raise InvalidRequest(f"grammar: a JSON schema must be an object, found {type(schema).__name__}")
        try:
            return Grammar("json", json.dumps(_as_object(schema)))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"grammar: the JSON schema cannot be written as JSON: {error}") from error

    @staticmethod
    def json_object() -> "Grammar":
        """Any JSON object."""
        return Grammar.json_schema({"type": "object"})

    @staticmethod
    def regex(text: str) -> "Grammar":
        """Text that a regular expression matches from beginning to end (Rust's syntax: no look-around, no
        back-references)."""
        return Grammar("regex", text)

    @staticmethod
    def lark(text: str) -> "Grammar":
        """Text of a context-free grammar; its first rule is `start`."""
        return Grammar("lark", text)

    @staticmethod
    def choice(options: Sequence[str]) -> "Grammar":
        """One of several texts.

        Raises:
            InvalidRequest: there are none, or one is no text or empty.
        """
        is_list = isinstance(options, list | tuple) and len(options) > 0
        if not is_list or not all(isinstance(option, str) and option for option in options):
            raise InvalidRequest(
                f"grammar: choice={shown(options)}: give a list of one or more texts, none of them empty"
            )
        return Grammar("lark", "start: " + " | ".join(json.dumps(option) for option in dict.fromkeys(options)))

    def __str__(self) -> str:
        return f"{self.kind} {_shown(self.text)}"


def _as_object(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """A schema that is true validates everything, one that is false nothing."""
    return schema if isinstance(schema, dict) else {} if schema else {"enum": []}


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


class Constraint(Protocol):
    """What one request may say: its grammar, at any place of any path. It follows whatever ids it is asked about, so
    that it is right after any exception, and it fails for its request alone: then it allows nothing more.

    Attributes:
        error: why it failed; None if it did not.
    """

    error: str | None

    def allows(self, said: Sequence[int], token: int) -> bool:
        """Whether a token may follow generated ids. Cheaper than `mask`."""

    def mask(self, said: Sequence[int], vocab_size: int) -> "Tensor | None":
        """[V] bool, on the host, the tokens that may follow generated ids; None behind an EOS id, where all may."""
