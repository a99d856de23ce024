"""Lookahead decoding: a Jacobi window and the n-grams of its trajectory (Fu et al. 2024, arXiv 2402.02057).

The window has LEVEL - 1 rows of WINDOW columns. Its token at level j and column i is a guess for position i + j after
the pending token, which is level 0 of column 0. A round asks the target what follows each column's last level: the
window's next row. The oldest row is dropped, all move with the text, and each column's tokens form an n-gram that the
target's own trajectory went through. N-grams that begin with the pending token are verified in the same pass.

**The window is a tree.** In the authors' mask, level j of column i sees level 0 up to column i and the levels 1 to j of
column i. So level 0 is a chain below the pending token, each column hangs below its place in that chain, and a guessed
n-gram is a branch of its own. All of it counts towards the budget: (LEVEL - 1) * (WINDOW + GUESS) - 1 nodes.

Differences from the authors' code:

- Nodes with the same path and token are one, so a tree may be smaller.
- Window nodes are drafts like any others, level 0's included: a right one is accepted, and the window moves further.
- The window moves as far as the text. Theirs moves one place per round, however many tokens were accepted
  (their ALWAYS_FWD_ONE).
- While the window fills, in LEVEL - 2 rounds, n-grams are verified too, if the pool has any (after a rewind).
- The pool takes nothing from the prompt (their POOL_FROM_PROMPT).
- Where the window runs out of tokens it takes ids of the request's own text, drawn from a generator per request.

At any temperature the next row is the target's argmax, so the trajectory is that of greedy decoding; verification alone
decides what is generated. A token that ends the request ends n-grams; the window continues with the next best token.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from outpace.core.events import origins_of
from outpace.core.protocols import BaseProposer, DraftRequest, Needs, Observation
from outpace.core.tree import DraftTree, Topology

LEVEL = 5
WINDOW = 7
NGram = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Sizes of window and pool; the paper's 5, 7 and 7 take 55 nodes.

    Attributes:
        level: tokens of an n-gram, its key included.
        window: columns.
        guess: n-grams of the pending token that are verified, the newest ones.
    """

    level: int
    window: int
    guess: int

    @property
    def nodes(self) -> int:
        """Maximum number of drafted nodes."""
        return (self.level - 1) * (self.window + self.guess) - 1

    @staticmethod
    @lru_cache(maxsize=1024)
    def within(budget: int) -> "Sizes":
        """The largest sizes up to the paper's that fit a budget of at least 1.

        Window and guess are equal, as the paper recommends. N-grams are as long as possible with at least `level` - 1
        columns: a narrower window spends more tokens on each n-gram than it finds. K = 60 gives (5, 7, 7), 31 (5, 4,
        4), 15 (3, 4, 4), 7 (3, 2, 2), and smaller budgets bigrams.
        """
        for level in range(LEVEL, 2, -1):
            width = min(WINDOW, (budget + 1) // (2 * (level - 1)))
            if width >= level - 1:
                return Sizes(level, width, width)
        width = min(WINDOW, (budget + 1) // 2)
        return Sizes(2, width, width)


class NGramPool:
    """For each token the n-grams that began with it, at most WINDOW; the least recently seen is dropped first. N-grams
    of a larger budget stay when the budget shrinks, as it may from round to round in a batch."""

    def __init__(self) -> None:
        self._found: dict[int, dict[NGram, None]] = {}

    def add(self, key: int, rest: NGram) -> None:
        """Add an n-gram as the newest of its key."""
        found = self._found.setdefault(key, {})
        found.pop(rest, None)
        found[rest] = None
        while len(found) > WINDOW:  # one too many, or two after an interrupt
            del found[next(iter(found))]

    def after(self, key: int) -> list[NGram]:
        """What followed a token, newest first."""
        return list(reversed(self._found.get(key, {})))


class JacobiWindow:
    """The window of one request.

    Attributes:
        rows: by level, oldest first; the first token of the first row is the pending token.
    """

    def __init__(self, sizes: Sizes, ids: Sequence[int], source: random.Random, finals: Sequence[int] = ()) -> None:
        self._sizes, self._source, self._finals = sizes, source, finals
        self._usable, self._read = list[int](), 0  # ids of the text that end nothing, of as many as were read
        self.rows: list[list[int]] = [[]]
        self._fill(ids)

    @property
    def is_full(self) -> bool:
        return len(self.rows) == self._sizes.level - 1

    def ngrams(self, after: Sequence[int]) -> list[tuple[int, NGram]]:
        """The n-gram of each column for which `after` has the target's next token."""
        return [(tokens[0], tokens[1:]) for tokens in zip(*self.rows, after, strict=False)]

    def advance(self, after: Sequence[int], accepted: int, ids: Sequence[int]) -> None:
        """Move on to the next round.

        Args:
            after: the target's next token after each column, at least after the first ones.
            accepted: number of accepted drafts. The window moves by these and by one for the target's own token.
        """
        rows = [*self.rows, list(after)]
        if self.is_full:  # each row becomes the level before its own, one place further
            self.rows = [row[accepted:] for row in rows[1:]]
        else:
            self.rows = [row[accepted + 1 :] for row in rows]
        self._fill(ids)

    def _fill(self, ids: Sequence[int]) -> None:
        # A filling window loses a column per round, so it begins with more.
        width = self._sizes.window + self._sizes.level - 1 - len(self.rows)
        self._usable += [token for token in ids[self._read :] if token not in self._finals]
        self._read = len(ids)
        usable = self._usable or ids
        for row in self.rows:
            row += [self._source.choice(usable) for _ in range(width - len(row))]


@dataclass(eq=False)
class LookaheadState:
    """One request.

    Attributes:
        sizes: of the window, and of what is verified of the pool; they follow the request's budget.
        window: None before the first tree and after a rewind.
        ends: node of each column's last level in this round's tree, of the columns that fit in.
    """

    sizes: Sizes | None = None
    pool: NGramPool = field(default_factory=NGramPool)
    window: JacobiWindow | None = None
    ends: list[int] = field(default_factory=list)
    ids: Sequence[int] = ()
    finals: Sequence[int] = ()
    source: random.Random = field(default_factory=lambda: random.Random(0))


class Lookahead(BaseProposer):
    """Drafts the window, and the pool's n-grams of the pending token, in one tree."""

    def __init__(self, budget: int) -> None:
        # Verified nodes have their top ids anyway; needing them would compute them for the prompt as well.
        self.needs = Needs(whole_trees=True)
        self.budget = budget

    def open(self, slot: int, alone: bool = False) -> LookaheadState:
        return LookaheadState()

    def rewind(self, state: LookaheadState, length: int) -> None:
        state.window = None

    def propose(self, states: Sequence[LookaheadState], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._tree(state, request) for state, request in zip(states, requests, strict=True)]

    def observe(self, states: Sequence[LookaheadState], observations: Sequence[Observation]) -> None:
        wanted = 1 + max(len(state.finals) for state in states)
        tops = torch.cat([observation.outputs.top_ids[:, :wanted] for observation in observations]).tolist()
        for state, observation in zip(states, observations, strict=True):
            top, tops = tops[: len(observation.tree)], tops[len(observation.tree) :]
            if state.window is None:
                continue
            if state.window.is_full:
                for key, rest in state.window.ngrams([top[node][0] for node in state.ends]):
                    state.pool.add(key, rest)
            onward = [next((token for token in top[node] if token not in state.finals), None) for node in state.ends]
            after = [token for token in onward if token is not None]
            if len(after) < len(onward):  # all top ids of a column end the request
                state.window = None
            else:
                state.window.advance(after, observation.verdict.accepted_drafts, state.ids)

    def _tree(self, state: LookaheadState, request: DraftRequest) -> DraftTree:
        ids, depth = request.ids, request.max_depth
        if request.budget < 1:
            state.window = None  # it would not move with the text
            return DraftTree.chain(torch.tensor([ids[-1]]))
        sizes = Sizes.within(request.budget)
        level_0, *columns = self._window(state, request, sizes).rows
        level_0[0] = ids[-1]
        branches = _Branches(ids[-1])
        state.ends, place = [], 0
        for column in range(min(len(level_0), depth - len(columns) + 1)):
            if column:
                place = branches.add(place, [level_0[column]])
            state.ends.append(branches.add(place, [row[column] for row in columns]))
        for rest in state.pool.after(ids[-1])[: sizes.guess]:
            last = next((place for place, token in enumerate(rest) if token in state.finals), depth)
            branches.add(0, rest[: min(last + 1, depth, sizes.level - 1)])
        origins = origins_of("retrieved", len(branches.tokens))
        return DraftTree(torch.tensor(branches.tokens), Topology.of(branches.parents), origins=origins)

    def _window(self, state: LookaheadState, request: DraftRequest, sizes: Sizes) -> JacobiWindow:
        """The window, brought up to date."""
        if state.sizes != sizes:
            state.window = None
            state.sizes = sizes  # last, so that an interrupted change is made again
        if state.window is None:
            state.window = JacobiWindow(sizes, request.ids, state.source, request.sampling.ending_ids)
        state.ids, state.finals = request.ids, request.sampling.ending_ids
        return state.window


class _Branches:
    """A tree in the making, in which siblings have different tokens."""

    def __init__(self, pending: int) -> None:
        self.tokens, self.parents = [pending], [-1]
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, node: int, tokens: Sequence[int]) -> int:
        """Add a path below a node. Returns the number of its last node."""
        for token in tokens:
            found = self._nodes.setdefault((node, token), len(self.tokens))
            if found == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(node)
            node = found
        return node
