"""A tokenizer without transformers, whose import takes three seconds: the part of its interface that is used here."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from os import PathLike
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template, nodes
    from jinja2.parser import Parser
    from transformers import PreTrainedTokenizerFast


class PlainTokenizer:
    """A tokenizer with a chat template and tokens of special roles.

    Args:
        backend: whose special tokens are added already.
        chat_template: in Jinja; or two, "default" and "tool_use", the second for conversations with tools; None for
            none.
        roles: tokens by role: bos, eos, unk, pad.
        control: other tokens that are never shown.
    """

    is_fast = True

    def __init__(
        self,
        backend: Tokenizer,
        chat_template: str | Mapping[str, str] | None,
        roles: Mapping[str, str],
        control: Sequence[str],
    ) -> None:
        self.backend_tokenizer, self.chat_template = backend, chat_template
        self.special_tokens_map = {f"{role}_token": token for role, token in roles.items()}
        self._control = [token for token in control if token not in roles.values()]
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        missing = [token for token in roles.values() if token not in added]
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in missing])

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    @property
    def eos_token_id(self) -> int | None:
        token = self.special_tokens_map.get("eos_token")
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    @property
    def all_special_ids(self) -> list[int]:
        ids = map(self.backend_tokenizer.token_to_id, [*self.special_tokens_map.values(), *self._control])
        return list(dict.fromkeys(one for one in ids if one is not None))

    @cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Added tokens by their ids."""
        found: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def apply_chat_template(
        self, messages: Sequence[Any], tools: list[Any] | None, add_generation_prompt: bool, **others: Any
    ) -> str:
        """The text of a conversation; `others` are the options by which transformers does the same.

        Raises:
            ValueError: no messages, or no template.
            jinja2.TemplateError: the template is wrong, or refuses the messages.
        """
        if not messages or self.chat_template is None:
            raise ValueError("a conversation needs at least one message, and a chat template")
        template = self.chat_template
        source = template if isinstance(template, str) else template["tool_use" if tools else "default"]
        return _compiled(source).render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens_map,
        )

    def stock(self) -> "PreTrainedTokenizerFast":
        """The tokenizer of transformers."""
        from transformers import PreTrainedTokenizerFast

        found: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer,
            chat_template=self.chat_template,
            clean_up_tokenization_spaces=False,
            **self.special_tokens_map,
        )
        found.extra_special_tokens = self._control
        return found

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write it as transformers reads it."""
        self.stock().save_pretrained(folder)


@lru_cache(maxsize=4)
def _compiled(source: str) -> "Template":
    """A chat template, in the sandbox and with the functions that templates written for transformers expect."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}`, which marks the assistant's tokens for training, and changes no text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: "Parser") -> "list[nodes.Node]":
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = as_json  # Jinja's own escapes HTML
    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    return environment.from_string(source)
