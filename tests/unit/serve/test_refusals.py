"""What cannot be honoured is a 400 in OpenAI's format that names the field, and the server goes on."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from outpace.lib.errors import InvalidRequest
from outpace.serve.errors import in_its_words
from outpace.serve.requests import ChatRequest
from outpace.serve.service import drafting
from tests.unit.serve.served import NAME, Served

CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"model": NAME, "prompt": "Hi", "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEP = {"name": "f", "arguments": '{"a": ' * 600 + "1" + "}" * 600}
"""A call that Python's parser can read, and no recursive function can."""
UNSATISFIABLE = {"type": "object", "properties": {"a": False}, "required": ["a"]}


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def each(refused: dict[str, tuple[Any, ...]]) -> list[tuple[dict[str, Any], str]]:
    """A change of a request for each value of a field, and the field that is at fault."""
    return [({field: value}, field) for field, values in refused.items() for value in values]


CHAT_REFUSED: dict[str, tuple[Any, ...]] = {
    "temperature": (-1, "1", True), "top_p": (0,), "n": (0, 1.5, 129), "max_tokens": (0, 5000), "seed": (-1, 2**63),
    "stop": (["x"] * 10_000, ""), "logit_bias": ({"x": 1}, {"999999": 1}), "presence_penalty": (3,),
    "top_logprobs": (2,), "messages": ([], [{"role": "user", "content": "x" * 5000}]),
    "stream_options": ({"include_usage": True},), "store": (True,), "reasoning_effort": ("low",), "functions": ([],),
    "moderation": ({"model": "m"},), "prompt_cache_retention": ("24h",),
    "best_of": (2,), "tool_choice": ("auto",), "min_tokens": (9,), "guided_json": ({},),
    "response_format": ({"type": "json_schema"},
                        {"type": "json_schema", "json_schema": {"name": "a", "schema": UNSATISFIABLE}}),
    "structured_outputs": ({"regex": "("}, {"regex": "a", "choice": ["b"]}),
}  # fmt: skip
COMPLETION_REFUSED: dict[str, tuple[Any, ...]] = {
    "echo": (True,), "suffix": ("x",), "best_of": (2,), "prompt": ("", [], [264], 5, ["x", ""], ["x"] * 129),
    "logit_bias": ({"999999": 1},), "logprobs": (True,), "tools": ([TOOL],),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "param"),
    [
        *each(CHAT_REFUSED),
        ({"max_completion_tokens": 3}, "max_tokens"),
        ({"stop": [1]}, "stop[0]"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": "x", "annotations": [{}]}]}, "messages[0].annotations[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
         "messages[0].content[0].cache_control"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": DEEP}]}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"stream": True, "stream_options": {"sorted": True}}, "stream_options.sorted"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
         "tools[0].function.parameters"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"ignore_eos": True, "stop_token_ids": [5], "response_format": {"type": "json_object"}}, "response_format"),
        ({"outpace": {"method": "telepathy"}}, "outpace.method"),
        ({"outpace": {"method": "recycle:budget=-1"}}, "outpace.method"),
        ({"outpace": {"method": "recycle:budget=8", "budget": 3}}, "outpace.method"),
        ({"outpace": {"method": "plain", "budget": 3}}, "outpace.method"),
        ({"outpace": {"method": "medusa"}}, "outpace.method"),  # for which there is no drafter
        ({"outpace": {"method": "recycle:warm=/etc/passwd"}}, "outpace.method"),
        ({"outpace": {"budget": -1}}, "outpace.budget"),
        ({"outpace": {"verification": "hope"}}, "outpace.verification"),
        ({"outpace": {"speed": 11}}, "outpace.speed"),
        ({"outpace": {"trace": True}}, "outpace.trace"),
    ],
)  # fmt: skip
def test_a_chat_request_that_cannot_be_honoured(served: Served, change: dict[str, Any], param: str) -> None:
    """Guards against options that are ignored, or errors that do not say which field is at fault."""
    error = error_of(served.post(CHAT | change))
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert param.split(".")[-1].split("[")[0] in error["message"]
    assert len(error["message"]) < 1200


def test_a_budget_next_to_the_servers_own_method_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a budget of the method that a request names which another one replaces without a word, because
    that method is the server's; a request that names none may give a budget."""
    for field in ("method", "method_name"):
        monkeypatch.setattr(served.model, field, "recycle:budget=8")
    for spelling in ("recycle:budget=8", "recycle:budget=08"):
        with pytest.raises(InvalidRequest, match="budget=3 and method='recycle:budget=8' were both given"):
            drafting(served.model, spelling, 3)
    assert drafting(served.model, None, 3)[2] == 3
    for field in ("method", "method_name"):
        monkeypatch.setattr(served.model, field, "plain")
    assert error_of(served.post(CHAT | {"outpace": {"budget": 3}}))["param"] == "outpace.budget"


