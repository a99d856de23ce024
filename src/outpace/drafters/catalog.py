"""The methods by name: source x shape, with typed options. A new method is one file with its source and one entry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from outpace.core.drafting import GrowingShape, LevelSource, StaticShape
from outpace.core.errors import InvalidRequest, ModelError
from outpace.core.protocols import Proposer
from outpace.drafters.block import BlockSource
from outpace.drafters.continuity import load_continuity
from outpace.drafters.dart import DartSource
from outpace.drafters.draft_lm import DraftLM
from outpace.drafters.eagle3 import EagleSource
from outpace.drafters.frequency import load_vocabulary
from outpace.drafters.lookup import CONTINUATION, PromptLookup
from outpace.drafters.medusa import MedusaSource
from outpace.drafters.options import (
    AnyOptions,
    DartOptions,
    DominoOptions,
    DynaTreeOptions,
    EagleOptions,
    FixedOptions,
    FrSpecOptions,
    LinearOptions,
    MedusaOptions,
    NetOptions,
    Options,
    PlainOptions,
    RecycleOptions,
    TrainedOptions,
)
from outpace.drafters.recycle import TokenRecycling, TransitionMatrix
from outpace.models.draft import DraftModel
from outpace.models.packed import PackedModel
from outpace.nets.dart import DartNet
from outpace.nets.dflash import DFlashNet
from outpace.nets.domino import DominoNet
from outpace.nets.eagle3 import Eagle3Net
from outpace.nets.medusa import MedusaNet
from outpace.shaping.beam import Beam, BeamConfig, SearchConfig
from outpace.shaping.dynatree import DynaTree, DynaTreeConfig
from outpace.shaping.fixed import FixedTree, FixedTreeConfig
from outpace.shaping.growing import GrowingProposer
from outpace.shaping.proposer import EmptyDraft, StaticProposer
from outpace.shaping.rank_paths import MEDUSA_NODES, Chain, MedusaTemplate, RecyclingTemplate

CPU_POOL = 2048
N = TypeVar("N", bound=nn.Module)


@dataclass(frozen=True)
class Surroundings:
    """What a method may want to know of the target it drafts for.

    Attributes:
        vocab_size, device: of the target.
        draft_model: loads the draft model when first asked, and gives the same one ever after.
        target: the target itself, whose embedding and head trained drafters work with; None if it is no transformers
            model.
        net: reads the trained drafter when first asked.
    """

    vocab_size: int
    device: torch.device
    draft_model: Callable[[], DraftModel]
    target: PackedModel | None = None
    net: Callable[[], nn.Module] | None = None

    def default_budget(self, on_cpu: int, otherwise: int) -> int:
        """Beyond a handful of rows a CPU pass is compute-bound, so small trees win there (docs/log.md)."""
        return on_cpu if self.device.type == "cpu" else otherwise


def _plain(options: Any, around: Surroundings) -> Proposer:
    return EmptyDraft()


def _lookup(options: Options, around: Surroundings) -> Proposer:
    return PromptLookup(CONTINUATION if options.budget is None else options.budget)


def _recycle(options: RecycleOptions, around: Surroundings) -> Proposer:
    budget = around.default_budget(6, 80) if options.budget is None else options.budget
    source = TokenRecycling(TransitionMatrix(around.vocab_size, around.device))
    shape = Chain() if options.shape == "chain" else RecyclingTemplate()
    return StaticProposer(source, shape, budget, around.device)


def _draft_lm(options: LinearOptions, around: Surroundings) -> DraftLM:
    return DraftLM(around.draft_model(), around.vocab_size, options.noise, _vocabulary(options, around))


def _vocabulary(options: LinearOptions, around: Surroundings) -> Tensor | None:
    """[K] the only ids to draft, if the options name such a file."""
    return None if options.vocabulary is None else load_vocabulary(options.vocabulary, around.vocab_size)


def _linear(options: LinearOptions, around: Surroundings) -> Proposer:
    budget = around.default_budget(4, 8) if options.budget is None else options.budget
    return StaticProposer(_draft_lm(options, around), Chain(), budget, around.device)


def _fixed(options: FixedOptions, around: Surroundings) -> Proposer:
    budget = around.default_budget(15, 255) if options.budget is None else options.budget
    return GrowingProposer(_draft_lm(options, around), FixedTree(options), budget)


def _dynatree(options: DynaTreeOptions, around: Surroundings) -> Proposer:
    budget = around.default_budget(15, 255) if options.budget is None else options.budget
    return GrowingProposer(_draft_lm(options, around), DynaTree(options), budget)


def _trained(kind: type[N], options: NetOptions, around: Surroundings, what: str) -> tuple[N, PackedModel]:
    """The trained drafter, if it is of the right kind, in the target's dtype and on its device."""
    if around.target is None or around.net is None:
        raise InvalidRequest(f"{what} needs a trained drafter: name its checkpoint with drafter=")
    net = around.net()
    if not isinstance(net, kind):
        raise InvalidRequest(f"{what} needs a drafter of its own kind, and this one is a {type(net).__name__}")
    return net, around.target


