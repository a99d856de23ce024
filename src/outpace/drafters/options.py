"""The options of each method, typed and checked."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from outpace.drafters.common_options import MAX_BUDGET, FillOptions, Options, PlainOptions, first_complaint
from outpace.drafters.frequency import EVERY_ID
from outpace.shaping.beam import BeamConfig, SearchConfig
from outpace.shaping.cut import CutConfig
from outpace.shaping.ddd import DddConfig
from outpace.shaping.dynatree import DynaTreeConfig
from outpace.shaping.echo import EchoConfig
from outpace.shaping.fixed import BaselineTreeConfig, FixedTreeConfig
from outpace.shaping.gates import GatedConfig
from outpace.shaping.svip import SvipConfig

# SAM-Decoding's published constants (arXiv 2411.10666).
THRESHOLD, BIAS = 5, 5
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


class RecycleOptions(Options):
    """Options of Token Recycling.

    Attributes:
        shape: which tree.
        context: tokens that a row of the transition matrix is keyed by: 1, as in the paper, or 2, which backs off to 1
            where a pair was not seen.
        matrix: "shared" by all requests; "private": each learns for itself, in as much memory again (64 bytes per token
            of the vocabulary, and 5.2 MB with context=2). Sampled requests that are verified by rejection always do,
            from `warm` alone.
        warm: file of the transitions to start from, and to return to when what was learned is forgotten, made by
            `outpace warmup`; None for none.
    """

    shape: Literal["template", "chain"] = "template"
    context: int = Field(default=1, ge=1, le=2)
    matrix: Literal["shared", "private"] = "shared"
    warm: str | None = None


class SamdOptions(Options):
    """Options of SAM-Decoding.

    Attributes:
        tree: the method that drafts where no match is long enough, with its own defaults but for the budget.
        corpus: file of texts to match in beside the request's own, made by `outpace tokenize-corpus`; None for none.
        threshold: the least length of a match that is drafted from.
        bias: by which a match in the corpus must be longer than one in the request's own text.
    """

    tree: Literal["recycle", "eagle3", "dflash", "domino"] = "recycle"
    corpus: str | None = None
    threshold: int = Field(default=THRESHOLD, ge=1)
    bias: int = Field(default=BIAS, ge=0)

    @model_validator(mode="after")
    def _check_corpus(self) -> "SamdOptions":
        if self.corpus is None and "bias" in self.model_fields_set:
            raise ValueError(f"bias={self.bias}: does nothing without a corpus; name one with corpus=FILE")
        return self

    @property
    def drafts_with(self) -> str:
        """The method that drafts for it."""
        return self.tree


_OF_DRAFT = ("drafted", "depth", "beam", "enough", "vocabulary")
_OF_TRANSITIONS = ("context", "matrix", "warm")


class OutpaceOptions(Options):
    """Options of the union.

    Attributes:
        draft: what drafts: "linear" is a draft model, or the target's own first layers, a pass for each depth; "none"
            for nothing.
        drafted: nodes that it drafts at most.
        depth, beam: of its beam: drafted tokens on a path, and nodes of a level that are expanded.
        retrieve: what names tokens beside it: "matrix", the target's transitions; "text", what followed the same words
            in the request's own ids; "both"; "none".
        floor: least probability of acceptance that earns a slot; 0 uses the whole budget. Alone every slot pays; where
            rows are dear, as in large batches on a CPU, about 0.5 keeps a batch from being slower than plain.
        enough: tokens that must be expected from retrieval alone for a round to do without a draft; 0 drafts always.
        noise: draft, and price what was retrieved, by the request's keyed noise at temperature > 0.
        vocabulary: as in `ModelOptions`.
        context, matrix, warm: as in `RecycleOptions`; requests that learn for themselves do so of what tokens are
            worth, too.
    """

    draft: Literal["domino", "dflash", "eagle3", "linear", "none"] = "domino"
    drafted: int = Field(default=15, ge=1, le=MAX_BUDGET)
    depth: int = Field(default=3, ge=1, le=64)
    beam: int = Field(default=10, ge=1, le=64)
    retrieve: Literal["both", "matrix", "text", "none"] = "both"
    floor: float = Field(default=0.0, ge=0, lt=1)
    enough: float = Field(default=3.0, ge=0)
    noise: bool = True
    vocabulary: str | None = None
    context: int = Field(default=2, ge=1, le=2)
    matrix: Literal["shared", "private"] = "shared"
    warm: str | None = None

    @model_validator(mode="after")
    def _check_draft(self) -> "OutpaceOptions":
        if self.draft == "none":
            for name in self.model_fields_set.intersection(_OF_DRAFT):
                raise ValueError(f"{name}={getattr(self, name)}: does nothing with draft=none; choose a draft")
        idle = {"none": (*_OF_TRANSITIONS, "enough"), "text": _OF_TRANSITIONS}.get(self.retrieve, ())
        for name in self.model_fields_set.intersection(idle):
            raise ValueError(
                f"{name}={getattr(self, name)}: does nothing with retrieve={self.retrieve}; choose another retrieve"
            )
        return self

    @property
    def drafts_with(self) -> str:
        """The method that drafts for it."""
        return "plain" if self.draft == "none" else self.draft


class LookaheadOptions(Options):
    """Options of lookahead decoding, whose sizes follow from the budget.

    Attributes:
        pool_from_prompt: n-grams of prompt and answer go into the pool too.
    """

    pool_from_prompt: bool = False


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


AnyOptions = Options | PlainOptions


def option_names(kind: type[AnyOptions], shape: str | None = None) -> list[str]:
    """The options that a method takes with a shape; None for the method's own."""
    names = list(kind.model_fields)
    if issubclass(kind, ModelOptions):
        tree = kind.trees.get(shape or kind.model_fields["shape"].default)
        names += list(tree.model_fields) if tree else []
    return names