@pytest.mark.parametrize(
    ("change", "param"),
    [*each(COMPLETION_REFUSED), ({"prompt": [-1]}, "prompt[0]"), ({"prompt": ["a", 1]}, "prompt[1]")],
)
def test_a_completion_that_cannot_be_honoured(served: Served, change: dict[str, Any], param: str) -> None:
    """Guards against the same at the other endpoint, empty prompts, and a slot that a refused request occupies."""
    assert error_of(served.post(COMPLETION | change, "/v1/completions"))["param"] == param
    served.assert_idle()


def test_fields_that_change_nothing_are_accepted(served: Served) -> None:
    """Guards against refusing clients that send defaults."""
    body = CHAT | {
        "n": 1, "stream": False, "stream_options": None, "parallel_tool_calls": True, "store": False, "user": "me",
        "metadata": {"a": "b"}, "service_tier": "auto", "logprobs": False, "top_logprobs": None, "stop": None,
        "modalities": ["text"], "response_format": {"type": "text"}, "tools": None, "tool_choice": "none",
        "frequency_penalty": 0, "presence_penalty": 0, "top_p": 1, "temperature": 1, "functions": None,
        "prediction": None, "seed": None, "logit_bias": {}, "max_completion_tokens": 2, "moderation": None,
        "prompt_cache_options": None, "prompt_cache_retention": "in_memory",
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "Be kind"}]},
                     {"role": "user", "content": "Hi"},
                     {"role": "assistant", "content": None, "refusal": None,
                      "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                     {"role": "tool", "tool_call_id": "1", "content": "ok"}],
    }  # fmt: skip
    assert served.post(body).status_code == 200
    plain = COMPLETION | {"best_of": 1, "echo": False, "suffix": None, "logprobs": None}
    assert served.post(plain, "/v1/completions").status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"5", b'"x"', b'{"model": "\xe4\xb8"}', b'{"model": "\\ud800"}', b"\xff\xfe",
        b'{"model": "tiny", "messages": NaN}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_object_in_utf8(served: Served, content: bytes) -> None:
    """Guards against half a character, lone surrogates, and nesting without end, which must not be a 500."""
    for path in ("/v1/chat/completions", "/v1/completions"):
        error_of(served.post(path=path, content=content, headers={"content-type": "application/json"}))


def test_errors_outside_the_endpoints_have_the_format_too(served: Served) -> None:
    """Guards against a client that parses an error and finds another server's."""
    assert error_of(served.post(CHAT | {"model": "gpt-9"}), 404)["code"] == "model_not_found"
    error_of(served.post(CHAT, "/v1/embeddings"), 404)
    error_of(served.get("/v1/chat/completions"), 405)


