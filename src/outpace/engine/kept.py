"""Slots that outlive their request: the KV of a conversation, kept for its next turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outpace.core.protocols import Proposer, Target


@dataclass(eq=False)
class KeptSlot:
    """A slot whose request has ended, with what its next turn can use again.

    Attributes:
        slot: the KV slot.
        ids: the ids whose KV it holds, all of them also seen by the proposer.
        proposer, state: the method and its state for this conversation.
        is_open: false once it was resumed, released, or given up for a request that needed a slot.
    """

    slot: int
    ids: list[int]
    proposer: Proposer
    state: Any
    is_open: bool = True


class KeptSlots:
    """The kept slots of one engine, oldest first. They are a cache: any of them may be given up at any time.

    Args:
        target: whose slots they are.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._kept: list[KeptSlot] = []

    def __len__(self) -> int:
        return len(self._kept)

    @torch.inference_mode()
    def put(self, slot: int, ids: Sequence[int], proposer: Proposer, state: Any) -> KeptSlot:
        """Keep a slot and of its contents the first ids.

        Args:
            slot: its KV begins with that of `ids`. What follows is forgotten: a round may have committed tokens behind
                a stop, and an interrupt may have come between a commit and its bookkeeping.
            ids: prompt and answer without the pending token.
            proposer, state: the method and its state, which has seen `ids` and maybe more.
        """
        kept = KeptSlot(slot, list(ids), proposer, state)
        self._rewind(kept, len(ids))
        self._kept.append(kept)
        return kept

    @torch.inference_mode()
    def take(self, kept: KeptSlot, prompt: Sequence[int]) -> int:
        """Hand a kept slot to the next request.

        Args:
            kept: open.
            prompt: at least one id.

        Returns:
            How many ids of the prompt the slot holds. At least the last one is left to be written, for it is from
            there that the first token is drawn.
        """
        pairs = zip(kept.ids, prompt[:-1])
        known = min(len(kept.ids), len(prompt) - 1)
        common = next((place for place, (old, new) in enumerate(pairs) if old != new), known)
        if kept.proposer.needs.taps:
            common = max(common - 1, 0)  # what is drafted from a feature depends on the token behind it too
        self._rewind(kept, common)
        self._kept.remove(kept)
        kept.is_open = False
        return common

    def release(self, kept: KeptSlot) -> None:
        """Give a slot back; nothing happens to one that is not open."""
        if kept.is_open:
            self._kept.remove(kept)
            kept.is_open = False
            self._target.close_slot(kept.slot)
            kept.proposer.close(kept.state)

    def release_oldest(self) -> None:
        self.release(self._kept[0])

    def _rewind(self, kept: KeptSlot, length: int) -> None:
        self._target.rewind_slot(kept.slot, length)
        kept.proposer.rewind(kept.state, length)
