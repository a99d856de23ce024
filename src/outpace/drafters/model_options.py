"""The options of methods that draft with a model: the settings of their shape are among them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outpace.drafters.options import RetrievalOptions, first_complaint
from outpace.lib.checks import plain
from outpace.trees.shapes.table import shapes

Window = Annotated[
    int | None,
    Field(
        ge=1,
        description="on a CPU, how many of the last tokens the drafter sees, in addition to the first 4, so that "
        "drafting costs the same at any length; by default it sees all, as verification always does",
    ),
]


class ModelOptions(RetrievalOptions):
    """Options of whatever drafts with a model: a language model or a trained net. The settings of its shape are among
    its options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    only: ClassVar[tuple[str, ...]] = ()
    """The shapes it takes, if not all general ones."""
    also: ClassVar[tuple[str, ...]] = ()
    """Shapes it takes besides the general ones."""
    settings_of: ClassVar[Mapping[str, type[BaseModel]]] = {}
    """Settings of a shape, where they are not the shape's own."""

    shape: str = Field(default="chain", description="how the tree grows; its settings are options too")
    noise: bool = Field(
        default=True,
        description="true: at temperature > 0 draft with the random numbers that the target will draw with (under "
        "rejection, draw chains and fixed trees from the drafter's distribution), so that more is accepted; false: "
        "draft the likeliest tokens; at temperature 0 both do the same",
    )
    vocabulary: str | None = Field(
        default=None,
        description="file of the ids that may be drafted, made by `outpace rank-vocabulary`; `all` drafts from every "
        "id; by default the drafter's own file, if it has one",
    )
    calibration: Literal["shared", "off"] = Field(
        default="shared",
        description="what a growing shape compares at temperature > 0: the acceptance rate of a score, learned from "
        "all requests (shared), or the score itself (off)",
    )
    window: Window = None

    @classmethod
    def shape_names(cls) -> tuple[str, ...]:
        """The shapes it takes."""
        return cls.only or tuple(name for name, shape in shapes().items() if shape.is_general or name in cls.also)

    @classmethod
    def settings_kind(cls, shape: str) -> type[BaseModel] | None:
        """The class of a shape's settings; None for a shape without settings, or an unknown one."""
        row = shapes().get(shape)
        return cls.settings_of.get(shape, None if row is None else row.settings)

    @property
    def takes_gates(self) -> bool:
        """Whether the gates of a warm-up's file take effect: they do not if both checkpoints and thresholds are
        named."""
        return self.shape == "gated" and not {"checkpoints", "thresholds"} <= (self.model_extra or {}).keys()

    def shape_settings(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> BaseModel | None:
        """The settings of the shape; None for a shape that has none.

        Args:
            defaults: of settings that the options do not name, where they are not the shape's own.

        Raises:
            ValueError: settings that the shape does not have, or bad ones.
        """
        kind, given = self.settings_kind(self.shape), self.model_extra or {}
        if kind is None:
            if given:
                raise ValueError(f"shape={self.shape} does not take {', '.join(given)}")
            return None
        try:
            return kind.model_validate({**defaults, **given})
        except ValidationError as error:
            raise ValueError(first_complaint(error)) from error

    @property
    def is_calibrated(self) -> bool:
        """Whether its shape reads acceptance rates of keyed scores."""
        return self._compares and self.noise and self.calibration != "off"

    @property
    def _compares(self) -> bool:
        """Whether its shape reads scores as probabilities."""
        return self.settings_kind(self.shape) is not None and shapes()[self.shape].compares

    @model_validator(mode="after")
    def _check_shape(self) -> "ModelOptions":
        if self.shape not in self.shape_names():
            raise ValueError(f"shape={plain(self.shape)}: choose one of {', '.join(self.shape_names())}")
        settings = self.settings_kind(self.shape)
        own = type(self).model_fields
        if settings is not None and (taken := [name for name in settings.model_fields if name in own]):
            raise ValueError(
                f"shape={self.shape}: its settings {', '.join(taken)} have reserved names, those of options of the "
                "method, which would be set instead; give these settings other names in the shape"
            )
        self.shape_settings()
        if not (self._compares and self.noise):
            self.refuse_idle(["calibration"], f"noise={self.noise}" if self._compares else f"shape={self.shape}")
        return self
