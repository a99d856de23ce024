"""Turns the body of a request into the engine's input."""

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json

from outpace.api import Model
from outpace.core.params import Grammar, SamplingParams
from outpace.core.settings import settings_of
from outpace.lib.errors import InvalidRequest
from outpace.models.tokenizer import TextCodec
from outpace.serve.errors import ApiError, from_validation, in_its_words, refused, too_long
from outpace.serve.requests import ChatRequest, CompletionRequest, NamedTool, SharedFields
from outpace.serve.service import EngineInputs, Service, drafting
from outpace.serve.tool_calls import OPEN, arguments_of, call_grammar

Body = TypeVar("Body", bound=SharedFields)

MOST_ENTRIES = 1 << 15
"""Entries of a body's lists and objects, in addition to one for each token of the context. pydantic holds the
interpreter, and with it the event loop, for 0.1 to 0.5 us per entry; messages have five entries and more
than four tokens each."""
SAME_NAMES = tuple(name for name in SharedFields.model_fields if name in settings_of(SamplingParams))
"""Fields of requests that `SamplingParams` has under the same name."""
_MARKS = np.isin(np.arange(256), list(b",:[{"))


async def prepared(service: Service, kind: type[Body], data: bytes) -> tuple[Body, EngineInputs]:
    """A request's body and what the engine gets of it, made outside the event loop."""

    def work() -> tuple[Body, EngineInputs]:
        body = parsed(kind, data, MOST_ENTRIES + service.model.target.max_length)
        return body, engine_inputs(service, body)

    return await service.in_thread(work)


def parsed(kind: type[Body], data: bytes, most: int) -> Body:
    """A request's body, of at most this many list entries and fields."""
    if len(data) > most and (count := _entries(data)) > most:
        text = f"the body has {count:,} list entries and fields, and this server reads {most:,}: send fewer at a time"
        raise ApiError(400, text, code="body_too_large")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        try:
            body = from_json(data)
        except ValueError:
            body = None
        raise from_validation(error, body) from error


def _entries(data: bytes) -> int:
    """Number of commas, colons and opening brackets outside the strings of a JSON text. NumPy counts them; pydantic
    would hold the interpreter's lock."""
    text = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(text == ord('"'))
    if b"\\" in data:
        others = np.flatnonzero(text != ord("\\"))
        before = others[np.searchsorted(others, quotes) - 1]
        quotes = quotes[(quotes - before) % 2 == 1]  # a quote after an odd number of backslashes is escaped
    return int(np.count_nonzero(np.searchsorted(quotes, np.flatnonzero(_MARKS[text])) % 2 == 0))


def engine_inputs(service: Service, body: SharedFields) -> EngineInputs:
    """What the engine gets of a request; `ApiError` where a field cannot be honoured."""
    model = service.model
    service.check_name(body.model)
    options = body.options
    if options.trace and not body.stream:
        raise refused("outpace.trace", "only with stream=true")
    if options.trace and (body.n or 1) > 1:
        raise refused("outpace.trace", "of one answer at a time: n=1")
    try:
        method, proposer, budget = drafting(model, options.method, options.budget)
    except InvalidRequest as error:  # including one about a drafter, which requests cannot name
        raise ApiError(400, str(error), f"outpace.{'budget' if options.method is None else 'method'}") from error
    prompts = _prompts(model, body)
    params = model.resolved(_params(model, body, _limit(body, prompts, model.target.max_length)))
    return EngineInputs(prompts, params, method, proposer, budget, continues=isinstance(body, CompletionRequest))