def _shaped(source: LevelSource, options: NetOptions, around: Surroundings, budget: int) -> Proposer:
    budget = budget if options.budget is None else options.budget
    static: dict[str, StaticShape] = {"chain": Chain(), "template": MedusaTemplate()}
    if options.shape in static:
        return StaticProposer(source, static[options.shape], budget, around.device)
    sizes = {"depth": options.depth} | ({} if options.top_k is None else {"top_k": options.top_k})
    shapes: dict[str, Callable[[], GrowingShape]] = {
        "beam": lambda: Beam(BeamConfig(**sizes)),
        "search": lambda: Beam(SearchConfig(**sizes)),
        "fixed": lambda: FixedTree(FixedTreeConfig()),
        "dynatree": lambda: DynaTree(DynaTreeConfig()),
    }
    return GrowingProposer(source, shapes[options.shape](), budget)


def _check_sizes(config: Any, **wanted: int) -> None:
    for name, size in wanted.items():
        if getattr(config, name) != size:
            raise ModelError(f"{name}={getattr(config, name)} of the drafter: the target has {size}")


def _eagle3(options: EagleOptions, around: Surroundings, what: str = "method 'eagle3'") -> Proposer:
    net, target = _trained(Eagle3Net, options, around, what)
    config, layers = net.config, target.config.num_hidden_layers
    _check_sizes(config, target_hidden_size=target.config.hidden_size, vocab_size=target.vocab_size)
    sizes = target.max_length, target.max_slots, target.vocab_size
    vocabulary = _vocabulary(options, around)
    table, taps = target.embedding.weight, config.taps_of(layers)
    source = EagleSource(net, table, target.head, taps, *sizes, options.noise, vocabulary)
    return _shaped(source, options, around, around.default_budget(15, 59))


def _dart(options: DartOptions, around: Surroundings) -> Proposer:
    net, target = _trained(DartNet, options, around, "method 'dart'")
    _check_sizes(net.config, target_hidden_size=target.config.hidden_size, vocab_size=target.vocab_size)
    taps, sizes = net.config.taps_of(target.config.num_hidden_layers), (target.max_length, target.max_slots)
    decay = SearchConfig().level_decay if options.shape == "search" else None
    continuity = load_continuity(options.ngrams, decay, around.vocab_size, around.device)
    vocabulary = _vocabulary(options, around)
    source = DartSource(net, target.embedding, taps, *sizes, options.noise, vocabulary, continuity)
    budget = net.config.draft_length + 1 if options.shape == "chain" else around.default_budget(15, 60)
    return _shaped(source, options, around, budget)


def _fr_spec(options: FrSpecOptions, around: Surroundings) -> Proposer:
    what = "method 'fr-spec'"
    net, _ = _trained(Eagle3Net, options, around, what)
    if net.config.draft_vocab_size < net.config.vocab_size:
        raise InvalidRequest(
            f"{what} thins out a full head, and this drafter was trained with draft_vocab_size="
            f"{net.config.draft_vocab_size} of {net.config.vocab_size}; use method 'eagle3' (vocabulary= works there)"
        )
    return _eagle3(options, around, what)


def _medusa(options: MedusaOptions, around: Surroundings) -> Proposer:
    net, target = _trained(MedusaNet, options, around, "method 'medusa'")
    _check_sizes(net.config, hidden_size=target.config.hidden_size, vocab_size=target.vocab_size)
    vocabulary = _vocabulary(options, around)
    source = MedusaSource(net, target.head, target.config.num_hidden_layers, options.noise, vocabulary)
    budget = net.config.heads if options.shape == "chain" else around.default_budget(15, MEDUSA_NODES)
    return _shaped(source, options, around, budget)


