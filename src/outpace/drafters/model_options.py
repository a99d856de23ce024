"""The options of methods that draft with a model: the shape's settings are among them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from outpace.drafters.common_options import FillOptions, first_complaint
from outpace.drafters.frequency import EVERY_ID
from outpace.shaping.beam import BeamConfig, SearchConfig
from outpace.shaping.cut import CutConfig
from outpace.shaping.ddd import DddConfig
from outpace.shaping.dynatree import DynaTreeConfig
from outpace.shaping.echo import EchoConfig
from outpace.shaping.fixed import BaselineTreeConfig, FixedTreeConfig
from outpace.shaping.gates import GatedConfig
from outpace.shaping.svip import SvipConfig

TreeConfig = BeamConfig | FixedTreeConfig | DynaTreeConfig | SvipConfig | CutConfig
TREES: dict[str, type[TreeConfig]] = {
    "beam": BeamConfig,
    "search": SearchConfig,
    "fixed": FixedTreeConfig,
    "dynatree": DynaTreeConfig,
    "gated": GatedConfig,
    "ddd": DddConfig,
    "svip": SvipConfig,
    "echo": EchoConfig,
    "cut": CutConfig,
}
"""The shapes that have settings."""
Grown = Literal["beam", "fixed", "dynatree", "gated", "ddd", "svip", "echo", "cut"]
"""The growing shapes that any source with scores takes."""
COMPARING = ("beam", "fixed", "dynatree", "gated", "ddd", "svip", "echo", "cut")
"""The shapes that read scores as probabilities."""


class ModelOptions(FillOptions):
    """Options of whatever drafts with a model: a language model or a trained net. Those of its shape, as in TREES, may
    stand beside its own.

    Attributes:
        shape: which tree.
        noise: draft with the request's keyed noise at temperature > 0. Under rejection that noise says nothing: there
            chains, Medusa's template and fixed trees with prune=expansion are drawn from the drafter's law, with noise
            of their own, unless they are filled; other trees are the likeliest by that law.
        vocabulary: file of the only ids to draft, made by `outpace rank-vocabulary`; "all" for no such limit; None for
            the drafter's own file, if it brings one.
        calibration: what a shape that compares scores with probabilities reads of keyed ones: how often candidates with
            such a score are accepted, as learned from all requests of the method ("shared") or from this one
            ("private"), or the scores themselves ("off").
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    trees: ClassVar[Mapping[str, type[TreeConfig]]] = TREES
    shape: str = "chain"
    noise: bool = True
    vocabulary: str | None = None
    calibration: Literal["shared", "private", "off"] = "shared"

    @property
    def takes_gates(self) -> bool:
        """Where both are named, nothing is left to take."""
        return self.shape == "gated" and not {"checkpoints", "thresholds"} <= (self.model_extra or {}).keys()

    def tree(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> TreeConfig | None:
        """The settings of the shape; None for a shape that has none.

        Args:
            defaults: of settings that the options do not name, where they are not the shape's own.

        Raises:
            ValueError: settings that the shape does not have, or bad ones.
        """
        kind, given = self.trees.get(self.shape), self.model_extra or {}
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
        """Whether its shape reads what keyed scores are worth."""
        return self.shape in COMPARING and self.noise and self.calibration != "off"

    @model_validator(mode="after")
    def _check_tree(self) -> "ModelOptions":
        self.tree()
        if "calibration" in self.model_fields_set and (self.shape not in COMPARING or not self.noise):
            idle = f"noise={self.noise}" if self.shape in COMPARING else f"shape={self.shape}"
            raise ValueError(f"calibration={self.calibration}: does nothing with {idle}; leave it out")
        return self


class LinearOptions(ModelOptions):
    shape: Literal["chain", Grown] = "chain"


class FixedOptions(ModelOptions):
    """DynaTree's baseline; `linear:shape=fixed` also branches at the pending token, and is a level less deep."""

    trees: ClassVar[Mapping[str, type[TreeConfig]]] = {"fixed": BaselineTreeConfig}
    shape: Literal["fixed"] = "fixed"


class DynaTreeOptions(ModelOptions):
    shape: Literal["dynatree"] = "dynatree"


class SvipOptions(ModelOptions):
    shape: Literal["svip"] = "svip"


class TrainedOptions(ModelOptions):
    shape: Literal["chain", Grown] = "chain"


class EagleOptions(TrainedOptions):
    """EAGLE-3.

    Its default tree is its authors' (60, 7, 10): 59 drafted nodes and 8 tokens on the longest path; on a CPU 15 nodes.
    Graft's paper gives EAGLE-3, ECHO and Graft one tree: off the CPU compare with budget=60,depth=9.
    """

    shape: Literal["chain", Grown] = "beam"


class DddOptions(ModelOptions):
    shape: Literal["ddd"] = "ddd"


class EchoOptions(ModelOptions):
    """ECHO, in the tree of Graft's paper; see `GraftOptions`."""

    shape: Literal["echo"] = "echo"


class GraftOptions(ModelOptions):
    """Graft: gates and the matrix; its ablations are other values of `shape`, `fill`, `place` and `reserved`.

    By default 60 drafted nodes, of which a draft that ended keeps 8, 24 or 40, and a depth of 9, the paper's; on a CPU
    15 nodes, in the same proportions, and a depth of 8, as EAGLE-3 has them there.
    """

    shape: Literal["gated", "beam"] = "gated"
    fill: Literal["none", "matrix", "suffix", "both"] = "matrix"


class DartOptions(ModelOptions):
    """Options of DART; "search" is its authors' tree search.

    Attributes:
        ngrams: file of the n-grams that say what continues a path, made by `outpace count-ngrams`; None for none.
    """

    shape: Literal["search", "chain", Grown] = "search"
    ngrams: str | None = None


class FrSpecOptions(EagleOptions):
    """EAGLE-3's, with a vocabulary that the drafter brings or that must be given."""

    @model_validator(mode="after")
    def _check(self) -> "FrSpecOptions":
        if self.vocabulary == EVERY_ID:
            raise ValueError(f"vocabulary={EVERY_ID}: it drafts from a part; use method 'eagle3' to draft from all")
        return self


class MedusaOptions(ModelOptions):
    """Options of Medusa; "template" is its static tree of 63 nodes."""

    shape: Literal["template", "chain", Grown] = "template"


class DominoOptions(TrainedOptions):
    """Options of Domino.

    Attributes:
        every_position: with shifted labels draft B tokens per block, as the authors do, instead of B - 1.
        pool: ids per block that drafts come from; 0 for the whole vocabulary, None for 2048 on a CPU, unless a ranked
            vocabulary is drafted from, and all elsewhere.
    """

    every_position: bool = False
    pool: int | None = Field(default=None, ge=0)


class GraftDFlashOptions(TrainedOptions):
    """Graft on DFlash: a chain cut where it is in doubt, and retrieval behind it (appendix F). As there, it takes no
    more rows than the block: its default budget is what the block drafts, on every device."""

    shape: Literal["cut", Grown] = "cut"
    fill: Literal["none", "matrix", "suffix", "both"] = "matrix"
    place: Literal["root", "tail"] = "tail"


class GraftDominoOptions(GraftDFlashOptions, DominoOptions):
    """The same on Domino."""

    shape: Literal["cut", Grown] = "cut"
