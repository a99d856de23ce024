"""Profiles: what `outpace tune` found best for a model on this machine; and the method where none is named."""

import hashlib
import logging
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from platformdirs import user_cache_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from outpace.lib.checks import path_of
from outpace.lib.errors import InvalidRequest, OutpaceError
from outpace.methods.catalog import MethodLike, default_method, parse_method, stored_proposer
from outpace.methods.drafter_store import DrafterStore
from outpace.models.costs_file import identity
from outpace.models.target import TransformersTarget
from outpace.models.tokenizer import TextCodec


class Figures(BaseModel):
    """What was measured of the method that a profile names; see docs/command-line.md."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    speedup: float = Field(gt=0)
    speedup_interval: tuple[float, float] | None
    tokens_per_step: float = Field(ge=0)
    drafting_share: float = Field(ge=0, le=1)
    break_even: float = Field(ge=0)
    prompts: int = Field(ge=1)


class Profile(BaseModel):
    """A method for a model on a machine, and what it was chosen on.

    Attributes:
        workload, prompts: files that were measured on, and a fingerprint of their contents.
        hardware, threads, dtype, quantize: that it was measured with; the file's name depends on them, too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    drafter: str | None
    model: str
    measured: Figures
    workload: tuple[str, ...]
    prompts: str
    max_new_tokens: int
    made: date
    version: str
    hardware: str
    threads: int
    dtype: str
    quantize: str

    @field_validator("method")
    @classmethod
    def _is_known(cls, method: str) -> str:
        parse_method(method)  # an InvalidRequest is a ValueError
        return method


def profile_file(target: TransformersTarget, name: str) -> Path:
    """The file of a model's profile on this machine, in its precision.

    Args:
        name: what it was loaded by. Other weights of the same config are another model, for other drafts are right.
    """
    key = hashlib.sha256(repr((identity(target), found_anywhere(name))).encode()).hexdigest()[:16]
    return user_cache_path("outpace") / "profiles" / f"{key}.json"


def found_anywhere(name: str) -> str:
    """The name of a model or drafter, from whatever folder it is looked for: a path that there is as a whole one."""
    path = path_of(name)
    return str(path.resolve()) if path.exists() else name


def write_profile(file: Path, profile: Profile) -> None:
    """Keep a profile, instead of the one that there was."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(profile.model_dump_json(indent=2), encoding="utf-8")
        part.replace(file)  # whole or not at all
    except OSError as error:
        raise InvalidRequest(f"profile {file}: cannot be written: {error}; set XDG_CACHE_HOME to another") from error


def read_profile(file: Path) -> Profile | None:
    """A profile; None where there is none, or, with a warning, where it is damaged or names what there is no more."""
    try:
        return Profile.model_validate_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        field, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        _ignored(file, f"{field}: {message}" if field else message)
    except (OSError, UnicodeDecodeError) as error:
        _ignored(file, str(error))
    return None


def _ignored(file: Path, why: str) -> None:
    logging.getLogger("outpace").warning(
        "outpace: the profile %s is not used: %s; run `outpace tune` again, or delete it", file, why
    )


@dataclass(frozen=True)
class Choice:
    """The method that a model drafts with where a request names none.

    Attributes:
        origin: where the method came from, in words.
    """

    method: MethodLike
    drafters: DrafterStore
    drafter: str | None
    origin: str


def choose(
    name: str,
    target: TransformersTarget,
    codec: TextCodec,
    method: MethodLike | None,
    drafter: str | None,
    uses_profile: bool,
) -> Choice:
    """The method that was named, else that of a profile unless a drafter was named, else the default.

    Args:
        name: that the target was loaded by.

    Raises:
        ModelError: the drafter that was named cannot be found or read.
    """
    if uses_profile and method is None and drafter is None:
        file = profile_file(target, name)
        profile = read_profile(file)
        if profile is not None:
            try:
                drafters = DrafterStore(name, target, codec, profile.drafter)
                stored_proposer(parse_method(profile.method), drafters)
                origin = f"from the profile of {profile.made}, {file}"
                return Choice(profile.method, drafters, profile.drafter, origin)
            except OutpaceError as error:  # a drafter or a file that is gone
                _ignored(file, str(error))
    drafters = DrafterStore(name, target, codec, drafter)
    if method is not None:
        return Choice(method, drafters, drafter, "named")
    return Choice(default_method(name, drafters, target.native is not None), drafters, drafter, "the default")
