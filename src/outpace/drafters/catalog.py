"""The methods by name: source x shape, with typed options. A new method is one file with its source and one entry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from outpace.core.errors import InvalidRequest
from outpace.core.protocols import Proposer
from outpace.drafters import trained
from outpace.drafters.common_options import Options, PlainOptions, first_complaint
from outpace.drafters.corpus import load_corpus
from outpace.drafters.draft_lm import DraftLM
from outpace.drafters.evidence import Evidence, priors
from outpace.drafters.fills import filled
from outpace.drafters.lookahead import Lookahead
from outpace.drafters.lookup import CONTINUATION, PromptLookup
from outpace.drafters.model_options import (
    DartOptions,
    DddOptions,
    DominoOptions,
    DynaTreeOptions,
    EagleOptions,
    EchoOptions,
    FixedOptions,
    FrSpecOptions,
    GraftDFlashOptions,
    GraftDominoOptions,
    GraftOptions,
    LinearOptions,
    MedusaOptions,
    ModelOptions,
    SvipOptions,
    TrainedOptions,
)
from outpace.drafters.options import (
    AnyOptions,
    LookaheadOptions,
    OutpaceOptions,
    RecycleOptions,
    SamdOptions,
    option_names,
)
from outpace.drafters.recycle import TokenRecycling
from outpace.drafters.retrieval import JoinedFill
from outpace.drafters.samd import SamDecoding
from outpace.drafters.shelf import LANGUAGE_MODEL, Shelf
from outpace.drafters.surroundings import Surroundings
from outpace.drafters.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.drafters.union import Union, UnionPlan
from outpace.drafters.warm_file import load_matrix
from outpace.models.shipped import shipped_for
from outpace.nets.dart import DartNet
from outpace.nets.dflash import DFlashNet
from outpace.nets.domino import DominoNet
from outpace.nets.eagle3 import Eagle3Net
from outpace.nets.medusa import MedusaNet
from outpace.shaping.dynatree import DynaTree, DynaTreeConfig
from outpace.shaping.fixed import FixedTreeConfig
from outpace.shaping.grafted import GraftedProposer
from outpace.shaping.growing import GrowingProposer
from outpace.shaping.proposer import EmptyDraft, StaticProposer
from outpace.shaping.rank_paths import Chain, RecyclingTemplate
from outpace.shaping.svip import SvipConfig


def _plain(options: Any, around: Surroundings) -> Proposer:
    return EmptyDraft()


def _lookup(options: Options, around: Surroundings) -> Proposer:
    return PromptLookup(CONTINUATION if options.budget is None else options.budget)


def _recycle(options: RecycleOptions, around: Surroundings) -> Proposer:
    budget = around.default_budget(6, 80) if options.budget is None else options.budget
    matrix = load_matrix(options.warm, around.vocab_size, around.device, options.context)
    source = TokenRecycling(matrix, options.matrix == "private")
    shape = Chain() if options.shape == "chain" else RecyclingTemplate()
    return StaticProposer(source, shape, budget, around.device)


def _samd(options: SamdOptions, around: Surroundings) -> Proposer:
    budget = around.default_budget(10, 60) if options.budget is None else options.budget
    tree = METHODS[options.tree]
    shape = {"shape": "beam"} if options.tree in ("dflash", "domino") else {}  # by themselves these draft chains
    other = tree.build(tree.options.model_validate({"budget": budget, **shape}), around)
    corpus = None if options.corpus is None else load_corpus(options.corpus, around.vocab_size)
    return SamDecoding(other, budget, corpus, options.threshold, options.bias)


def _outpace(options: OutpaceOptions, around: Surroundings) -> Proposer:
    budget = around.default_budget(15, 60) if options.budget is None else options.budget
    base: Proposer = EmptyDraft()
    if options.draft != "none":
        of_draft = options.model_dump(include={"depth", "beam", "noise", "vocabulary"}) | {"top_k": options.beam}
        method = METHODS[options.draft]
        of_draft |= {"shape": "beam", "budget": budget}
        if options.noise:
            of_draft["calibration"] = "off"  # prices of its own weigh keyed scores
        base = method.build(method.options.model_validate(of_draft), around)
    may_skip = options.enough > 0 and "none" not in (options.draft, options.retrieve)  # and has something to skip
    plan = UnionPlan(
        options.drafted,
        options.floor,
        options.enough if may_skip else None,
        options.retrieve in ("both", "matrix"),
        options.retrieve in ("both", "text"),
        options.noise,
    )
    transitions = load_matrix(options.warm, around.vocab_size, torch.device("cpu"), options.context)
    matrix = MatrixLearner(transitions, options.matrix == "private")
    greedy, sampled, rejected = (Evidence(priors()[kind]) for kind in ("greedy", "sampled", "rejected"))
    return Union(base, matrix, greedy, sampled, plan, budget, around.device, rejected)


def _lookahead(options: LookaheadOptions, around: Surroundings) -> Proposer:
    budget = around.default_budget(15, 60) if options.budget is None else options.budget
    return Lookahead(budget, options.pool_from_prompt)


def _draft_lm(options: ModelOptions, around: Surroundings) -> Proposer:
    vocabulary = around.ranked_vocabulary(options.vocabulary)
    source = DraftLM(around.draft_model(), around.vocab_size, options.noise, vocabulary)
    tree = options.tree()
    if isinstance(tree, SvipConfig):
        budget = tree.depth
    elif isinstance(tree, FixedTreeConfig | DynaTreeConfig):
        budget = around.default_budget(15, 255)
    else:
        budget = around.default_budget(4, 8) if tree is None else around.default_budget(15, 60)
    return trained.shaped(source, options, around, budget)


@dataclass(frozen=True)
class Method:
    """A row of the table source x shape x fill.

    Attributes:
        build: makes its proposer.
        options: that it takes.
        summary: in words.
        drafter: kind of the drafter it drafts with; None if it needs none.
    """

    build: Callable[[Any, Surroundings], Proposer]
    options: type[AnyOptions]
    summary: str
    drafter: str | None = None


METHODS = {
    "plain": Method(_plain, PlainOptions, "no drafts: the baseline, on the same engine"),
    "lookup": Method(_lookup, Options, "prompt lookup: what followed the same words before"),
    "recycle": Method(_recycle, RecycleOptions, "Token Recycling: the target's runner-up tokens"),
    "samd": Method(_samd, SamdOptions, "SAM-Decoding: what followed the longest match, else another method's tree"),
    "lookahead": Method(_lookahead, LookaheadOptions, "lookahead decoding: n-grams of the target's Jacobi trajectory"),
    "linear": Method(
        _draft_lm, LinearOptions, "a draft model's chain, or any tree: classic speculative decoding", LANGUAGE_MODEL
    ),
    "fixed": Method(_draft_lm, FixedOptions, "a draft model's tree of fixed depth and breadth", LANGUAGE_MODEL),
    "dynatree": Method(
        _draft_lm, DynaTreeOptions, "DynaTree: a draft model's tree that follows its confidence", LANGUAGE_MODEL
    ),
    "svip": Method(
        _draft_lm, SvipOptions, "SVIP: a draft model's chain that ends where it is in doubt", LANGUAGE_MODEL
    ),
    "eagle3": Method(trained.eagle3, EagleOptions, "EAGLE-3: the target's features extended token by token", "eagle3"),
    "fr-spec": Method(trained.fr_spec, FrSpecOptions, "FR-Spec: EAGLE-3 that drafts only frequent tokens", "eagle3"),
    "ddd": Method(trained.ddd, DddOptions, "DDD: EAGLE-3's beam, deeper while it holds much probability", "eagle3"),
    "echo": Method(trained.echo, EchoOptions, "ECHO: EAGLE-3's beam; doubtful drafts lend their slots", "eagle3"),
    "graft": Method(trained.graft, GraftOptions, "Graft: EAGLE-3's beam, pruned in doubt, and retrieval", "eagle3"),
    "dart": Method(trained.dart, DartOptions, "DART: all depths from one pass over mask rows", "dart"),
    "medusa": Method(
        trained.medusa, MedusaOptions, "Medusa: heads on the target's last state guess all depths", "medusa"
    ),
    "dflash": Method(trained.dflash, TrainedOptions, "DFlash: a block of drafts in one pass", "dflash"),
    "domino": Method(trained.domino, DominoOptions, "Domino: DFlash's block, corrected causally", "domino"),
    "graft-dflash": Method(
        trained.dflash, GraftDFlashOptions, "Graft on DFlash: retrieval behind what is sure of a block", "dflash"
    ),
    "graft-domino": Method(trained.domino, GraftDominoOptions, "Graft on Domino, the same", "domino"),
    "outpace": Method(
        _outpace, OutpaceOptions, "the union: drafts, transitions and matches, the likeliest first", "domino"
    ),
}
BEST = {"smollm2-135m": "outpace"}
"""What targets with shipped drafters draft with by default: the fastest on prompts kept for it (docs/log.md)."""
BEST_FOR: dict[type[nn.Module], str] = {
    DominoNet: "outpace",
    DFlashNet: "outpace:draft=dflash",
    Eagle3Net: "outpace:draft=eagle3",
    MedusaNet: "medusa",
    DartNet: "dart",
}
"""The same where a drafter net is named."""
FOR_LANGUAGE_MODELS = "outpace:draft=linear"
WITHOUT_DRAFTER = "outpace:draft=none"


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options, as in "recycle:budget=8,shape=chain": a key of METHODS and its checked options."""

    name: str
    options: AnyOptions

    @property
    def budget(self) -> int | None:
        return self.options.budget

    @property
    def drafter(self) -> str | None:
        """Kind of the drafter it drafts with; None if it needs none."""
        return METHODS[getattr(self.options, "drafts_with", self.name)].drafter

    @property
    def uses_draft_model(self) -> bool:
        return self.drafter == LANGUAGE_MODEL


