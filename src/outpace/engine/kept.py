"""Slots that outlive their request: the KV of a conversation, kept for its next turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.core.protocols import Proposer, Target


@dataclass(eq=False)
class KeptSlot:
    """A slot whose request has ended, with what its next turn can use again.

    Attributes:
        slot: the KV slot.
        ids: the ids whose KV it holds, all of them also seen by the proposer; both may hold more behind them.
        proposer, state: the method and its state for this conversation.
        is_open: false once it was resumed, released, or given up for a request that needed a slot.
    """

    slot: int
    ids: list[int]
    proposer: Proposer
    state: Any
    is_open: bool = True

    def serves(self, proposer: Proposer) -> bool:
        """Whether a request with this method can go on in it: another has not seen what it holds."""
        return self.is_open and self.proposer is proposer

    def rewind(self, target: Target, prompt: Sequence[int]) -> int:
        """Keep what a prompt begins with.

        Args:
            target: whose slot it is.
            prompt: at least one id.

        Returns:
            How many ids of the prompt the slot holds. At least the last one is left to be written, for it is from
            there that the first token is drawn.
        """
        pairs = zip(self.ids, prompt[:-1])
        known = min(len(self.ids), len(prompt) - 1)
        common = next((place for place, (old, new) in enumerate(pairs) if old != new), known)
        if self.proposer.needs.taps:
            common = max(common - 1, 0)  # what is drafted from a feature depends on the token behind it too
        del self.ids[common:]  # before what they stand for, so that an interrupted rewind can be begun again
        target.rewind_slot(self.slot, common)
        self.proposer.rewind(self.state, common)
        return common
