"""Fields that chat and completions share, and how fields are checked. What is not here or there is refused by name."""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from outpace.core.grammar import Grammar
from outpace.core.params import MAX_LOGPROBS, MAX_SEED, MAX_TEMPERATURE

MAX_STOPS, MAX_STOP_LENGTH, MAX_SAMPLES = 16, 1000, 128


class Strict(BaseModel):
    """JSON as it is: no numbers in strings, no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Only:
    """Metadata of a field that is accepted where its value changes nothing, and refused otherwise.

    Args:
        accepted: such values, beside None.
    """

    def __init__(self, *accepted: Any) -> None:
        self.accepted = (*accepted, None)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.accepted)}

    def _check(self, value: Any) -> Any:
        if not any(value == one and type(value) is type(one) for one in self.accepted):
            said = " or ".join(json.dumps(one) for one in self.accepted[:-1])
            raise ValueError(f"is not supported unless it is {said}" if said else "is not supported; leave it out")
        return value


Unsupported = Annotated[Any, Only()]
Off = Annotated[Any, Only(False)]


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
    """What a stream says beside the answer."""

    include_usage: bool | None = False
    include_obfuscation: Off = None


class OutpaceOptions(Strict):
    """The extension: how the request is decoded, and what is told of it."""

    method: str | None = Field(default=None, max_length=500, description="as `outpace methods` names it")
    budget: int | None = Field(default=None, ge=0, le=511, description="drafted nodes per round")
    verification: Literal["match", "rejection"] | None = None
    report: bool | None = Field(default=False, description="tell what speculation did")
    trace: bool | None = Field(default=False, description="tell each token's origin and each round's tree")


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


class SharedFields(Strict):
    """Fields of OpenAI, of vLLM, and our own, that both endpoints have. None is the default everywhere."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=1, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=1.0, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: Stops | None = None
    presence_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=1024)
    user: str | None = None
    # vLLM's
    top_k: int | None = Field(default=0, ge=-1, le=1 << 31)
    min_p: float | None = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(default=1.0, gt=0, le=1e6)
    min_tokens: int | None = Field(default=0, ge=0)
    ignore_eos: bool | None = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=64)] | None = None
    structured_outputs: StructuredOutputs | None = None
    # our own
    outpace: OutpaceOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "SharedFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream=true")
        return self

    @property
    def options(self) -> OutpaceOptions:
        return self.outpace or OutpaceOptions()

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
        """How many likeliest tokens are told at each position; None for no log-probabilities."""
        raise NotImplementedError


LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