def _prompts(model: Model, body: SharedFields) -> list[list[int]]:
    if isinstance(body, CompletionRequest):
        _check_characters(model, max(len(prompt) for prompt in body.prompts), "prompt")
        prompts = [model.encode(prompt) for prompt in body.prompts]
        if not all(prompts):
            raise refused("prompt", "is empty: give at least one token")
        largest = max(max(prompt) for prompt in prompts)
        if largest >= model.target.vocab_size:
            raise refused("prompt", f"token id {largest} is outside the vocabulary of {model.target.vocab_size}")
        return prompts
    assert isinstance(body, ChatRequest)
    try:
        messages = body.rendered()
    except ValueError as error:
        param = str(error).partition(":")[0]
        raise ApiError(400, str(error), param) from error
    _check_characters(model, _characters(messages), "messages")
    return [_encoded_chat(model, body, messages)]


def _check_characters(model: Model, characters: int, param: str) -> None:
    """Refuse texts that cannot fit before they are encoded, which takes seconds per megabyte."""
    most = model.target.max_length
    if characters > most * model.codec.longest_token:
        raise too_long(param, f"{characters:,} characters, and prompt and answer have {most} tokens together")


def _characters(value: Any) -> int:
    """The number of characters of all texts in a JSON value."""
    if isinstance(value, dict):
        return sum(len(key) + _characters(one) for key, one in value.items())
    if isinstance(value, list):
        return sum(map(_characters, value))
    return len(value) if isinstance(value, str) else 0


def _encoded_chat(model: Model, body: ChatRequest, messages: list[dict[str, Any]]) -> list[int]:
    """Ids of a conversation, with its tools if they may be called. Fields that the template ignores are refused: texts
    with and without them are compared, since rendering takes a fraction of encoding."""
    codec = model.codec
    try:
        plain = codec.render_chat(messages)
    except InvalidRequest as error:
        raise ApiError(400, f"messages: {error}", "messages") from error
    called = next((index for index, message in enumerate(messages) if "tool_calls" in message), None)
    if called is not None and not _shows_calls(codec, messages, plain):
        raise refused(f"messages[{called}].tool_calls", f"the chat template of {codec.name} does not show them")
    if not body.may_call:
        return codec.encode_rendered(plain)
    tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools or ()]
    _check_characters(model, _characters(tools), "tools")
    try:
        text = codec.render_chat(messages, tools)
    except InvalidRequest as error:
        raise ApiError(400, f"tools: {error}", "tools") from error
    if text == plain:
        raise refused("tools", f"the chat template of {codec.name} takes none; name one that does by --chat-template")
    special = [added.content for added in codec.tokenizer.added_tokens_decoder.values() if added.special]
    template = str(codec.tokenizer.chat_template)
    # Qwen3-Coder's template asks for XML between the same marks: <function=name><parameter=name>.
    if OPEN not in template or OPEN in special or "<function=" in template:
        raise refused("tools", f"this server reads JSON within {OPEN}, and the chat template asks for another form")
    return codec.encode_rendered(text)


def _shows_calls(codec: TextCodec, messages: list[dict[str, Any]], shown: str) -> bool:
    without = [{key: value for key, value in one.items() if key != "tool_calls"} for one in messages]
    try:
        return codec.render_chat(without) != shown
    except InvalidRequest:  # such as Mistral's, whose roles must alternate, except for calls and their results
        return True


def _limit(body: SharedFields, prompts: list[list[int]], most: int) -> int:
    """Maximal tokens of each answer; `ApiError` if they do not fit the context after the longest prompt."""
    longest = max(len(prompt) for prompt in prompts)
    named = body.token_limit
    if longest >= most:
        param = "messages" if isinstance(body, ChatRequest) else "prompt"
        raise too_long(param, f"{longest} tokens, and prompt and answer have {most} together")
    if named is None:
        return most - longest
    name, limit = named
    if longest + limit > most:
        text = f"{limit} tokens after a prompt of {longest}, and they have {most} together: ask for at most"
        raise refused(name, f"{text} {most - longest}", code="context_length_exceeded")
    return limit


