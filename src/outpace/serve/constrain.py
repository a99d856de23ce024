"""What an answer must look like: the fields that say so, as one grammar."""

from typing import Any

from outpace.core.grammar import Grammar
from outpace.serve.chat_request import ChatRequest, NamedTool
from outpace.serve.errors import refused
from outpace.serve.fields import SharedFields
from outpace.serve.tool_calls import Callable, call_grammar

ANY_OBJECT = {"type": "object"}


def grammar_of(body: SharedFields) -> tuple[str, Grammar] | None:
    """The grammar of a request's answer, with the field to blame where it cannot be compiled; None for any text.

    Raises:
        ApiError: fields that exclude each other, or a tool that is not there.
        InvalidRequest: what is no grammar.
    """
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
    """The grammar of an answer that may call; None where the model is free, and its calls are read as they are."""
    functions = [Callable(tool.function.name, tool.function.parameters) for tool in body.tools or ()]
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
