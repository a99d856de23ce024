"""What a block drafter knows of one request."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.core.protocols import DraftRequest, Observation


@dataclass(eq=False)
class BlockState:
    """One request in a block drafter.

    Attributes:
        slot: of the net; it holds the context of all committed positions.
        request: the request of this round.
        hidden: [D, H] outputs of this round's block, those that drafts are read from.
        base: [D, V] float32 base logits by depth, or [D, M] of the pool's ids.
        pool: [M] ids that drafts come from, if not all may.
        rows: [M, r] of Domino's W2, the pool's.
        causal: [n, G] causal states of this request's nodes in the last frontier.
        start: where these nodes began in it.
        depth: of these nodes.
        rolled: [D] tokens and scores of a chain that was drafted in one go, if it was.
        paths: drafted tokens down to each of them, kept only for requests whose options look back.
        waiting: [n, taps * H] features of committed positions that are not yet context.
        waiting_rows: how many positions that are.
        is_beyond: the context has outgrown the net; nothing is drafted any more.
    """

    slot: int
    request: DraftRequest | None = None
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    base: Tensor = field(default_factory=lambda: torch.empty(0))
    pool: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    rows: Tensor = field(default_factory=lambda: torch.empty(0))
    causal: Tensor = field(default_factory=lambda: torch.empty(0))
    start: int = 0
    depth: int = 0
    rolled: tuple[Tensor, Tensor] | None = None
    paths: list[list[int]] = field(default_factory=list)
    waiting: list[Tensor] = field(default_factory=list)
    waiting_rows: int = 0
    is_beyond: bool = False

    @property
    def asked(self) -> DraftRequest:
        """The request of this round."""
        assert self.request is not None, "begin() comes before expand()"
        return self.request


def features_along(observation: Observation) -> Tensor | None:
    """[n, taps * H] the target's features at the nodes that were accepted; None where none were asked for."""
    features, path = observation.outputs.features, observation.verdict.path
    if features is None or len(path) == 1:
        return None if features is None else features[:1]
    return features[torch.tensor(path)]