def _block(options: TrainedOptions, around: Surroundings, kind: type[DFlashNet], what: str) -> Proposer:
    net, target = _trained(kind, options, around, what)
    net.config.check_target(target.config.hidden_size, target.config.num_hidden_layers, target.vocab_size)
    more: dict[str, Any] = {}
    if isinstance(options, DominoOptions):
        pool = around.default_budget(CPU_POOL, 0) if options.pool is None else options.pool
        more = {"every_position": options.every_position, "pool": pool or None}
    vocabulary, size = _vocabulary(options, around), (target.max_length, target.max_slots)
    head = target.head if vocabulary is None else target.head.restricted(vocabulary)
    source = BlockSource(net, target.embedding, head, *size, options.noise, **more)
    if options.shape == "chain" and (options.budget or 0) > source.depth:
        raise InvalidRequest(
            f"{what}: budget={options.budget}, but a block of this drafter drafts {source.depth} tokens"
        )
    budget = source.depth if options.shape == "chain" else around.default_budget(15, 60)
    return _shaped(source, options, around, budget)


def _dflash(options: TrainedOptions, around: Surroundings) -> Proposer:
    return _block(options, around, DFlashNet, "method 'dflash'")


def _domino(options: DominoOptions, around: Surroundings) -> Proposer:
    return _block(options, around, DominoNet, "method 'domino'")


@dataclass(frozen=True)
class Method:
    """A row of the table source x shape x fill: how to build it, and which options it takes."""

    build: Callable[[Any, Surroundings], Proposer]
    options: type[AnyOptions]
    summary: str

    @property
    def uses_draft_model(self) -> bool:
        return issubclass(self.options, LinearOptions) and not self.uses_net

    @property
    def uses_net(self) -> bool:
        return issubclass(self.options, NetOptions)


METHODS = {
    "plain": Method(_plain, PlainOptions, "no drafts: the baseline, on the same engine"),
    "lookup": Method(_lookup, Options, "prompt lookup: what followed the same words before"),
    "recycle": Method(_recycle, RecycleOptions, "Token Recycling: the target's runner-up tokens"),
    "linear": Method(_linear, LinearOptions, "a draft model's chain: classic speculative decoding"),
    "fixed": Method(_fixed, FixedOptions, "a draft model's tree of fixed depth and breadth"),
    "dynatree": Method(_dynatree, DynaTreeOptions, "DynaTree: a draft model's tree that follows its confidence"),
    "eagle3": Method(_eagle3, EagleOptions, "EAGLE-3: the target's features extended token by token"),
    "fr-spec": Method(_fr_spec, FrSpecOptions, "FR-Spec: EAGLE-3 that drafts only frequent tokens"),
    "dart": Method(_dart, DartOptions, "DART: all depths from one pass over mask rows"),
    "medusa": Method(_medusa, MedusaOptions, "Medusa: heads on the target's last state guess all depths"),
    "dflash": Method(_dflash, TrainedOptions, "DFlash: a block of drafts in one pass"),
    "domino": Method(_domino, DominoOptions, "Domino: DFlash's block, corrected causally"),
}


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options, as in "recycle:budget=8,shape=chain": a key of METHODS and its checked options."""

    name: str
    options: AnyOptions

    @property
    def budget(self) -> int | None:
        return self.options.budget


def parse_method(text: str) -> MethodSpec:
    """Read "name" or "name:option=value,option=value".

    Raises:
        InvalidRequest: unknown method or option, or a bad value.
    """
    name, _, rest = text.strip().partition(":")
    if name not in METHODS:
        raise InvalidRequest(f"method={text!r}: unknown; choose one of {', '.join(METHODS)}")
    kind = METHODS[name].options
    given = {}
    for item in filter(None, rest.split(",")):
        option, equals, value = item.partition("=")
        if not equals or option not in kind.model_fields:
            known = ", ".join(kind.model_fields)
            takes = f"takes {known} (name:option=value)" if known else "takes no options"
            raise InvalidRequest(f"method={text!r}: {name} {takes}, not {item!r}")
        if option in given:
            raise InvalidRequest(f"method={text!r}: {option} is given twice")
        given[option] = value
    try:
        return MethodSpec(name, kind.model_validate(given))
    except ValidationError as error:
        raise InvalidRequest(f"method={text!r}: {_first_complaint(error)}") from error


def _first_complaint(error: ValidationError) -> str:
    """The first thing wrong, in one line: which option, which value, what would be right."""
    details = error.errors()[0]
    message = str(details["msg"]).removeprefix("Value error, ")
    field = ".".join(str(part) for part in details["loc"])
    return f"{field}={details['input']}: {message[0].lower()}{message[1:]}" if field else message


def build_proposer(spec: MethodSpec, around: Surroundings) -> Proposer:
    """The proposer of a method, with state of its own."""
    return METHODS[spec.name].build(spec.options, around)
