"""Where drafting spends its time: parts that are timed where they run, such as `with LM_HEAD: ...`."""

from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from time import perf_counter


class DraftPart(ContextDecorator):
    """Counts the time within to a part of drafting, but for other parts within it. Where no `DraftClock` runs, it does
    nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        if (clock := RUNNING.get()) is not None:
            clock.begin(self.name)

    def __exit__(self, *error: object) -> None:
        if (clock := RUNNING.get()) is not None:
            clock.end()


NET = DraftPart("net")  # passes of the drafter; those of a language model with its LM head
LM_HEAD = DraftPart("lm_head")
HEAD = DraftPart("head")  # what corrects its logits by the tokens before: Domino's causal head, scores of pairs
TREE = DraftPart("tree")  # the rest: choosing candidates, growing trees
RETRIEVE = DraftPart("retrieve")
MERGE = DraftPart("merge")  # choosing between what was drafted and retrieved
REBUILD = DraftPart("rebuild")  # the tree that is then verified
DRAFT_PARTS = tuple(part.name for part in (NET, LM_HEAD, HEAD, TREE, RETRIEVE, MERGE, REBUILD))


class DraftClock:
    """Times the parts of drafting: `with DraftClock() as clock: ...`.

    Attributes:
        seconds: by part.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(DRAFT_PARTS, 0.0)
        self._open: list[str] = []
        self._last = 0.0
        self._before: Token[DraftClock | None] | None = None

    def __enter__(self) -> "DraftClock":
        self._before = RUNNING.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._before is not None, "it was entered"
        RUNNING.reset(self._before)

    def begin(self, name: str) -> None:
        """A part begins, and the one around it waits."""
        self._count()
        self._open.append(name)

    def end(self) -> None:
        """The innermost part ends."""
        self._count()
        self._open.pop()

    def _count(self) -> None:
        now = perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._last
        self._last = now


RUNNING: ContextVar[DraftClock | None] = ContextVar("the clock of this thread's drafting", default=None)
