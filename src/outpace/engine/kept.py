"""What is in slots: the KV of requests, kept for a conversation's next turn, or left for whoever begins alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne
from typing import Any

from outpace.core.protocols import Proposer, Target

LEAST_SHARED = 16
"""Ids of a common beginning that are worth a copy, or a step of waiting."""


@dataclass(eq=False)
class Written:
    """What is in a slot.

    Attributes:
        slot: the KV slot.
        ids: the ids whose KV it holds, all of them also seen by the proposer; both may hold more behind them.
        proposer, state: the method of the request that wrote it, and its state for it.
    """

    slot: int
    ids: list[int]
    proposer: Proposer
    state: Any


@dataclass(eq=False)
class KeptSlot(Written):
    """A slot whose request has ended, with what its next turn can use again.

    Attributes:
        is_open: false once it was resumed, released, or given up for a request that needed a slot.
    """

    is_open: bool = True

    def serves(self, proposer: Proposer) -> bool:
        """Whether a request with this method can go on in it: another has not seen what it holds."""
        return self.is_open and self.proposer is proposer

    def rewind(self, target: Target, prompt: Sequence[int]) -> int:
        """Keep what a prompt of at least one id begins with.

        Args:
            target: whose slot it is.
            prompt: the ids.

        Returns:
            How many ids of the prompt the slot holds.
        """
        length = shared(self.ids, prompt, self.proposer)
        del self.ids[length:]  # before what they stand for, so that an interrupted rewind can be begun again
        target.rewind_slot(self.slot, length)
        self.proposer.rewind(self.state, length)
        return length


def shared(ids: Sequence[int], prompt: Sequence[int], proposer: Proposer) -> int:
    """How much of a prompt's beginning a request with this method can take over from where `ids` are written.

    At least the prompt's last id is left to be written, for it is from there that the first token is drawn.
    """
    known = min(len(ids), len(prompt) - 1)
    length = next(compress(count(), map(ne, ids, prompt[:known])), known)
    # What is drafted from a feature depends on the token behind it too.
    return max(length - 1, 0) if proposer.needs.taps else length
