"""Plans rounds from the times of passes and the tokens that requests gain, both measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from time import perf_counter
from weakref import WeakKeyDictionary

import torch

from outpace.budget.costs import ROWS, Averages, PassCosts, PassTimes, Prices, averaged
from outpace.budget.decisions import RoundRates, TreeSizes
from outpace.core.protocols import Proposer, Target, Verdict
from outpace.core.tree import DraftTree, Topology
from outpace.engine.phases import Phases
from outpace.engine.session import Session

_KEPT = 0.97  # decay of averages per round: about thirty rounds are remembered
_PACE_KEPT = 0.95  # the same for the tokens that a request gains
_REPEATS = 5  # measurements of each size at most
_WITHIN = 3.0  # seconds after which measuring ends; the times are stored, and wrong ones would cost speed for good
_SHORT = 512  # tokens of context: what more of them add is not known as exactly as a row's time
_ALIKE = 1.1  # ratio of the two best times of a size, up to which no other program seems to have disturbed them
_PROMPT_MS = 100.0  # about the time of a pass with prompts only, for which a new request must wait
_MOST_FILLING = 2  # requests whose prompts are being written, per decoding one, above which all of them count
_LEAST_ROWS = 32  # fewest prompt rows of a pass without decoding, or of one whose time is not known


@dataclass(frozen=True)
class RoundPlan:
    """How a round drafts.

    Attributes:
        budgets: drafted nodes of each request at most.
        prices: each request's prices of time; None if the cost model chooses neither its nodes nor its budget. Methods
            get those of requests whose nodes it chooses; text that grammars force follows them all.
        is_drafted: False if requests under the cost model draft nothing, because rounds without drafts are faster.
    """

    budgets: Sequence[int]
    prices: Sequence[Prices | None]
    is_drafted: bool = True


class Pricing:
    """Plans rounds by prices that it learns from the times of rounds.

    Times decide which nodes are drafted, never which tokens are generated: under "match" the target's draws decide,
    whatever the tree. Under "rejection" the tree affects the answer, so such requests get no prices.

    Args:
        slowdown: how many times as long a round may take while prompts are written in its pass.
    """

    def __init__(self, costs: PassCosts, slowdown: float) -> None:
        self._costs, self._slowdown = costs, slowdown
        self._usual = Averages()  # milliseconds of a round, without its prompts, by its number of requests
        self._prompt_ms, self._prompt_rows = Averages(), Averages()  # of passes, by `_prompt_key`
        self._ms = Averages(_KEPT)  # of a round, by its number of requests
        self._paces: WeakKeyDictionary[Session, float] = WeakKeyDictionary()  # tokens gained per round
        self._pace: float | None = None  # of all requests
        self._sizes: WeakKeyDictionary[Proposer, TreeSizes] = WeakKeyDictionary()
        self._rates = RoundRates()

    def prompt_rows(self, sessions: Sequence[Session], filling: int, context: int) -> int:
        """How many rows of prompts the next pass writes at most, one or more.

        If most requests wait for their prompts, the bound is that of a round of all of them: decoding a few in many
        short rounds would take longer overall.

        Args:
            sessions: the requests that are decoded in the pass.
            filling: requests whose prompts are being written.
            context: average number of prompt tokens already written.
        """
        key = _prompt_key(sessions, context)
        if self._prompt_ms.known:
            row_ms = self._prompt_ms.nearest(key) / self._prompt_rows.nearest(key)
        else:
            row_ms = self._costs.row_ms if self._costs.is_known else 0.0
        if row_ms <= 0 or (sessions and not self._usual.known):
            return _LEAST_ROWS
        if not sessions:
            return max(int(_PROMPT_MS / row_ms), _LEAST_ROWS)
        count = len(sessions) + (filling if filling > _MOST_FILLING * len(sessions) else 0)
        return max(int((self._slowdown - 1) * self._usual.least(count) / row_ms), 1)

    def learn_prompts(self, sessions: Sequence[Session], context: int, rows: int, others: int, clock: Phases) -> None:
        """Learn the time of a pass that wrote `rows` rows of prompts and computed `others` rows of trees for
        `sessions`."""
        ms = clock.ms()
        if sessions and self._costs.is_known:
            without = self._costs.times(len(sessions), _context(sessions), 0, others - len(sessions))
            ms = clock.ms("forward", "verify", "prompts") - without.ms[0]
        elif sessions:
            ms -= self._usual.least(len(sessions))
        # A row's time is the quotient of two averages: the time of one small chunk would be mostly noise.
        key = _prompt_key(sessions, context)
        self._prompt_ms.learn(key, ms)
        self._prompt_rows.learn(key, rows)

    def plan(self, target: Target, sessions: Sequence[Session], prompt_rows: int = 0) -> RoundPlan:
        """The plan of these requests' next round. Passes are timed when their times are first needed.

        A request gets its own budget. It gets fewer nodes if it shares the round, its method does not follow prices
        itself, and more nodes would gain less than they cost. Rows of prompts make rows of drafts no cheaper.
        """
        count, budgets = len(sessions), [session.budget for session in sessions]
        follow = _follow(sessions)
        if not any(follow):
            return RoundPlan(budgets, [None] * count)
        times = self._times(target, sessions, prompt_rows)
        paces = [self._paces.get(session, self._pace or 1.0) for session in sessions]
        # A token's cost excludes rows of prompts: a node must gain as much in rounds with them as in others.
        plain_ms = (self._costs.times(count, _context(sessions), 0) if prompt_rows else times).ms[0]
        # Paces may come from rounds with another number of requests, or from another text. Time is priced at least at
        # what plain decoding would gain in it.
        round_ms = min(self._ms.known.get(count, math.inf), plain_ms * geometric_mean(paces))
        each = count / round_ms
        prices = [Prices(pace * each, times, pace) if one else None for one, pace in zip(follow, paces, strict=True)]
        if count > 1 and not self._rates.drafts(count):
            own = [0 if one else budget for one, budget in zip(follow, budgets, strict=True)]
            return RoundPlan(own, prices, is_drafted=False)
        rate = sum(paces) / round_ms
        for proposer, members in _sized(sessions).items():
            sizes = self._sizes.setdefault(proposer, TreeSizes(max(budgets[index] for index in members)))
            for index, nodes in zip(members, sizes.budgets(len(members), times, rate), strict=True):
                budgets[index] = nodes
        return RoundPlan(budgets, prices)

    def learn(
        self,
        sessions: Sequence[Session],
        plan: RoundPlan,
        trees: Sequence[DraftTree],
        verdicts: Mapping[int, Verdict],
        clock: Phases,
        tokens: Sequence[int],
        *,
        has_prompts: bool,
    ) -> None:
        """Learn the time of a round and, if any of its requests follows prices or sizes, what was drafted and
        accepted.

        Under steady arrivals hardly a round is without prompts. In one with prompts, the time that its pass is expected
        to take without them counts.
        """
        count, rows, ms = len(sessions), sum(map(len, trees)), clock.ms()
        if has_prompts:
            if not self._costs.is_known:
                return
            without = self._costs.times(count, _context(sessions), 0, rows - count)
            ms = without.ms[0] + clock.ms("draft", "commit", "observe")
        self._usual.learn(count, ms)
        if not any(_follow(sessions)):
            return
        if count > 1:
            self._rates.advance(count, plan.is_drafted)
            self._rates.learn(count, sum(tokens), ms)
        if has_prompts:
            self.learn_paces(sessions, tokens)
        else:
            self.learn_times(sessions, rows, clock.ms("forward", "verify"), ms, tokens)
        for proposer, members in (_sized(sessions) if plan.is_drafted else {}).items():
            drafting_ms = clock.ms("draft") if len(members) == count else None
            seen = [_seen(trees[index], verdicts.get(index)) for index in members]
            self._sizes[proposer].learn([plan.budgets[index] for index in members], seen, drafting_ms)

    def learn_times(
        self, sessions: Sequence[Session], rows: int, pass_ms: float, round_ms: float, tokens: Sequence[int]
    ) -> None:
        """Learn how long a round took, and what each request gained in tokens."""
        self._costs.learn(len(sessions), rows, _context(sessions), pass_ms)
        self._ms.learn(len(sessions), round_ms)
        self.learn_paces(sessions, tokens)

    def learn_paces(self, sessions: Sequence[Session], tokens: Sequence[int]) -> None:
        """Learn what each request gained in tokens."""
        for session, gained in zip(sessions, tokens, strict=True):
            self._paces[session] = averaged(self._paces.get(session, self._pace), float(gained), _PACE_KEPT)
        self._pace = averaged(self._pace, sum(tokens) / len(tokens), _KEPT)

    def _times(self, target: Target, sessions: Sequence[Session], prompt_rows: int) -> PassTimes:
        """Times of passes of these requests, for each number of nodes up to the sum of their budgets."""
        if not self._costs.is_known:
            shortest = min(sessions, key=lambda session: session.written)
            assert shortest.slot is not None, "a session in a round has a slot"
            measure(self._costs, target, shortest.slot, shortest.ids[-1], shortest.written)
        nodes = sum(session.budget for session in sessions)
        return self._costs.times(len(sessions), _context(sessions), nodes, prompt_rows)


def measure(costs: PassCosts, target: Target, slot: int, token: int, context: int = 0) -> None:
    """Time passes after the contents of a slot, which do not change. Later rounds correct all times.

    Args:
        token: the id in every row of the passes.
        context: tokens in the slot, whose time is subtracted where the target knows it. Times that were measured after
            a long context are not stored for other processes.
    """
    context_ms = target.context_times() if hasattr(target, "context_times") else (0.0, 0.0)
    trees = [DraftTree(torch.full((rows,), token), Topology.chain(rows)) for rows in ROWS]
    # The largest pass allocates memory; where passes are captured as graphs, each size is captured first.
    for tree in trees if getattr(target, "captures", False) else trees[-1:]:
        _seconds(target, slot, tree)
    seconds: list[list[float]] = []
    while not _suffice(seconds):
        seconds.append([_seconds(target, slot, tree) for tree in trees])
    each, row = context_ms
    measured = [min(own) * 1e3 for own in zip(*seconds, strict=True)]
    without = [max(ms - context * (each + row * rows), ms / 10) for rows, ms in zip(ROWS, measured, strict=True)]
    costs.set_measured(without, context_ms, is_kept=context <= _SHORT)


def _suffice(seconds: Sequence[Sequence[float]]) -> bool:
    """Whether to stop timing: the two best times of every size are close, or more would take too long."""
    if len(seconds) == _REPEATS or sum(map(sum, seconds)) > _WITHIN:
        return True
    return len(seconds) > 1 and all(sorted(own)[1] <= _ALIKE * min(own) for own in zip(*seconds, strict=True))


def _seconds(target: Target, slot: int, tree: DraftTree) -> float:
    started = perf_counter()
    _, (outputs,) = target.run_pass((), [slot], [tree], [()])
    outputs.top_ids.tolist()  # waits for a GPU
    return perf_counter() - started


def _seen(tree: DraftTree, verdict: Verdict | None) -> tuple[int, list[int]] | None:
    """The number of nodes that the method drafted, and those of them that were accepted; forced nodes are left out.
    None without a verdict."""
    own = len(tree) - tree.forced
    return None if verdict is None else (own - 1, [node for node in verdict.path[1:] if node < own])


def _follow(sessions: Sequence[Session]) -> list[bool]:
    """Which requests of a round follow prices or sizes. A single request's method drafts as configured."""
    return [session.is_priced or (session.is_sized and len(sessions) > 1) for session in sessions]


def _sized(sessions: Sequence[Session]) -> dict[Proposer, list[int]]:
    """Indices of the requests whose budgets follow sizes, by proposer. A plugin's proposer that cannot be weakly
    referenced is left out."""
    groups: dict[Proposer, list[int]] = {}
    for index, session in enumerate(sessions):
        if session.is_sized and len(sessions) > 1 and type(session.proposer).__weakrefoffset__:
            groups.setdefault(session.proposer, []).append(index)
    return groups


def _context(sessions: Sequence[Session]) -> int:
    """Average length of the requests' contexts."""
    return sum(len(session.ids) for session in sessions) // len(sessions)


def _prompt_key(sessions: Sequence[Session], context: int) -> int:
    """A key for the time of a prompt's row: the magnitude of its context, and the sign for whether decoding shares its
    pass."""
    return -context.bit_length() - 1 if sessions else context.bit_length()
