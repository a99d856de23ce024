"""Methods of DFlash: its block, and Graft on it."""

from typing import Any, TypeVar

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import CPU_NODES, BuildContext, TargetParts
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.dflash.source import BlockSource
from outpace.drafters.domino.source import block_source
from outpace.drafters.method import Method, variant
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.shaped import shaped
from outpace.lib.errors import InvalidRequest
from outpace.models.head import LmHead
from outpace.trees.proposer import GrowingProposer

N = TypeVar("N", bound=DFlashNet)
GRAFTED: dict[str, Any] = {"shape": "cut", "retrieve": "matrix", "place": "tail"}
"""Graft on a block drafter (its appendix F): a chain that is cut where the draft is uncertain, and retrieval after it.
As there, it takes no more rows than the block: its default budget is what the block drafts, on every device."""


def trained_block(
    options: ModelOptions, context: BuildContext, net_class: type[N], method: str
) -> tuple[N, TargetParts, LmHead]:
    """A block drafter, its target, and the head over the ids that it drafts. `method`: its name and its kind's."""
    net, target = context.trained(net_class, method, method)
    net.config.check_target(target.config.hidden_size, target.config.num_hidden_layers, target.vocab_size)
    vocabulary = context.ranked_vocabulary(options.vocabulary)
    return net, target, target.head if vocabulary is None else target.head.restricted(vocabulary)


def block_proposer(
    options: ModelOptions,
    context: BuildContext,
    source: BlockSource,
    method: str,
    grower: type[GrowingProposer] = GrowingProposer,
) -> Proposer:
    """The proposer of a block drafter's source."""
    if options.shape == "chain" and options.retrieve == "none" and (options.budget or 0) > source.depth:
        raise InvalidRequest(
            f"method {method!r}: budget={options.budget}, but a block of this drafter drafts {source.depth} tokens"
        )
    budget = source.depth if options.shape in ("chain", "cut") else context.default_budget(CPU_NODES, 60)
    return shaped(source, options, context, budget, grower=grower)


def _dflash(options: ModelOptions, context: BuildContext) -> Proposer:
    net, target, head = trained_block(options, context, DFlashNet, "dflash")
    source = block_source(net, target, head, options.noise)
    return block_proposer(options, context, source, "dflash")


DFLASH = Method(_dflash, "DFlash: a block of drafts in one pass", ModelOptions, "dflash")
METHODS = {
    "dflash": DFLASH,
    "graft-dflash": variant(DFLASH, "Graft on DFlash: retrieval after the certain part of a block", **GRAFTED),
}
