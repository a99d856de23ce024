"""The methods of trained drafters: which net, checked against its target, feeds which source and shape."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from outpace.core.drafting import GrowingShape, LevelSource, StaticShape
from outpace.core.errors import InvalidRequest, ModelError
from outpace.core.protocols import Proposer
from outpace.drafters.block import BlockSource
from outpace.drafters.continuity import load_continuity
from outpace.drafters.dart import DartSource
from outpace.drafters.eagle3 import EagleSource
from outpace.drafters.medusa import MedusaSource
from outpace.drafters.model_options import (
    DartOptions,
    DddOptions,
    DominoOptions,
    EchoOptions,
    FrSpecOptions,
    GraftOptions,
    MedusaOptions,
    ModelOptions,
    TrainedOptions,
    TreeConfig,
)
from outpace.drafters.surroundings import Surroundings
from outpace.drafters.warm_file import load_gates
from outpace.models.packed import PackedModel
from outpace.nets.dart import DartNet
from outpace.nets.dflash import DFlashNet
from outpace.nets.domino import DominoNet
from outpace.nets.eagle3 import Eagle3Net
from outpace.nets.medusa import MedusaNet
from outpace.shaping.acceptance import KeyedAcceptance
from outpace.shaping.beam import Beam, SearchConfig
from outpace.shaping.cut import Cut
from outpace.shaping.ddd import DynamicDepth
from outpace.shaping.dynatree import DynaTree
from outpace.shaping.echo import Echo
from outpace.shaping.fixed import FixedTree
from outpace.shaping.gates import Gated
from outpace.shaping.growing import GrowingProposer
from outpace.shaping.proposer import StaticProposer
from outpace.shaping.rank_paths import MEDUSA_NODES, Chain, MedusaTemplate
from outpace.shaping.svip import Svip

CPU_POOL = 2048
STATIC: dict[str, Callable[[], StaticShape]] = {"chain": Chain, "template": MedusaTemplate}
GROWING: dict[str, Callable[[Any], GrowingShape]] = {
    "beam": Beam,
    "search": Beam,
    "fixed": FixedTree,
    "dynatree": DynaTree,
    "gated": Gated,
    "ddd": DynamicDepth,
    "svip": Svip,
    "echo": Echo,
    "cut": Cut,
}
"""Made from the settings that options.TREES names for the same shape."""
N = TypeVar("N", bound=nn.Module)


def _trained(kind: type[N], options: ModelOptions, around: Surroundings, what: str) -> tuple[N, PackedModel]:
    """The trained drafter, if it is of the right kind, in the target's dtype and on its device."""
    if around.target is None or around.net is None:
        raise InvalidRequest(f"{what} needs a trained drafter: name its checkpoint with drafter=")
    net = around.net()
    if not isinstance(net, kind):
        raise InvalidRequest(f"{what} needs a drafter of its own kind, and this one is a {type(net).__name__}")
    return net, around.target


