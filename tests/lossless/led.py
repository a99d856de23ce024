"""Random nets are almost never right: a source that is led to what the target will say now and then."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from outpace.core.drafting import Candidates, Frontier
from outpace.core.protocols import DraftRequest
from outpace.testing import OracleDrafter


class LedSource:
    """Another source, into whose candidates the target's next token is put below about half of the nodes that are
    right so far: as the first or second of them, so that right tokens also stand behind wrong siblings.

    Everything else is the source's own, and it is told of the tree as if it had found these tokens itself.

    Args:
        source: a `LevelSource`.
        sequences: prompt and answer of each request that will come, as ids.
        seed: of the choice of nodes.
    """

    def __init__(self, source: Any, sequences: Sequence[Sequence[int]], seed: int = 0) -> None:
        self._source, self._oracle, self._random = source, OracleDrafter(sequences), random.Random(seed)
        self._ids: list[Sequence[int]] = []
        self._paths: list[list[int]] = []  # drafted tokens down to each node of the last frontier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def begin(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[int]:
        self._ids = [request.ids for request in requests]
        limits: list[int] = self._source.begin(states, requests)
        return limits

    def expand(self, states: Sequence[Any], frontier: Frontier, width: int) -> Candidates:
        found: Candidates = self._source.expand(states, frontier, width)
        above, drafted = self._paths, frontier.tokens.tolist()
        self._paths = [
            [] if parent < 0 else [*above[parent], token] for parent, token in zip(frontier.parents, drafted)
        ]
        tokens = found.tokens.clone()
        log_probs = None if found.log_probs is None else found.log_probs.clone()
        for node, (owner, path) in enumerate(zip(frontier.owners, self._paths, strict=True)):
            known = self._oracle.continuation([*self._ids[owner], *path])
            if not known or known[0] in tokens[node].tolist() or self._random.random() < 0.5:
                continue
            place = self._random.randrange(min(2, tokens.shape[1]))
            tokens[node] = torch.cat([tokens[node, :place], torch.tensor(known[:1]), tokens[node, place:-1]])
            if log_probs is not None:  # as likely as the one before it, which keeps the order
                before = log_probs[node, max(place - 1, 0)][None]
                log_probs[node] = torch.cat([log_probs[node, :place], before, log_probs[node, place:-1]])
        return Candidates(tokens, log_probs, found.passes, found.entropy)
