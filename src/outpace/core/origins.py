"""Who names the tokens of a tree, and of an answer. This file loads without torch, as `core/events.py` does."""

from functools import lru_cache
from typing import Literal

NodeOrigin = Literal["pending", "drafted", "retrieved", "matched", "forced"]
"""Who named a node: nobody, it is the pending token; a draft model or head; what the target ranked high before, in a
matrix or a pool of n-grams; what followed the same words before; a grammar."""
Origin = NodeOrigin | Literal["bonus"]
"""Who named an emitted token: who named its node, or, "bonus", nobody but the target itself."""
ORIGINS: tuple[NodeOrigin, ...] = ("pending", "drafted", "retrieved", "matched", "forced")
"""By number, as the compiled kernels write them (growth.h)."""


@lru_cache(maxsize=4096)
def origins_of(origin: NodeOrigin, nodes: int) -> tuple[NodeOrigin, ...]:
    """[N] origins of a tree that one source named, the pending token included."""
    return ("pending", *(origin,) * (nodes - 1))
