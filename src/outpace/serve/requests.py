"""The fields of requests for chats and completions, and how they are checked. Others are refused by name."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from outpace.core.params import MAX_LOGPROBS, Grammar, SamplingParams
from outpace.core.settings import default_of, settings_of
from outpace.drafters.options import MAX_BUDGET

MAX_STOPS, MAX_STOP_LENGTH, MAX_SAMPLES = 16, 1000, 128


class Strict(BaseModel):
    """A model of strict JSON: no numbers in strings, no unknown fields, no NaN. Fields of type None are not supported;
    null is accepted, as clients send it that state every default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def _off(value: bool) -> bool:
    if value:
        raise ValueError("is not supported; leave it out")
    return value


Off = Annotated[bool, AfterValidator(_off), Field(json_schema_extra={"const": False})]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[
    list[StopString],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_list, json_schema_input_type=StopString | list[StopString]),
]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class StreamOptions(Strict):
    """What a stream contains in addition to the answer."""

    include_usage: bool | None = False
    include_obfuscation: Off | None = None


class OutpaceFields(Strict):
    """The extension: how the request is decoded, and what is reported."""

    method: str | None = Field(default=None, max_length=500, description="as `outpace methods` names it")
    budget: int | None = Field(default=None, ge=0, le=MAX_BUDGET, description="drafted nodes per round")
    verification: Literal["match", "rejection"] | None = None
    report: bool | None = Field(default=False, description="report the figures of speculation")
    trace: bool | None = Field(default=False, description="report each token's origin and each round's tree")


class StructuredOutputs(Strict):
    """vLLM's field: what the whole answer must match, in one of four ways."""

    json_: dict[str, Any] | None = Field(default=None, alias="json", description="a JSON schema")
    regex: str | None = Field(default=None, max_length=100_000)
    choice: Annotated[list[StopString], Field(min_length=1, max_length=1000)] | None = None
    lark: str | None = Field(default=None, alias="grammar", max_length=1_000_000, description="in llguidance's Lark")

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredOutputs":
        if sum(value is not None for value in (self.json_, self.regex, self.choice, self.lark)) != 1:
            raise ValueError("structured_outputs: give one of json, regex, choice, grammar")
        return self

    def grammar(self) -> Grammar:
        """As the engine takes it."""
        if self.json_ is not None:
            return Grammar.json_schema(self.json_)
        if self.regex is not None:
            return Grammar.regex(self.regex)
        return Grammar.lark(self.lark) if self.lark is not None else Grammar.choice(self.choice or [])


def sampling_field(name: str, default: Any = ..., **limits: Any) -> Any:
    """A field of a request with description, default and bounds of a field of `SamplingParams`, except for `limits`."""
    about = settings_of(SamplingParams)[name]
    bounds = {"gt" if about.is_open else "ge": about.low, "le": about.high} | limits
    return Field(
        default=default_of(SamplingParams, name) if default is ... else default,
        description=about.description,
        **{key: bound for key, bound in bounds.items() if bound is not None},
    )