def parse_method(text: str) -> MethodSpec:
    """Read "name" or "name:option=value,option=value".

    Raises:
        InvalidRequest: unknown method or option, or a bad value.
    """
    name, _, rest = text.strip().partition(":")
    if name not in METHODS:
        raise InvalidRequest(f"method={text!r}: unknown; choose one of {', '.join(METHODS)}")
    kind = METHODS[name].options
    items = [item.partition("=") for item in filter(None, rest.split(","))]
    known = option_names(kind, next((value for option, _, value in items if option == "shape"), None))
    given: dict[str, str] = {}
    for option, equals, value in items:
        if not equals or option not in known:
            takes = f"takes {', '.join(known)} (name:option=value)" if known else "takes no options"
            raise InvalidRequest(f"method={text!r}: {name} {takes}, not {option + equals + value!r}")
        if option in given:
            raise InvalidRequest(f"method={text!r}: {option} is given twice")
        given[option] = value
    try:
        return MethodSpec(name, kind.model_validate(given))
    except ValidationError as error:
        raise InvalidRequest(f"method={text!r}: {first_complaint(error)}") from error


def default_method(target: str, shelf: Shelf) -> str:
    """The method to take where none is named: the best for the drafter net that was named, or for those that ship with
    the target, else what needs none. Chosen by speed on a CPU (docs/log.md).

    Args:
        target: the name it is loaded by.
        shelf: its drafters.
    """
    if shelf.is_named:
        net = shelf.named_net
        return next((method for kind, method in BEST_FOR.items() if isinstance(net, kind)), FOR_LANGUAGE_MODELS)
    best = BEST.get(target)
    return WITHOUT_DRAFTER if best is None or parse_method(best).drafter not in shipped_for(target) else best


