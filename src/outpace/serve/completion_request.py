"""The body of a completion request."""

from typing import Annotated

from pydantic import Field, model_validator

from outpace.serve.fields import LogprobCount, Off, SharedFields, TokenId, Unsupported

MAX_PROMPTS = 128
DEFAULT_TOKENS = 16
"""OpenAI's."""

# A complaint takes pydantic 1 to 3 us, and one is told: lists without a short limit stop at the first.
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompts = (
    str
    | Ids
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
)


class CompletionRequest(SharedFields):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: LogprobCount | None = None
    best_of: int | None = Field(default=None, description="only the value of n")
    echo: Off = None
    suffix: Unsupported = None

    @model_validator(mode="after")
    def _best_is_all(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: is not supported unless it is n")
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