class SharedFields(Strict):
    """Fields of OpenAI, of vLLM, and our own, that both endpoints have. None is the default everywhere."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = sampling_field("n", le=MAX_SAMPLES)
    max_tokens: int | None = sampling_field("max_new_tokens", None, ge=1)
    temperature: float | None = sampling_field("temperature", 1.0)  # OpenAI's default
    top_p: float | None = sampling_field("top_p")
    seed: int | None = sampling_field("seed")
    stop: Stops | None = None
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=1024)
    user: str | None = None
    # vLLM's
    top_k: int | None = sampling_field("top_k", ge=-1, le=1 << 31)
    min_p: float | None = sampling_field("min_p")
    repetition_penalty: float | None = sampling_field("repetition_penalty", le=1e6)
    penalty_window: int | None = sampling_field("penalty_window", le=1 << 31)  # our own
    min_tokens: int | None = sampling_field("min_new_tokens")
    ignore_eos: bool | None = sampling_field("ignore_eos")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=64)] | None = None
    return_token_ids: bool | None = False
    structured_outputs: StructuredOutputs | None = None
    # our own
    outpace: OutpaceFields | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "SharedFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream=true")
        return self

    @property
    def options(self) -> OutpaceFields:
        return self.outpace or OutpaceFields()

    @property
    def temperature_or_default(self) -> float:
        default: float = type(self).model_fields["temperature"].default
        return default if self.temperature is None else self.temperature

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> tuple[str, int] | None:
        """The name of the field that limits the answer, and the limit; None without one."""
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)

    @property
    def ranked(self) -> int | None:
        """How many most likely tokens are reported at each position; None for no log-probabilities."""
        raise NotImplementedError


LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


MAX_MESSAGES = 10_000

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


Text = str | Annotated[list[TextPart], Field(fail_fast=True)]


class FunctionCall(Strict):
    """A call that the model made earlier."""

    name: str  # as the model wrote it, and not always a tool's
    arguments: str
    parsed_arguments: Any = None  # of the openai package's `parse`, which repeats `arguments`: ignored


class ToolCall(Strict):
    """One of a message's calls."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # its place in a stream, which clients keep: ignored


class Named(Strict):
    name: str | None = None  # of who speaks, or of a tool: chat templates may use it


class SystemMessage(Named):
    role: Literal["system", "developer"]
    content: Text


class UserMessage(Named):
    role: Literal["user"]
    content: Text


class AssistantMessage(Named):
    role: Literal["assistant"]
    content: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, fail_fast=True)] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[None], Field(fail_fast=True)] | None = None
    parsed: Any = None  # of the openai package's `parse`, which repeats `content`: ignored


class ToolMessage(Named):
    role: Literal["tool"]
    content: Text
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = False

    @field_validator("parameters")
    @classmethod
    def _describe_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and schema.get("type", "object") != "object":
            raise ValueError("must be a JSON schema of type object: arguments have names")
        return schema


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
            raise ValueError("json_schema: required with type='json_schema', and only allowed there")
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
    store: Off | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1)] | None = None
    verbosity: Literal["medium"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    prompt_cache_options: None = None
    safety_identifier: str | None = None
    reasoning_effort: None = None
    prediction: None = None
    audio: None = None
    functions: None = None
    function_call: Literal["none"] | None = None
    web_search_options: None = None
    moderation: None = None

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
        """The messages as chat templates take them: arguments of calls as objects, "developer" as "system"."""
        return [_rendered(message, f"messages[{index}]") for index, message in enumerate(self.messages)]


def _rendered(message: Any, name: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = message.content or ""
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)  # as in vLLM
    rendered: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        rendered["name"] = message.name
    if isinstance(message, ToolMessage):
        rendered["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage) and message.tool_calls:
        calls = []
        for index, call in enumerate(message.tool_calls):
            try:
                arguments = from_json(call.function.arguments or "{}")  # nested as deep as a body may be
            except ValueError:
                arguments = None
            if not isinstance(arguments, dict):
                raise ValueError(f"{name}.tool_calls[{index}].function.arguments: must be a JSON object in a string")
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
        rendered["tool_calls"] = calls
    return rendered


MAX_PROMPTS = 128
DEFAULT_TOKENS = 16
"""OpenAI's default of max_tokens for completions."""

# Pydantic takes 1 to 3 us per error, and one is reported: lists without a short limit stop at the first.
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


def _form_of(prompt: Any) -> str:
    """The form of a prompt, so that errors are about that form alone."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS), Tag("lists")],
    Discriminator(_form_of),
]


class CompletionRequest(SharedFields):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: LogprobCount | None = None
    best_of: int | None = Field(default=None, description="only the value of n")
    echo: Off | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _best_is_all(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: must equal n")
        return self

    @property
    def token_limit(self) -> tuple[str, int] | None:
        return super().token_limit or ("max_tokens", DEFAULT_TOKENS)

    @property
    def ranked(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]
