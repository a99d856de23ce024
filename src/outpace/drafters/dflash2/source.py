"""DFlash 2 as a source: DFlash's block, whose best ids of each depth the selector scores after the token before."""

from typing import Any

from torch import Tensor

from outpace.drafters.dflash.neighbour_source import NeighbourSource
from outpace.drafters.dflash2.net import DFlash2Net
from outpace.kernels.build import loaded_kernels
from outpace.kernels.topk import largest


class DFlash2Source(NeighbourSource):
    """A DFlash 2 net on slots of its own. The selector scores `selector_top_k` ids of a depth, or more if the shape
    reads more.

    Args:
        is_capped: the head itself caps its logits as the net's config says.
    """

    net: DFlash2Net

    def __init__(self, net: DFlash2Net, *arguments: Any, is_capped: bool = False, **options: Any) -> None:
        super().__init__(net, *arguments, **options)
        scores = self._scores
        if not is_capped:
            self._scores = lambda hidden: net.config.base_logits(scores(hidden))

    def _candidates_of(self, base: Tensor) -> Tensor:
        count = min(max(self.net.config.selector_top_k, self._asked), base.shape[1])
        if base.device.type == "cpu" and loaded_kernels() is not None:
            return largest(base, count)[1]
        return base.topk(count).indices