def _params(model: Model, body: SharedFields, limit: int) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(body, name) for name in SAME_NAMES} | {
        "temperature": body.temperature_or_default,
        "top_k": None if body.top_k == -1 else body.top_k,
        "verification": body.options.verification,
        "min_new_tokens": body.min_tokens,
        "logprobs": body.ranked,
        "trace": body.options.trace,
    }
    params = SamplingParams(max_new_tokens=limit, **{key: value for key, value in given.items() if value is not None})
    if body.stop_token_ids:
        own = [token for token in model.target.eos_token_ids if 0 <= token < model.target.vocab_size]
        # As in vLLM, `ignore_eos` ignores only the model's EOS ids: ids in `stop_token_ids` still end the answer.
        kept = [] if body.ignore_eos else own
        params = replace(params, ignore_eos=False, eos_token_ids=(*kept, *body.stop_token_ids))
    params.check_vocabulary(model.target.vocab_size)
    if (found := grammar_of(body)) is None:
        return params
    param, grammar = found
    try:
        # The request's own `ignore_eos`, which `stop_token_ids` replaced above, so that a grammar refuses it.
        params = replace(params, grammar=grammar, ignore_eos=bool(body.ignore_eos))
        model.engine.constraint(params)  # compiled here, outside the engine's steps, and cached
    except InvalidRequest as error:
        raise _blamed(model, body, params, param, error) from error
    return params


def _blamed(model: Model, body: SharedFields, params: SamplingParams, param: str, error: InvalidRequest) -> ApiError:
    """The error of a request whose grammar cannot be compiled. The grammar of calls is made here, so its errors would
    quote text that is not in the request: if a tool's schema is at fault, the error names that schema."""
    is_of_schema = any(one in str(error) for one in ("JSON schema", "regular expressions of"))
    if isinstance(body, ChatRequest) and body.may_call and is_of_schema:
        for index, tool in enumerate(body.tools or ()):
            if isinstance(body.tool_choice, NamedTool) and tool.function.name != body.tool_choice.function.name:
                continue
            try:
                model.engine.constraint(replace(params, grammar=Grammar.json_schema(arguments_of(tool.function))))
            except InvalidRequest as own:
                param, error = f"tools[{index}].function.parameters", own
                break
    return ApiError(400, f"{param}: {in_its_words(str(error))}", param)


ANY_OBJECT = {"type": "object"}


def grammar_of(body: SharedFields) -> tuple[str, Grammar] | None:
    """The grammar of a request's answer, and the field at fault if it cannot be compiled; None for any text."""
    outputs = body.structured_outputs
    chat = body if isinstance(body, ChatRequest) else None
    schema = None if chat is None else _answer_schema(chat)
    calls = chat is not None and chat.may_call
    if outputs is not None:
        if schema is not None or calls:
            raise refused("structured_outputs", "not together with response_format or tools; leave out one")
        return "structured_outputs", outputs.grammar()
    if chat is not None and calls and (found := _of_calls(chat, schema)) is not None:
        must_call = chat.tool_choice == "required" or isinstance(chat.tool_choice, NamedTool)
        return ("tools" if schema is None or must_call else "response_format"), found
    return None if schema is None else ("response_format", Grammar.json_schema(schema))


def _answer_schema(body: ChatRequest) -> dict[str, Any] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    return ANY_OBJECT if wanted.json_schema is None else wanted.json_schema.schema_ or ANY_OBJECT


def _of_calls(body: ChatRequest, answer: dict[str, Any] | None) -> Grammar | None:
    """The grammar of an answer that may call tools; None if the answer is unconstrained and calls are only read."""
    functions = [tool.function for tool in body.tools or ()]
    choice, only_one = body.tool_choice, body.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        name = choice.function.name
        functions = [function for function in functions if function.name == name]
        if not functions:
            raise refused("tool_choice", f"there is no tool {name!r} among tools")
        return call_grammar(functions, must_call=True, only_one=True)
    if choice == "required":
        return call_grammar(functions, must_call=True, only_one=only_one, answer=None)
    is_strict = any(tool.function.strict for tool in body.tools or ())
    if not (is_strict or only_one or answer is not None):
        return None
    return call_grammar(functions, must_call=False, only_one=only_one, answer=answer)
