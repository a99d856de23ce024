"""The options of each method, typed and checked."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outpace.shaping.dynatree import DynaTreeConfig
from outpace.shaping.fixed import FixedTreeConfig

MAX_BUDGET = 511


class Options(BaseModel):
    """Options of every method.

    Attributes:
        budget: drafted nodes per round; None for the method's default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget: int | None = Field(default=None, ge=0, le=MAX_BUDGET)


class PlainOptions(BaseModel):
    """Plain decoding has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def budget(self) -> int | None:
        return None


class RecycleOptions(Options):
    shape: Literal["template", "chain"] = "template"


class LinearOptions(Options):
    """Options of whatever drafts with a model.

    Attributes:
        noise: draft with the request's keyed noise at temperature > 0.
        vocabulary: file of the only ids to draft, made by `outpace rank-vocabulary`; None for all.
    """

    noise: bool = True
    vocabulary: str | None = None


class FixedOptions(FixedTreeConfig, LinearOptions):
    pass


class DynaTreeOptions(DynaTreeConfig, LinearOptions):
    pass


class NetOptions(LinearOptions):
    """Options of whatever drafts with a trained net.

    Attributes:
        shape: which tree; "fixed" and "dynatree" with their usual settings.
        depth: of the beam, and of DART's search, which is one.
        top_k: children per node there; None for the shape's own number.
    """

    shape: str = "chain"
    depth: int = Field(default=8, ge=1, le=64)
    top_k: int | None = Field(default=None, ge=1, le=64)


class TrainedOptions(NetOptions):
    shape: Literal["chain", "beam", "fixed", "dynatree"] = "chain"


class EagleOptions(TrainedOptions):
    shape: Literal["chain", "beam", "fixed", "dynatree"] = "beam"


class DartOptions(NetOptions):
    """Options of DART; "search" is its authors' tree search.

    Attributes:
        ngrams: file of the n-grams that say what continues a path, made by `outpace count-ngrams`; None for none.
    """

    shape: Literal["search", "chain", "beam", "fixed", "dynatree"] = "search"
    ngrams: str | None = None


class FrSpecOptions(EagleOptions):
    """EAGLE-3's, with a vocabulary that must be given."""

    @model_validator(mode="after")
    def _check(self) -> "FrSpecOptions":
        if self.vocabulary is None:
            raise ValueError("vocabulary=FILE is missing; make one with `outpace rank-vocabulary`")
        return self


class MedusaOptions(NetOptions):
    """Options of Medusa; "template" is its static tree of 63 nodes."""

    shape: Literal["template", "chain", "beam", "fixed", "dynatree"] = "template"


class DominoOptions(TrainedOptions):
    """Options of Domino.

    Attributes:
        every_position: with shifted labels draft B tokens per block, as the authors do, instead of B - 1.
        pool: ids per block that get a correction; 0 for the whole vocabulary, None for 2048 on a CPU and all elsewhere.
    """

    every_position: bool = False
    pool: int | None = Field(default=None, ge=0)


AnyOptions = Options | PlainOptions
