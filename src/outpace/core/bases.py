"""Base classes for those who write methods: what a proposer or a source does that keeps nothing. Override the rest."""

from collections.abc import Sequence
from typing import Any

from outpace.core.drafting import Candidates, Frontier
from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk
from outpace.core.tree import DraftTree


class Stateless:
    """Keeps nothing for a request, and learns nothing."""

    needs = Needs()

    def open(self, slot: int, alone: bool = False) -> Any:
        return None

    def can_fork(self, own: bool) -> bool:
        """Who looks at no prompt misses nothing of one; who does says by a `can_fork` of its own how it catches up."""
        return type(self).prefill is Stateless.prefill

    def fork(self, state: Any, slot: int, length: int) -> Any:
        return self.open(slot)

    def rewind(self, state: Any, length: int) -> None:
        pass

    def prefill(self, states: Sequence[Any], chunks: Sequence[PromptChunk]) -> None:
        pass

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None:
        pass

    def reset(self) -> None:
        pass


class BaseProposer(Stateless):
    """A `Proposer` but for `propose`.

    Attributes:
        budget: drafted nodes per tree unless a request asks for another number.
    """

    budget = 8

    def close(self, state: Any) -> None:
        pass

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        raise NotImplementedError(f"{type(self).__name__} has no propose()")


class BaseSource(Stateless):
    """A `LevelSource` but for `expand`."""

    def begin(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[int]:
        return [request.max_depth for request in requests]

    def expand(self, states: Sequence[Any], frontier: Frontier, width: int) -> Candidates:
        raise NotImplementedError(f"{type(self).__name__} has no expand()")
