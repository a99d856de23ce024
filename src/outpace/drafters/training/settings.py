"""Settings of a training run: a method's recipe, a YAML file over it, dotted options over both."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from outpace.core.params import MAX_SEED
from outpace.lib.checks import path_of, shown
from outpace.lib.errors import InvalidRequest
from outpace.lib.strict import StrictSettings

if TYPE_CHECKING:
    from outpace.drafters.kind import Training

M = TypeVar("M", bound=BaseModel)
Beta = Annotated[float, Field(ge=0, lt=1)]


TIMES = {"evaluate_every": 4, "save_every": 10}  # how often a short run does each


class Section(StrictSettings):
    """A part of the settings. YAML reads 6e-4 as text, so numbers may come as text."""

    model_config = ConfigDict(allow_inf_nan=False)


class DataSettings(Section):
    """Which sequences to train on."""

    max_length: int = Field(default=3072, ge=8, description="Tokens of a sequence; longer ones are cut.")
    held_out: int = Field(
        default=64,
        ge=2,
        description="Prompts to measure on and not to train on: half choose which drafter is kept, half are reported. "
        "By default at most a fifth.",
    )
    workers: int = Field(default=0, ge=0, le=64, description="Processes that read ahead; useful for captured features.")

    def held_out_of(self, prompts: int) -> int:
        """Number of prompts to hold out, out of this many: the setting if it was given; else at most a fifth, but at
        least two."""
        return self.held_out if "held_out" in self.model_fields_set else min(self.held_out, max(prompts // 5, 2))


class RegenerateSettings(Section):
    """How the target answers prompts, in `outpace train regenerate` and in a run without answers; fields without a
    description are those of `SamplingParams`."""

    max_new_tokens: int = Field(default=512, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Key of the sampling noise.")
    batch_size: int = Field(default=32, ge=1, description="Conversations at a time.")


class TrainingSettings(Section):
    """The trainer."""

    epochs: float = Field(default=6.0, gt=0, description="Passes over the data; max_steps may end training earlier.")
    max_steps: int | None = Field(
        default=None, ge=1, description="Maximum number of optimizer steps; the schedule ends there."
    )
    batch_size: int = Field(default=16, ge=1, description="Sequences per optimizer step, of all processes together.")
    micro_batch_size: int = Field(default=2, ge=1, description="Sequences per forward pass of one process.")
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="adamw, as all authors use, or muon for matrices and AdamW for the rest, which learns more in "
        "short runs (docs/training.md).",
    )
    learning_rate: float = Field(default=6e-4, gt=0, description="After the warm-up.")
    schedule: Literal["cosine", "wsd"] = Field(
        default="cosine",
        description="cosine: falls to zero; wsd: stays constant and falls to a tenth over the last fifth, so that a "
        "run may resume with more epochs or max_steps.",
    )
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1, description="Fraction of all steps.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="Of AdamW.")
    weight_decay: float = Field(default=0.0, ge=0, description="Of AdamW and Muon.")
    clip: float = Field(default=1.0, gt=0, description="Largest norm of the gradient.")
    precision: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="Of the forward pass; weights and optimizer are float32. auto is bfloat16 where the hardware "
        "multiplies it.",
    )
    evaluate_every: int = Field(
        default=500,
        ge=1,
        description="Steps between measurements on held-out prompts. By default at most a quarter of all.",
    )
    save_every: int = Field(
        default=500,
        ge=1,
        description="Steps between states that an interrupted run resumes from. By default at most a tenth of all.",
    )
    keep: int = Field(default=2, ge=1, description="States to keep.")
    dtype: Literal["bfloat16", "float32", "float16"] = Field(default="bfloat16", description="Of the drafter's files.")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Of weights, order and anchors.")

    def steps_between(self, name: str, steps: int) -> int:
        """The setting `evaluate_every` or `save_every` for a run of this many steps: as given; else small enough that
        short runs do it several times too."""
        every: int = getattr(self, name)
        return every if name in self.model_fields_set else min(every, -(-steps // TIMES[name]))


class TrainSettings(Section):
    """Everything a run depends on besides target, prompts and answers; `net` and `objective` are the method's own."""

    net: BaseModel
    objective: BaseModel
    data: DataSettings = DataSettings()
    regenerate: RegenerateSettings = RegenerateSettings()
    training: TrainingSettings = TrainingSettings()


def training_of(kind: str) -> "Training":
    """How a kind of drafter is trained."""
    from outpace.drafters.kinds import kinds  # imports all networks, which settings do not need

    trained = {name: row.training for name, row in kinds().items() if row.training is not None}
    if kind not in trained:
        raise InvalidRequest(f"method={kind!r}: cannot be trained; choose one of {', '.join(trained)}")
    return trained[kind]()


def merged_settings(kind: str, file: str | Path | None, overrides: Iterable[str]) -> TrainSettings:
    """A kind's recipe, overridden by a YAML file, overridden by dotted options."""
    training = training_of(kind)
    net, objective = training.net_settings, training.objective_settings
    settings = create_model(
        "Settings",
        __base__=TrainSettings,
        net=(net, Field(default_factory=net)),
        objective=(objective, Field(default_factory=objective)),
    )
    given: dict[str, Any] = {}
    sources = ("recipe", training.recipe), (f"config={str(file)!r}", _read(file)), *map(_parse, overrides)
    for source, values in sources:
        for section, fields in values.items():
            if not isinstance(fields, Mapping):
                raise InvalidRequest(f"{source}: {section} must be a section with fields, not {shown(fields)}")
            given[section] = {**given.get(section, {}), **fields}
    return validated(settings, given)


def validated(kind: type[M], values: Mapping[str, Any]) -> M:
    """Settings of a class."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise InvalidRequest("; ".join(_complaint(kind, detail) for detail in error.errors())) from error


def _read(file: str | Path | None) -> Mapping[str, Any]:
    if file is None:
        return {}
    try:
        content = yaml.safe_load(path_of(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InvalidRequest(f"config={str(file)!r}: cannot be read as YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InvalidRequest(f"config={str(file)!r}: must hold sections such as 'training:'")
    return content


def _parse(override: str) -> tuple[str, Mapping[str, Any]]:
    name, equals, text = override.partition("=")
    path = name.split(".")
    if not equals or len(path) != 2 or not all(path):
        raise InvalidRequest(f"{shown(override)}: settings are given as section.field=value, as in training.epochs=3")
    try:
        value = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise InvalidRequest(f"{shown(override)}: the value is not YAML: {error}") from error
    return override, {path[0]: {path[1]: value}}


def _complaint(kind: type[BaseModel], detail: Any) -> str:
    where = [str(part) for part in detail["loc"]]
    if detail["type"] == "extra_forbidden":
        model: Any = kind
        for part in where[:-1]:
            model = model.model_fields[part].annotation
        return f"{'.'.join(where)}: no such setting; there are {', '.join(sorted(model.model_fields))}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{'.'.join(where)}={shown(detail['input'])}: {message[0].lower()}{message[1:]}"
