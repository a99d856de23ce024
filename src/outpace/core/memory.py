"""The contract between the engine and the memory of a target's slots."""

from typing import Protocol


class SlotMemory(Protocol):
    """What slots hold, in rows: the keys and values of a token."""

    @property
    def budget(self) -> int | None:
        """Rows that all slots together may hold; None without a limit."""

    def held(self, slot: int) -> int:
        """Rows of a slot that take memory."""

    def trim(self, slot: int) -> None:
        """Give back the memory of a slot's rows after the committed ones."""