def shelved_proposer(spec: MethodSpec, shelf: Shelf) -> Proposer:
    """The proposer of a method with the drafter of its kind."""
    return build_proposer(spec, shelf.around(spec.drafter))


def build_proposer(spec: MethodSpec, around: Surroundings) -> Proposer:
    """The proposer of a method, with state of its own."""
    return filled(METHODS[spec.name].build(spec.options, around), spec.options, around)


def matrix_of(proposer: Proposer) -> TransitionMatrix | None:
    """The transition matrix that a proposer keeps from request to request; None if it keeps none."""
    reader: Any = None
    if isinstance(proposer, GraftedProposer):
        reader = proposer.fill
        reader = reader.fills[-1] if isinstance(reader, JoinedFill) else reader
    elif isinstance(proposer, Union):
        reader = proposer.matrix
    elif isinstance(proposer, StaticProposer):
        reader = proposer.source
    return reader.matrix if isinstance(reader, MatrixLearner) and not reader.private else None


def learns(proposer: Proposer) -> bool:
    """Whether what a proposer drafts depends on the requests it had before."""
    if isinstance(proposer, SamDecoding):
        return learns(proposer.other)
    base = proposer.base if isinstance(proposer, GraftedProposer) else proposer
    shape = base.shape if isinstance(base, GrowingProposer) else None
    carries = isinstance(shape, DynaTree) and shape.config.history == "authors"
    return carries or matrix_of(proposer) is not None
