"""The body of a chat request."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from outpace.serve.fields import LogprobCount, Off, Only, SharedFields, Strict, Unsupported

MAX_MESSAGES = 10_000

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


def _joined(value: Any) -> Any:
    """Pieces of text as one, a line each, as vLLM joins them."""
    if not isinstance(value, list):
        return value
    if any(not isinstance(part, dict) or part.get("type") != "text" for part in value):
        raise ValueError("pieces other than text are not supported")
    return "\n".join(TextPart.model_validate(part).text for part in value)


Text = Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[TextPart])]


class FunctionCall(Strict):
    """A call that the model made earlier."""

    name: FunctionName
    arguments: str


class ToolCall(Strict):
    """One of a message's calls."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Text
    name: Unsupported = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Text
    name: Unsupported = None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, fail_fast=True)] | None = None
    name: Unsupported = None
    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    annotations: Annotated[Any, Only([])] = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Text
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = False


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: FunctionName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    name: FunctionName
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = False


class ResponseFormat(Strict):
    """Of what form the answer is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type='json_schema', and only there")
        return self


class ChatRequest(SharedFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: LogprobCount | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    # accepted where they change nothing
    metadata: dict[str, str] | None = None
    store: Off = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    modalities: Annotated[Any, Only(["text"])] = None
    verbosity: Annotated[Any, Only("medium")] = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    reasoning_effort: Unsupported = None
    prediction: Unsupported = None
    audio: Unsupported = None
    functions: Unsupported = None
    function_call: Annotated[Any, Only("none")] = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _go_together(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: another name of max_completion_tokens; give one of them")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice: only with tools")
        return self

    @property
    def token_limit(self) -> tuple[str, int] | None:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().token_limit

    @property
    def may_call(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def ranked(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def rendered(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them: arguments of calls as objects, "developer" as "system".

        Raises:
            ValueError: arguments are no JSON object.
        """
        return [_rendered(message, f"messages[{index}]") for index, message in enumerate(self.messages)]


def _rendered(message: Any, name: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    said: dict[str, Any] = {"role": role, "content": message.content or ""}
    if isinstance(message, ToolMessage):
        said["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage) and message.tool_calls:
        calls = []
        for index, call in enumerate(message.tool_calls):
            try:
                arguments = json.loads(call.function.arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                raise ValueError(f"{name}.tool_calls[{index}].function.arguments: must be a JSON object in a string")
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
        said["tool_calls"] = calls
    return said
