"""Methods of block drafters: DFlash, Domino, and Graft on either."""

from typing import Any, Literal

from pydantic import Field

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.dflash.source import BlockSource
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.kinds import trained_net
from outpace.drafters.method import Method
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.shaped import shaped
from outpace.lib.errors import InvalidRequest

CPU_POOL = 2048


class DFlashOptions(ModelOptions):
    """DFlash."""


class DominoOptions(ModelOptions):
    """Domino."""

    every_position: bool = Field(
        default=False, description="with shifted labels draft B tokens per block, as the authors do, instead of B - 1"
    )
    pool: int | None = Field(
        default=None,
        ge=0,
        description="ids per block that drafts come from; 0 for the whole vocabulary; by default 2048 on a CPU, unless "
        "a ranked vocabulary is drafted from, and all elsewhere",
    )
    gate_table: bool = Field(
        default=False,
        description="on: what the causal head's GRU makes of each id's embedding is computed once at load and looked "
        "up from then on; takes 3 numbers per id and unit of its state, which `outpace doctor` says in GB",
    )


class GraftDFlashOptions(DFlashOptions):
    """Graft on DFlash: a chain cut where it is in doubt, and retrieval behind it (appendix F). As there, it takes no
    more rows than the block: its default budget is what the block drafts, on every device."""

    shape: str = Field(default="cut", description="how the tree grows; its settings stand beside it")
    retrieve: Literal["none", "matrix", "suffix", "both"] = Field(
        default="matrix", description=str(ModelOptions.model_fields["retrieve"].description)
    )
    place: Literal["root", "tail"] = Field(
        default="tail", description=str(ModelOptions.model_fields["place"].description)
    )


class GraftDominoOptions(GraftDFlashOptions, DominoOptions):
    """The same on Domino."""


def _block(options: ModelOptions, context: BuildContext, kind: type[DFlashNet], method: str) -> Proposer:
    net, target = trained_net(kind, context, method)
    net.config.check_target(target.config.hidden_size, target.config.num_hidden_layers, target.vocab_size)
    more: dict[str, Any] = {}
    vocabulary, size = context.ranked_vocabulary(options.vocabulary), (target.max_length, target.max_slots)
    if isinstance(options, DominoOptions):
        # Among a few thousand ids, to choose costs more than to score them all.
        usual = context.default_budget(CPU_POOL, 0) if vocabulary is None else 0
        pool = usual if options.pool is None else options.pool
        context.resolved["pool"] = pool
        more = {"every_position": options.every_position, "pool": pool or None, "gate_table": options.gate_table}
    head = target.head if vocabulary is None else target.head.restricted(vocabulary)
    source = BlockSource(net, target.embedding, head, *size, options.noise, **more)
    if options.shape == "chain" and (options.budget or 0) > source.depth:
        raise InvalidRequest(
            f"method {method!r}: budget={options.budget}, but a block of this drafter drafts {source.depth} tokens"
        )
    budget = source.depth if options.shape in ("chain", "cut") else context.default_budget(15, 60)
    return shaped(source, options, context, budget)


def _dflash(options: ModelOptions, context: BuildContext) -> Proposer:
    return _block(options, context, DFlashNet, "dflash")


def _domino(options: DominoOptions, context: BuildContext) -> Proposer:
    return _block(options, context, DominoNet, "domino")


DFLASH = Method(_dflash, "DFlash: a block of drafts in one pass", DFlashOptions, "dflash")
DOMINO = Method(_domino, "Domino: DFlash's block, corrected causally", DominoOptions, "domino")
METHODS = {
    "dflash": DFLASH,
    "domino": DOMINO,
    "graft-dflash": Method(
        _dflash, "Graft on DFlash: retrieval behind what is sure of a block", GraftDFlashOptions, "dflash"
    ),
    "graft-domino": Method(_domino, "Graft on Domino, the same", GraftDominoOptions, "domino"),
}
