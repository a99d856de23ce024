"""Settings of a training run: a method's recipe, a YAML file over it, dotted options over both."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from outpace.core.params import MAX_SEED
from outpace.lib.checks import shown
from outpace.lib.errors import InvalidRequest
from outpace.lib.paths import path_of


class Section(BaseModel):
    """A part of the settings. YAML reads 6e-4 as text, so that numbers may come as such."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataSettings(Section):
    """Which sequences.

    Attributes:
        max_length: tokens of a sequence; longer ones are cut at the end.
        held_out: prompts to measure on and not to train on. Half of them choose which drafter is kept, the other half
            give the figures that are shown.
        workers: processes that read ahead; worth it where features were captured before.
    """

    max_length: int = Field(default=3072, ge=8)
    held_out: int = Field(default=64, ge=2)
    workers: int = Field(default=0, ge=0, le=64)


class RegenerateSettings(Section):
    """How the target answers where no answers are given; as in `outpace train regenerate`."""

    max_new_tokens: int = Field(default=512, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    batch_size: int = Field(default=32, ge=1)


class TrainingSettings(Section):
    """The trainer.

    Attributes:
        epochs: passes over the data; `max_steps` ends earlier.
        max_steps: optimizer steps at most; None for as many as the epochs take. The schedule ends with them.
        batch_size: sequences per optimizer step, of all processes together.
        micro_batch_size: sequences per forward pass of one process.
        optimizer: "adamw", as all the authors do, or "muon" for matrices and AdamW for the rest, which gets further in
            short runs (docs/log.md).
        learning_rate: at its highest, after the warm-up; cosine to zero.
        warmup_ratio: of all steps.
        betas, weight_decay: of AdamW.
        clip: largest norm of the gradient.
        precision: of the forward pass; weights and optimizer are float32. "auto" takes bfloat16 where the hardware
            computes in it.
        evaluate_every: steps between measurements on held-out sequences; one more is made at the end.
        save_every: steps between states that a killed run goes on from.
        keep: states to keep.
        patience: measurements without a better one before training stops; None to go on to the end. They count from
            where the objective has become what it is to be: in Domino's curriculum, where lambda is small.
        min_gain: what counts as better, in tokens per step.
        dtype: of the drafter's files.
        seed: of weights, order and anchors.
    """

    epochs: float = Field(default=6.0, gt=0)
    max_steps: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=16, ge=1)
    micro_batch_size: int = Field(default=2, ge=1)
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(default=6e-4, gt=0)
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    evaluate_every: int = Field(default=500, ge=1)
    save_every: int = Field(default=500, ge=1)
    keep: int = Field(default=2, ge=1)
    patience: int | None = Field(default=None, ge=1)
    min_gain: float = Field(default=0.0, ge=0)
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    seed: int = Field(default=0, ge=0, le=MAX_SEED)


class TrainSettings(Section):
    """Everything a run depends on, besides target, prompts and answers.

    Attributes:
        net: sizes of the drafter; the method's own fields.
        objective: its loss; the method's own fields.
        data, regenerate, training: the same for all methods.
    """

    net: BaseModel
    objective: BaseModel
    data: DataSettings = DataSettings()
    regenerate: RegenerateSettings = RegenerateSettings()
    training: TrainingSettings = TrainingSettings()


def assemble(
    net: type[BaseModel],
    objective: type[BaseModel],
    recipe: Mapping[str, Any],
    file: str | Path | None,
    overrides: Iterable[str],
) -> TrainSettings:
    """Settings of a run.

    Args:
        net, objective: the method's sections.
        recipe: the method's defaults, a section's fields by its name.
        file: YAML, or None.
        overrides: "section.field=value", the value as in YAML.

    Raises:
        InvalidRequest: a file that cannot be read, an unknown key, a value that does not fit.
    """
    kind = create_model(
        "Settings",
        __base__=TrainSettings,
        net=(net, Field(default_factory=net)),
        objective=(objective, Field(default_factory=objective)),
    )
    given: dict[str, Any] = {}
    for source, values in (("recipe", recipe), (f"config={str(file)!r}", _read(file)), *map(_parse, overrides)):
        _merge(given, values, source)
    try:
        return kind.model_validate(given)
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


def _merge(into: dict[str, Any], values: Mapping[str, Any], source: str) -> None:
    for section, fields in values.items():
        if not isinstance(fields, Mapping):
            raise InvalidRequest(f"{source}: {section} must be a section with fields, not {shown(fields)}")
        into[section] = {**into.get(section, {}), **fields}


def _complaint(kind: type[BaseModel], detail: Any) -> str:
    where = [str(part) for part in detail["loc"]]
    if detail["type"] == "extra_forbidden":
        model: Any = kind
        for part in where[:-1]:
            model = model.model_fields[part].annotation
        return f"{'.'.join(where)}: no such setting; there are {', '.join(sorted(model.model_fields))}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{'.'.join(where)}={shown(detail['input'])}: {message[0].lower()}{message[1:]}"
