"""DSpark as a source: DFlash's block, corrected at every node by the token before it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from outpace.drafters.dflash.neighbour_source import NeighbourSource
from outpace.drafters.dspark.net import DSparkNet
from outpace.drafters.levels import DraftLevel


class DSparkSource(NeighbourSource):
    """A DSpark net on slots of its own. With a confidence head the scores of a node's candidates add up to the
    confidence instead of 1, so that shapes and prices end a path where it is low.

    Args:
        pool: draft only from this many ids per block, those with the best base logits at any depth; None for all.
    """

    net: DSparkNet

    def __init__(self, net: DSparkNet, *arguments: Any, pool: int | None = None, **options: Any) -> None:
        super().__init__(net, *arguments, **options)
        self._pool = pool

    def _candidates_of(self, base: Tensor) -> Tensor | None:
        if self._pool is None or self._pool >= base.shape[1]:
            return None
        return base.amax(dim=0).topk(self._pool).indices[None]

    @torch.inference_mode()
    def _log_mass(self, level: DraftLevel) -> Tensor | None:
        confidence = self.net.head.confidence(self._before(level), self._hidden(level))
        return None if confidence is None else logsigmoid(confidence)
