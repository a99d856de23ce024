"""Methods of the lattice drafter: the best-first tree over its path probabilities, or any shape."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from outpace.core.protocols import DraftRequest, Proposer
from outpace.core.tree import DraftTree
from outpace.drafters.build_context import BuildContext
from outpace.drafters.dflash.methods import block_proposer, trained_block
from outpace.drafters.lattice.net import LatticeNet
from outpace.drafters.lattice.source import LatticeSource
from outpace.drafters.method import Method
from outpace.drafters.model_options import ModelOptions
from outpace.trees.proposer import GrowingProposer, GrowingState
from outpace.trees.shapes.beam import BestFirst

BEST = "best-first"


class LatticeOptions(ModelOptions):
    """The lattice drafter."""

    also: ClassVar = (BEST,)

    shape: str = Field(default=BEST, description=str(ModelOptions.model_fields["shape"].description))


class LatticeProposer(GrowingProposer):
    """Best-first trees in one call. Requests whose options look at more than logits and keyed noise get a beam."""

    source: LatticeSource
    shape: BestFirst

    def propose(self, states: Sequence[GrowingState], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        if self._leaves_room or not self.source.grows(requests):
            return super().propose(states, requests)
        sources = [state.of_source for state in states]
        limits = self.source.begin(sources, requests)
        return self.source.trees(sources, requests, [min(limit, self.shape.config.depth) for limit in limits])


def _lattice(options: LatticeOptions, context: BuildContext) -> Proposer:
    net, target, head = trained_block(options, context, LatticeNet, "lattice")
    source = LatticeSource(net, target, head, options.noise)
    grower = LatticeProposer if options.shape == BEST else GrowingProposer
    return block_proposer(options, context, source, "lattice", grower)


LATTICE = Method(_lattice, "the lattice: the most probable paths of one pass", LatticeOptions, "lattice")
METHODS = {"lattice": LATTICE}
