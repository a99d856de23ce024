"""Which method a model drafts with: as vLLM's options name it, as `outpace tune` found it, or the default."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from outpace.lib.checks import path_of, shown
from outpace.lib.errors import InvalidRequest, OutpaceError
from outpace.methods.catalog import MethodLike, MethodSpec, methods, parse_method
from outpace.methods.stores import DrafterStore, ProposerStore
from outpace.methods.union import OutpaceOptions
from outpace.models.costs_file import identity
from outpace.models.target import PackedTarget
from outpace.models.tokenizer import TextCodec
from outpace.trees.retrieval.suffix import MAX_NGRAM


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
        hardware, threads, dtype, quantize, kv_cache_dtype: that it was measured with; the file's name depends on them,
            too.
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
    kv_cache_dtype: str

    @field_validator("method")
    @classmethod
    def _is_known(cls, method: str) -> str:
        parse_method(method)  # an InvalidRequest is a ValueError
        return method


def profile_file(target: PackedTarget, name: str) -> Path:
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


def method_anywhere(method: str) -> str:
    """A method, whatever folder it is used in: files that it names by relative paths, by whole ones. A text cannot name
    a path with a comma; such a file stays as it is named."""
    spec = parse_method(method)
    files = {option: found_anywhere(file) for option, file in spec.files.items()}
    whole = {option: file for option, file in files.items() if "," not in file}
    return str(replace(spec, options=spec.options.model_copy(update=whole))) if whole else method


def check_place(file: Path) -> None:
    """Refuse a place where no profile can be kept, before the minutes that measuring one takes."""
    with _part_of(file) as part:
        part.touch()
        part.unlink()


def write_profile(file: Path, profile: Profile) -> None:
    """Keep a profile, instead of the one that there was."""
    with _part_of(file) as part:
        part.write_text(profile.model_dump_json(indent=2), encoding="utf-8")
        part.replace(file)  # whole or not at all


@contextmanager
def _part_of(file: Path) -> Iterator[Path]:
    """What is written first, in a folder that there is."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield file.with_suffix(".part")
    except OSError as error:
        remedy = "set XDG_CACHE_HOME to another, or give --dry-run"
        raise InvalidRequest(f"profile {file}: cannot be written: {error}; {remedy}") from error


def read_profile(file: Path) -> Profile | None:
    """A profile; None where there is none, or, with a warning, where it is damaged or names what there is no more."""
    try:
        return Profile.model_validate_json(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # also where HOME is /dev/null
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
    proposers: ProposerStore
    drafter: str | None
    origin: str


def choose(
    name: str,
    target: PackedTarget,
    codec: TextCodec,
    method: MethodLike | None,
    drafter: str | None,
    uses_profile: bool,
) -> Choice:
    """The method that was named, else that of a profile unless a drafter was named, else the default.

    Raises:
        ModelError: the drafter that was named cannot be found or read.
    """
    if uses_profile and method is None and drafter is None:
        file = profile_file(target, name)
        profile = read_profile(file)
        if profile is not None:
            try:
                proposers = ProposerStore(DrafterStore(name, target, codec, profile.drafter))
                proposers.get(parse_method(profile.method))
                origin = f"from the profile of {profile.made}, {file}"
                return Choice(proposers.drafters.completed(profile.method), proposers, profile.drafter, origin)
            except OutpaceError as error:  # a drafter or a file that is gone
                _ignored(file, str(error))
    drafters = DrafterStore(name, target, codec, drafter)
    if method is not None:
        return Choice(drafters.completed(method), ProposerStore(drafters), drafter, "named")
    chosen = drafters.default_method()
    return Choice(chosen, ProposerStore(drafters), drafter, _origin(parse_method(chosen), drafters))


def _origin(spec: MethodSpec, drafters: DrafterStore) -> str:
    """The default in words, with the shipped files that it drafts with."""
    found, used = drafters.shipment, []
    if drafters.named_kind is None and spec.drafter in found.drafters:
        used.append(f"{found.target}/{spec.drafter}")
    if found.transitions is not None and isinstance(spec.options, OutpaceOptions):  # other methods begin with none
        used.append(f"the transitions of {found.target}")
    return f"the default, with {' and '.join(used)}, which ship" if used else "the default"


# Methods here by vLLM's names. vLLM drafts chains only, of num_speculative_tokens each. Its ngram also drafts where
# fewer tokens than that followed the match; prompt lookup then tries a shorter suffix.
ROWS = {"eagle3": "eagle3", "dflash": "dflash", "draft_model": "linear", "medusa": "medusa", "ngram": "lookup"}
# The lengths of suffixes that prompt lookup tries, and vLLM's keys for them.
LOOKUP_SIZES = {"prompt_lookup_max": MAX_NGRAM, "prompt_lookup_min": 1}


def from_speculative_config(config: Any, **given: Any) -> tuple[str, str | None]:
    """The method, with its options, and the drafter that a speculative config asks for.

    Args:
        config: vLLM's JSON as an object; null counts as absent, as in vLLM.
        **given: arguments of our own with the same meaning, such as method, drafter and budget; all must be None.

    Raises:
        InvalidRequest: something given twice; a key, method or value that has no equal here, by name.
    """
    if not isinstance(config, Mapping):
        raise InvalidRequest(f"speculative_config={shown(config)}: must be a JSON object")
    for name, value in given.items():
        if value is not None:
            both = f"{name}={shown(value)} and speculative_config={shown(dict(config))}"
            raise InvalidRequest(f"{both} were both given: leave one of them out")
    stated = {key: value for key, value in config.items() if value is not None}
    method = _need(stated, "method", "vLLM would guess it from the model's name")
    row = ROWS.get(method) if isinstance(method, str) else None
    if row is None:
        raise InvalidRequest(
            f"speculative_config: method={shown(method)}: no method here is equivalent; choose one of {', '.join(ROWS)}"
        )
    keys = tuple(LOOKUP_SIZES) if method == "ngram" else ("model",)
    taken = ("method", "num_speculative_tokens", *keys)
    for key, value in stated.items():
        if key not in taken:
            raise InvalidRequest(
                f"speculative_config: {key}={shown(value)}: method {method!r} does not take it here; leave it out and "
                f"give {', '.join(taken)} alone"
            )
    count = _need(stated, "num_speculative_tokens", "vLLM would look for it in the drafter's config")
    if type(count) is not int or count < 1:
        raise InvalidRequest(
            f"speculative_config: num_speculative_tokens={shown(count)}: must be a whole number from 1 on"
        )
    for key in keys:
        _check(key, _need(stated, key, f"method {method!r} needs it"))
    chain = "shape=chain," if "shape" in methods()[row].options.model_fields else ""
    text = f"{row}:{chain}budget={count}"
    parse_method(text)  # now, so that a budget beyond ours is refused before anything is loaded
    return text, stated.get("model")


def _need(stated: Mapping[str, Any], key: str, why: str) -> Any:
    if key not in stated:
        raise InvalidRequest(f"speculative_config: {key} is missing ({why}); state it")
    return stated[key]


def _check(key: str, value: Any) -> None:
    if key == "model" and (not isinstance(value, str) or not value):
        raise InvalidRequest(f"speculative_config: model={shown(value)}: must be a folder or a hub id")
    wanted = LOOKUP_SIZES.get(key)
    if wanted is not None and (type(value) is not int or value != wanted):
        raise InvalidRequest(
            f"speculative_config: {key}={shown(value)}: prompt lookup tries suffixes of {MAX_NGRAM} tokens down to 1 "
            f"here; only {key}={wanted} is the same"
        )
