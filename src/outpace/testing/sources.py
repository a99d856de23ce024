"""A source with an exact distribution, which checks every call against the contract."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.drafting import BaseSource, Candidates, Frontier
from outpace.core.protocols import DraftRequest, Needs, Observation
from outpace.sampling.scores import best_scores
from outpace.testing.toy import ToyTarget

Logits = Callable[[Sequence[int]], Tensor]
"""[V] float32 logits after a sequence of ids."""
Path = tuple[int, ...]


def blend(share: float, vocab: int, seed: int = 0, other: int = 101, sharpness: float = 4.0) -> Logits:
    """A toy target's own distribution mixed with another one's: at share 1 it is the target's."""
    own, foreign = (ToyTarget(vocab, key, sharpness) for key in (seed, other))
    return lambda ids: share * own.logits(ids, len(ids)) + (1 - share) * foreign.logits(ids, len(ids))


@dataclass(eq=False)
class ToyState:
    """A request's state."""

    request: DraftRequest | None = None


class ToySource(BaseSource):
    """A `LevelSource` over an exact distribution. It fails when a frontier breaks the contract.

    Args:
        distribution: of the next token.
        noise: whether scores include the keyed noise of sampled requests.
        limit: maximum depth, like the end of a draft model's context.

    Attributes:
        expands: number of calls of `expand`, over all rounds.
        said: scores of this round's candidates, by request and path of the node, then by token.
    """

    def __init__(self, distribution: Logits, noise: bool = True, limit: int = 1 << 30) -> None:
        self.needs = Needs()
        self.expands = 0
        self.said: dict[tuple[int, Path], dict[int, float]] = {}
        self._distribution, self._noise, self._limit = distribution, noise, limit
        self._limits: list[int] = []
        self._before: list[tuple[int, Path]] = []

    def open(self, slot: int, alone: bool = False) -> ToyState:
        return ToyState()

    def begin(self, states: Sequence[ToyState], requests: Sequence[DraftRequest]) -> list[int]:
        for state, request in zip(states, requests, strict=True):
            state.request = request
        self.said, self._before = {}, []
        self._limits = [min(request.max_depth, self._limit) for request in requests]
        return list(self._limits)

    def expand(self, states: Sequence[ToyState], frontier: Frontier, width: int) -> Candidates:
        self.expands += 1
        nodes = self._nodes(states, frontier)
        requests = [_request(states[owner]) for owner, _ in nodes]
        rows = [self._distribution([*request.ids, *path]) for request, (_, path) in zip(requests, nodes, strict=True)]
        contexts, depths = [request.sampling for request in requests], [len(path) for _, path in nodes]
        asked = frontier.wants_entropy, frontier.draws
        best = best_scores(torch.stack(rows), contexts, depths, width, self._noise, None, None, *asked)
        for node, row, values in zip(nodes, best.tokens.tolist(), best.log_probs.tolist(), strict=True):
            self.said[node] = dict(zip(row, values, strict=True))
        self._before = nodes
        return Candidates(best.tokens, best.log_probs, 1, best.entropy, best.draft_probs)

    def observe(self, states: Sequence[ToyState], observations: Sequence[Observation]) -> None:
        for observation in observations:
            assert len(observation.outputs.top_ids) == len(observation.tree)

    def reset(self) -> None:
        self.said, self._before = {}, []

    def _nodes(self, states: Sequence[ToyState], frontier: Frontier) -> list[tuple[int, Path]]:
        """Check the frontier. Returns request and path of each node."""
        owners, parents, tokens = list(frontier.owners), list(frontier.parents), frontier.tokens.tolist()
        assert owners, "an empty frontier is asked for"
        assert owners == sorted(owners), f"owners {owners} do not ascend"
        assert len(owners) == len(parents) == len(tokens)
        nodes: list[tuple[int, Path]] = []
        for owner, parent, token in zip(owners, parents, tokens, strict=True):
            if parent < 0:
                assert not self._before, "a pending token below the first level"
                assert token == _request(states[owner]).ids[-1], "not the request's pending token"
                node: tuple[int, Path] = (owner, ())
            else:
                above = self._before[parent]
                assert above[0] == owner, f"a node of request {owner} below one of request {above[0]}"
                assert token in self.said[above], f"{token} was never a candidate below {above}"
                node = (owner, (*above[1], token))
            assert node not in self.said, f"{node} is asked for twice"
            assert node not in nodes, f"{node} is asked for twice in one frontier"
            assert len(node[1]) < self._limits[owner], f"children of {node} would be too deep"
            nodes.append(node)
        return nodes


def _request(state: ToyState) -> DraftRequest:
    assert state.request is not None, "begin() comes before expand()"
    return state.request
