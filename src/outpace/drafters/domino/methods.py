"""Methods of Domino: DFlash's block with a causal correction, and Graft on it."""

from typing import Annotated

from pydantic import Field, model_validator
from torch import Tensor

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.dflash.methods import GRAFTED, block_proposer, trained_block
from outpace.drafters.dflash.source import BlockSource
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.domino.source import DominoSource
from outpace.drafters.method import Method, variant
from outpace.drafters.model_options import ModelOptions

CPU_POOL = 2048


PoolSize = Annotated[
    int | None,
    Field(
        ge=0,
        description="ids per block that drafts come from; 0 for the whole vocabulary; by default 2048 on a CPU without "
        "a ranked vocabulary, else 0",
    ),
]


def pool_size(size: int | None, context: BuildContext, vocabulary: Tensor | None) -> int | None:
    """Ids per block; None for all. `size`: the option; `vocabulary`: the ranked one, if drafts come from it."""
    # With a few thousand ids, choosing a pool costs more than scoring all of them.
    usual = context.default_budget(CPU_POOL, 0) if vocabulary is None else 0
    context.resolved["pool"] = pool = usual if size is None else size
    return pool or None


class DominoOptions(ModelOptions):
    """Domino."""

    pool: PoolSize = None
    head: bool = Field(default=True, description="off: drafts come from the block's own logits, as DFlash's do")
    gate_table: bool = Field(
        default=False,
        description="on: the products of all embeddings with the input weights of the causal head's GRU are computed "
        "once at load and then looked up; this takes 3 numbers per id and unit of the state, which `outpace doctor` "
        "reports in GB",
    )

    @model_validator(mode="after")
    def _check_head(self) -> "DominoOptions":
        if not self.head:
            idle = ["gate_table", *(["pool"] if self.pool else [])]  # pool=0 is allowed: it chooses no pool
            self.refuse_idle(idle, "head=False", "leave one of them out")
        return self


def domino_proposer(
    options: DominoOptions, context: BuildContext, net_class: type[DominoNet] = DominoNet, method: str = "domino"
) -> Proposer:
    """The proposer of a Domino drafter. `method`: its name, which is also the name of the drafter's kind."""
    net, target, head = trained_block(options, context, net_class, method)
    pool = pool_size(options.pool if options.head else 0, context, head.ids)
    shared = (net, target, head, options.noise)
    source = DominoSource(*shared, pool, options.gate_table) if options.head else BlockSource(*shared)
    return block_proposer(options, context, source, method)


DOMINO = Method(domino_proposer, "Domino: DFlash's block, corrected causally", DominoOptions, "domino")
METHODS = {"domino": DOMINO, "graft-domino": variant(DOMINO, "Graft on Domino, the same", **GRAFTED)}
