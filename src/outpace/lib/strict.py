"""Options and settings that users give: unknown, mistyped and idle ones are refused."""

from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from outpace.lib.checks import plain


class StrictSettings(BaseModel):
    """No unknown field, no change, and no true or false where a number or a name is wanted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _check_flag(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (kind, *get_args(kind)):
            raise ValueError("true and false are for flags")
        return value

    def refuse_idle(self, names: Iterable[str], because: str, remedy: str = "leave it out") -> None:
        """Raise ValueError for the first of the named fields that was given, as it would change nothing."""
        for name in names:
            if name in self.model_fields_set:
                raise ValueError(f"{name}={plain(getattr(self, name))}: does nothing with {because}; {remedy}")