def test_a_template_without_tools_refuses_them(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against tools that the model is never told of."""
    tokenizer = served.model.codec.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    error = error_of(served.post(CHAT | {"tools": [TOOL]}))
    assert (error["param"], "--chat-template" in error["message"]) == ("tools", True)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [*CHAT["messages"], {"role": "assistant", "content": "x", "tool_calls": [call]}]
    assert error_of(served.post(CHAT | {"messages": said}))["param"] == "messages[1].tool_calls"
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert "<tool_call>" in error_of(served.post(CHAT | {"tools": [TOOL]}))["message"]
    coder = "{{ tools }}<tool_call>\n<function=name>\n{% for m in messages %}{{ m['content'] }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", coder)
    for choice in ("auto", "required"):  # calls as Qwen3-Coder writes them would be sent as text
        assert "JSON within" in error_of(served.post(CHAT | {"tools": [TOOL], "tool_choice": choice}))["message"]


def test_a_template_that_relies_on_calls_shows_them(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a conversation that is refused for what the template says of it without its calls, as Mistral's
    does, in which roles alternate but for calls and their results."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{{ raise_exception('twice') }}"
        "{% endif %}{{ m.role }}{{ m.tool_calls }}{% endfor %}"
    )
    monkeypatch.setattr(served.model.codec.tokenizer, "chat_template", template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
    assert served.post(CHAT | {"messages": said}).status_code == 200


def test_names_of_messages_reach_the_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against agents whose requests are refused, as LangChain.js names the tool in each of its answers and
    AutoGen everyone who speaks; and a name that is taken and dropped."""
    refusal = "{% if not m.name %}{{ raise_exception('nameless') }}{% endif %}"
    template = f"{{% for m in messages %}}{refusal}{{{{ m.content }}}}{{% endfor %}}"
    monkeypatch.setattr(served.model.codec.tokenizer, "chat_template", template)
    spoken = [{"role": role, "name": "f", "content": "x"} for role in ("system", "user", "assistant")]
    answer = {"role": "tool", "tool_call_id": "1", "name": "f", "content": "x"}
    assert served.post(CHAT | {"messages": [*spoken, answer]}).status_code == 200


def chain_of(levels: int) -> dict[str, Any]:
    """A schema of small size that nests deeply, each level in a definition of its own."""
    deeper = {f"a{level}": {"type": "array", "items": {"$ref": f"#/$defs/a{level + 1}"}} for level in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": deeper | {f"a{levels}": {"type": "integer"}}}


@pytest.mark.parametrize("kind", ["schema", "grammar"])
def test_deep_grammars_do_not_end_the_server(served: Served, kind: str) -> None:
    """Guards against a body of a hundred kilobytes whose rules call each other until the process has no stack left."""
    rules = "\n".join(f"r{rule}: r{rule + 1}" for rule in range(6000))
    wish: dict[str, Any] = (
        {"json": chain_of(2500)} if kind == "schema" else {"grammar": f'start: r0\n{rules}\nr6000: "a"'}
    )
    response = served.post(CHAT | {"structured_outputs": wish, "max_tokens": 1})
    assert response.status_code in (200, 400)
    assert served.post(CHAT).status_code == 200


def test_bodies_of_many_faults(served: Served) -> None:
    """Guards against a gigabyte of complaints about one body, and an event loop that writes them for seconds."""
    unknown = COMPLETION | {str(index): 0 for index in range(9_000)}
    assert error_of(served.post(unknown, "/v1/completions"))["code"] == "invalid_body"
    assert error_of(served.post(COMPLETION | {"prompt": [-1] * 30_000}, "/v1/completions"))["param"] == "prompt[0]"
    assert error_of(served.post(CHAT | {"messages": [0] * 9_000}))["param"] == "messages[0]"


@pytest.mark.parametrize(
    ("field", "most", "value"),
    [
        ("stop", 16, lambda count: ["x"] * count),
        ("stop", 1000, lambda length: "x" * length),
        ("stop_token_ids", 64, lambda count: [5] * count),
        ("bad_words", 64, lambda count: ["x"] * count),
        ("logit_bias", 1024, lambda count: dict.fromkeys(map(str, range(count)), 1)),
        ("tools", 128, lambda count: [TOOL] * count),
        ("structured_outputs", 1000, lambda count: {"choice": ["x"] * count}),
    ],
)
def test_lists_are_as_long_as_promised(field: str, most: int, value: Callable[[int], Any]) -> None:
    """Guards against a bound of docs/promises.md that no longer holds, or that refuses what it allows."""
    ChatRequest.model_validate_json(json.dumps(CHAT | {field: value(most)}))
    with pytest.raises(ValidationError, match=rf"\n{field}"):
        ChatRequest.model_validate_json(json.dumps(CHAT | {field: value(most + 1)}))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "elsewhere.example"}, 403),
        ({"host": "elsewhere.example:80", "origin": "http://elsewhere.example:80"}, 403),
        ({"origin": "http://elsewhere.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[half"}, 403),
        ({"host": "127.0.0.1:1", "origin": "http://127.0.0.1:1"}, 200),
    ],
)
def test_pages_of_other_sites_may_not_ask(served: Served, headers: dict[str, str], status: int) -> None:
    """Guards against a page that lets a server of the reader's own machine work for it."""
    assert served.post(CHAT, headers=headers).status_code == status
    assert served.get("/", headers=headers).status_code == status


def test_an_error_names_fields_as_the_api_does(served: Served) -> None:
    """Guards against a remedy for a field that the API does not have, and text of the client's that is changed."""
    said = error_of(served.post(CHAT | {"min_tokens": 9, "max_tokens": 4}))["message"]
    assert "min_tokens=9: must be at most max_tokens=4" in said
    assert in_its_words("stop='max_new_tokens': give eos_token_ids") == "stop='max_new_tokens': give stop_token_ids"


@pytest.mark.parametrize(
    "fault",
    [UNSATISFIABLE, {"patternProperties": {"a?" * 30: {}}}, {"patternProperties": {str(n): {} for n in range(33)}}],
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_bad_tool_is_to_blame_where_it_must_be_called(
    served: Served, choice: Any, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a complaint about the answer's schema, which is no part of that grammar, or one that quotes the
    server's own grammar and another tool's schema."""
    monkeypatch.setattr("outpace.sampling.grammar._MOST_OF_REGEXES", 50)  # the prompt shows the tool, too
    good = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"a": {"type": "string"}}}}}
    bad = {"type": "function", "function": {"name": "f", "parameters": fault}}
    body = CHAT | {"tools": [good, bad], "tool_choice": choice, "response_format": {"type": "json_object"}}
    error = error_of(served.post(body))
    assert error["param"] == "tools[1].function.parameters"
    assert "lark" not in error["message"]