def shaped(
    source: LevelSource,
    options: ModelOptions,
    around: Surroundings,
    budget: int,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Proposer:
    """The proposer of a source under the shape that its options name.

    Args:
        source: drafts.
        options: of the method.
        around: what it is built in.
        budget: drafted nodes unless the options say otherwise.
        defaults: of the shape's settings that the options do not name, where they are not the shape's own.

    Raises:
        InvalidRequest: a warm-up's file has not the gates that it is asked for.
    """
    budget = budget if options.budget is None else options.budget
    tree, is_filled = _tree(options, around, defaults), options.fill != "none"
    if tree is None:
        return StaticProposer(source, STATIC[options.shape](), budget, around.device, is_filled)
    acceptance = KeyedAcceptance() if options.is_calibrated else None
    is_private = options.calibration == "private"
    return GrowingProposer(source, GROWING[options.shape](tree), budget, is_filled, acceptance, is_private)


def _tree(options: ModelOptions, around: Surroundings, defaults: Mapping[str, Any]) -> TreeConfig | None:
    """The settings of the shape; what the options leave open of its gates is as a warm-up calibrated it.

    Raises:
        InvalidRequest: the file has no gates for this drafter, or another number of them than the options name.
    """
    if not options.takes_gates or options.warm is None:
        return options.tree(defaults)
    if around.fingerprint is None:
        raise InvalidRequest(f"warm={options.warm}: its gates are for one drafter; name checkpoints= and thresholds=")
    gates = load_gates(options.warm, around.vocab_size, around.fingerprint())
    if gates is None and not options.reads_matrix:
        raise InvalidRequest(
            f"warm={options.warm}: holds no gates, and with fill={options.fill} nothing else of it is used; make one "
            "by `outpace warmup` with this method, or choose fill=matrix"
        )
    try:
        return options.tree({**defaults, **({} if gates is None else gates._asdict())})
    except ValueError as error:
        raise InvalidRequest(
            f"{error}; warm={options.warm} has {gates}: name checkpoints, thresholds and kept, as many of each"
        ) from error


def _check_sizes(config: Any, **wanted: int) -> None:
    for name, size in wanted.items():
        if getattr(config, name) != size:
            raise ModelError(f"{name}={getattr(config, name)} of the drafter: the target has {size}")


def eagle3(
    options: ModelOptions,
    around: Surroundings,
    what: str = "method 'eagle3'",
    budget: int = 59,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Proposer:
    net, target = _trained(Eagle3Net, options, around, what)
    config, layers = net.config, target.config.num_hidden_layers
    _check_sizes(config, target_hidden_size=target.config.hidden_size, vocab_size=target.vocab_size)
    sizes = target.max_length, target.max_slots, target.vocab_size
    vocabulary = around.ranked_vocabulary(options.vocabulary)
    table, taps = target.embedding.weight, config.taps_of(layers)
    source = EagleSource(net, table, target.head, taps, *sizes, options.noise, vocabulary)
    return shaped(source, options, around, around.default_budget(15, budget), defaults)


def ddd(options: DddOptions, around: Surroundings) -> Proposer:
    return eagle3(options, around, "method 'ddd'")


def graft(options: GraftOptions, around: Surroundings) -> Proposer:
    return eagle3(options, around, "method 'graft'", **_papers_tree(around))


def echo(options: EchoOptions, around: Surroundings) -> Proposer:
    return eagle3(options, around, "method 'echo'", **_papers_tree(around))


def _papers_tree(around: Surroundings) -> dict[str, Any]:
    """The budget and the depth that Graft's paper gives Graft, ECHO and EAGLE-3 (`shaping.gates.CheckpointConfig`)."""
    return {"budget": 60, "defaults": {} if around.device.type == "cpu" else {"depth": 9}}


def dart(options: DartOptions, around: Surroundings) -> Proposer:
    net, target = _trained(DartNet, options, around, "method 'dart'")
    _check_sizes(net.config, target_hidden_size=target.config.hidden_size, vocab_size=target.vocab_size)
    taps, sizes = net.config.taps_of(target.config.num_hidden_layers), (target.max_length, target.max_slots)
    tree = options.tree()
    decay = tree.level_decay if isinstance(tree, SearchConfig) else None
    continuity = load_continuity(options.ngrams, decay, around.vocab_size, around.device)
    vocabulary = around.ranked_vocabulary(options.vocabulary)
    source = DartSource(net, target.embedding, taps, *sizes, options.noise, vocabulary, continuity)
    budget = net.config.draft_length + 1 if options.shape == "chain" else around.default_budget(15, 60)
    return shaped(source, options, around, budget)


def fr_spec(options: FrSpecOptions, around: Surroundings) -> Proposer:
    what = "method 'fr-spec'"
    net, _ = _trained(Eagle3Net, options, around, what)
    if net.config.draft_vocab_size < net.config.vocab_size:
        raise InvalidRequest(
            f"{what} thins out a full head, and this drafter was trained with draft_vocab_size="
            f"{net.config.draft_vocab_size} of {net.config.vocab_size}; use method 'eagle3' (vocabulary= works there)"
        )
    if options.vocabulary is None and around.vocabulary is None:
        raise InvalidRequest(f"{what}: vocabulary=FILE is missing; make one with `outpace rank-vocabulary`")
    return eagle3(options, around, what)


def medusa(options: MedusaOptions, around: Surroundings) -> Proposer:
    net, target = _trained(MedusaNet, options, around, "method 'medusa'")
    _check_sizes(net.config, hidden_size=target.config.hidden_size, vocab_size=target.vocab_size)
    vocabulary = around.ranked_vocabulary(options.vocabulary)
    source = MedusaSource(net, target.head, target.config.num_hidden_layers, options.noise, vocabulary)
    budget = net.config.heads if options.shape == "chain" else around.default_budget(15, MEDUSA_NODES)
    return shaped(source, options, around, budget)


def _block(options: TrainedOptions, around: Surroundings, kind: type[DFlashNet], what: str) -> Proposer:
    net, target = _trained(kind, options, around, what)
    net.config.check_target(target.config.hidden_size, target.config.num_hidden_layers, target.vocab_size)
    more: dict[str, Any] = {}
    vocabulary, size = around.ranked_vocabulary(options.vocabulary), (target.max_length, target.max_slots)
    if isinstance(options, DominoOptions):
        # Among a few thousand ids, to choose costs more than to score them all.
        usual = around.default_budget(CPU_POOL, 0) if vocabulary is None else 0
        pool = usual if options.pool is None else options.pool
        more = {"every_position": options.every_position, "pool": pool or None}
    head = target.head if vocabulary is None else target.head.restricted(vocabulary)
    source = BlockSource(net, target.embedding, head, *size, options.noise, **more)
    if options.shape == "chain" and (options.budget or 0) > source.depth:
        raise InvalidRequest(
            f"{what}: budget={options.budget}, but a block of this drafter drafts {source.depth} tokens"
        )
    budget = source.depth if options.shape in ("chain", "cut") else around.default_budget(15, 60)
    return shaped(source, options, around, budget)


def dflash(options: TrainedOptions, around: Surroundings) -> Proposer:
    return _block(options, around, DFlashNet, "method 'dflash'")


def domino(options: DominoOptions, around: Surroundings) -> Proposer:
    return _block(options, around, DominoNet, "method 'domino'")
