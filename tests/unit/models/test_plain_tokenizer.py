"""Tokenizers without transformers: the ids and texts of its tokenizers."""

from typing import Any

import pytest

from outpace.lib.errors import InvalidRequest
from outpace.models.plain_tokenizer import PlainTokenizer
from outpace.models.tokenizer import TextCodec
from tests.unit.models.tiny import CHAT_TEMPLATE, byte_tokenizer

TOOL = {"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "a<b": "'&'"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. <b>"},
    {"role": "user", "content": "Wie groß?\n"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "größe", "arguments": {"x": [1.5]}}}]},
    {"role": "tool", "content": '{"m": 3}'},
    {"role": "user", "content": "And now?"},
]
WITH_TOOLS = """{{- bos_token }}
{%- if tools %}
    {%- for tool in tools %}
        {{- "\\n" }}{{ tool | tojson }}{{ tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{% for message in messages %}
    {% if message.role == "tool" %}{% continue %}{% endif %}
    {%- if loop.index > 40 %}{% break %}{% endif %}
<|{{ message['role'] }}|>
{% if message.content is not none %}
{{ message.content | trim }}
{%- else %}
{% generation %}{{ message.tool_calls[0].function | tojson }}{% endgeneration %}
{% endif %}
    {#- a comment #}
{% endfor %}
{{ strftime_now("%Y") }}{{ documents is none }}{% if add_generation_prompt %}<|assistant|>{{ eos_token }}{% endif %}
"""


def plain(template: str | None = CHAT_TEMPLATE) -> PlainTokenizer:
    stock = byte_tokenizer(template)
    return PlainTokenizer(stock.backend_tokenizer, template, {"bos": "<eos>", "eos": "<eos>"}, ["<eos>"])


@pytest.mark.parametrize(("template", "count"), [(CHAT_TEMPLATE, 3), (WITH_TOOLS, 2), (WITH_TOOLS, 5)])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_chats_have_the_ids_of_transformers(template: str, tools: list[Any] | None, count: int) -> None:
    """Guards against a prompt that a model was not trained on: lost tools, escaped characters, other white space."""
    own = plain(template)
    found, expected = (TextCodec(one, "m").encode_chat(MESSAGES[:count], tools) for one in (own, own.stock()))
    assert found == expected
    assert len(found) > 5


def test_what_a_template_refuses_is_an_error_of_the_request() -> None:
    """Guards against a traceback from a template that wants other messages, or reaches out of its sandbox."""
    for template, complaint in (
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|mro"),
        ("{% for %}", "Expected|expected"),
    ):
        with pytest.raises(InvalidRequest, match=f"the chat template of m refuses these messages: .*({complaint})"):
            TextCodec(plain(template), "m").encode_chat(MESSAGES[:1])
    with pytest.raises(InvalidRequest, match="at least one message"):
        TextCodec(plain(), "m").encode_chat([])


def test_it_has_what_is_read_of_a_tokenizer_of_transformers() -> None:
    """Guards against special tokens and ids that differ from those of transformers."""
    own = plain()
    stock = own.stock()
    assert own.eos_token_id == stock.eos_token_id
    assert own.all_special_ids == stock.all_special_ids
    assert own.special_tokens_map == stock.special_tokens_map
    assert {key: str(one) for key, one in own.added_tokens_decoder.items()} == {
        key: str(one) for key, one in stock.added_tokens_decoder.items()
    }
    assert own("Größe <eos>")["input_ids"] == stock("Größe <eos>")["input_ids"]
