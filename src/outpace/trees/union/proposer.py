"""The union: drafted, recycled and matched tokens compete for the same slots by their probability of acceptance.

A drafter drafts a shallow tree; Graft's transition matrix and SAM-Decoding's automaton continue every node of it, not
the pending token alone; as in DynaTree, confidence decides how wide and deep the tree is. Unlike in the papers
no source has a share of its own: the next slot is for the candidate that is most likely to be accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, ClassVar

from torch import device, tensor

from outpace.budget.costs import Prices, allocate
from outpace.budget.decisions import TimedOption
from outpace.core.method_checks import proposed
from outpace.core.protocols import DraftRequest, Needs, Observation, Proposer
from outpace.core.timing import MERGE
from outpace.core.tree import DraftTree
from outpace.kernels.build import loaded_kernels
from outpace.trees.proposer import Nested
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.union.acceptance import AcceptanceModel
from outpace.trees.union.growth import CompiledGrower, Grower, Growth, GrowthRequest, Lesson
from outpace.trees.union.reference import ReferenceGrower

_TRIES = 4  # rounds of a request that are drafted whatever earlier requests showed: a draft suits some texts better
_PRIOR, _MOST, _KEPT = 4.0, 2.0, 0.98  # weight of expected gains: initial, a round's maximum, share kept per round
_TRIAL = 6  # rounds for which trees are grown to see whether they pay: matches and matrices catch up first


@dataclass(frozen=True)
class UnionPlan:
    """How the union builds its trees.

    Attributes:
        skip_draft_above: expected gain of a tree without a draft above which nothing is drafted; None drafts always.
        most_priced: maximum number of nodes of a tree that follows the cost model; 0 to use the whole budget.
    """

    draft_budget: int
    skip_draft_above: float | None
    uses_matrix: bool = True
    uses_text: bool = True
    most_priced: int = 0
    may_draft: bool = True


@dataclass(eq=False)
class UnionState:
    """One request.

    Attributes:
        tries: number of its rounds that used the draft only to learn what a draft gains here.
        expected, gained: decayed sums of its trees' expected gains, and of accepted tokens.
        scale: factor by which the gains of its last tree were multiplied.
    """

    of_base: Any
    text: Any
    greedy: AcceptanceModel
    sampled: AcceptanceModel
    acceptance: AcceptanceModel
    matrix: TransitionMatrix | None = None
    tries: int = 0
    expected: float = _PRIOR
    gained: float = _PRIOR
    scale: float = 1.0
    grown: Growth | None = None

    @property
    def kept(self) -> float:
        """Accepted tokens as a share of the expected gains of this request's trees, at most 1: texts differ from those
        that the acceptance model has learned from, most of all in how long matches continue."""
        return min(self.gained / self.expected, 1.0)

    def learn(self, accepted: int) -> None:
        """Compare the last tree with its outcome. A round is one event, however long its chains."""
        assert self.grown is not None, "a tree has been verified"
        promised = self.grown.gain / self.scale
        if promised:
            weight = min(promised, _MOST)
            self.expected = self.expected * _KEPT + weight
            self.gained = self.gained * _KEPT + weight * accepted / promised


class UnionProposer(Nested):
    """Grows every tree best-first from the candidates of draft, transitions and text, on the host.

    Args:
        base: drafts. Its scores contain the noise of the target's own draws, a feature of retrieved tokens.
        rejected: acceptance model above temperature 0 under rejection, where every request learns for itself; None for
            `sampled`.
    """

    parts: ClassVar = {"of_base": "base", "matrix": "matrix"}

    def __init__(
        self,
        base: Proposer,
        matrix: MatrixLearner,
        greedy: AcceptanceModel,
        sampled: AcceptanceModel,
        plan: UnionPlan,
        budget: int,
        device: device,
        rejected: AcceptanceModel | None = None,
    ) -> None:
        self.base, self.matrix, self.greedy, self.sampled, self.budget = base, matrix, greedy, sampled, budget
        self._plan, self._device, self.reads_matrix = plan, device, plan.uses_matrix
        top_k = max(part.needs.top_k for _, part in self._each())
        self.needs = Needs(top_k, base.needs.taps, plan.most_priced)
        self.rejected = (rejected or sampled).copy()
        self._drafting, self._growing = TimedOption(), dict[int, TimedOption]()  # the second by number of requests
        self._drafting_ms = self._learning_ms = 0.0
        self.grower = _grower((greedy, sampled, self.rejected), matrix.matrix)
        self._net_gains: dict[int, float] = {}  # by request, of this round's trees without a draft

    def _each(self) -> list[tuple[str, Any]]:
        # A matrix that nothing reads is not taught: for it, prompts would be ranked at every position.
        return super()._each() if self.reads_matrix else [("of_base", self.base)]

    def made(self, alone: bool, **states: Any) -> UnionState:
        greedy, sampled = self.greedy, self.sampled
        if self.matrix.private:  # shared models would make trees depend on other requests
            greedy, sampled = greedy.copy(), sampled.copy()
        if alone:
            sampled = self.rejected.copy()
        text = self.grower.text() if self._plan.uses_text else None
        return UnionState(**states, text=text, greedy=greedy, sampled=sampled, acceptance=greedy)

    def rewind(self, state: UnionState, length: int) -> None:
        super().rewind(state, length)
        if state.text is not None:
            state.text.rewind(length)

    @MERGE
    def propose(self, states: Sequence[UnionState], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        if not self._grows(requests):
            self._drafting.pause()
            for state in states:
                state.grown = None
            pending = tensor([request.ids[-1] for request in requests], device=self._device)
            return [DraftTree.chain(tokens) for tokens in pending.split(1)]
        grown = self._with_trees(states, requests)
        for index, state in enumerate(states):
            state.grown = grown[index]
        return [grown[index].tree(self._device) for index in range(len(states))]

    def _grows(self, requests: Sequence[DraftRequest]) -> bool:
        """Whether to grow trees in this round; counts it."""
        if not any(request.budget and request.max_depth for request in requests):  # as before an answer's last token
            return False
        if any(request.prices is None for request in requests):
            return True
        growing, rate = self._growing_of(len(requests)), _rate_of(requests)
        is_used = growing.is_used((0,), rate)
        growing.advance((0,), rate)
        return is_used

    def _growing_of(self, count: int) -> TimedOption:
        """The option of growing trees for this many requests: what it gains and takes."""
        return self._growing.setdefault(count, TimedOption(_TRIAL))

    def _with_trees(self, states: Sequence[UnionState], requests: Sequence[DraftRequest]) -> dict[int, Growth]:
        """The tree of each request, by its index."""
        for state, request in zip(states, requests, strict=True):
            self._bring_up_to_date(state, request)
        started = perf_counter()  # the time of a tree does not include catching up with a prompt
        grown = self._without_draft(states, requests)
        rest = [index for index in range(len(states)) if index not in grown]
        offered = [
            replace(requests[index], budget=min(requests[index].budget, self._plan.draft_budget)) for index in rest
        ]
        before = perf_counter()
        drafts = proposed(self.base, [states[index].of_base for index in rest], offered) if rest else []
        self._drafting_ms = (perf_counter() - before) * 1e3
        drafted = self._grow([states[index] for index in rest], [requests[index] for index in rest], drafts)
        grown |= zip(rest, drafted, strict=True)
        self._cut_by_prices(requests, grown, rest, started)
        return grown

    def _without_draft(self, states: Sequence[UnionState], requests: Sequence[DraftRequest]) -> dict[int, Growth]:
        """The trees that need no draft, by the index of their request."""
        enough = self._plan.skip_draft_above
        asked = [index for index, one in enumerate(requests) if one.prices is not None or enough is not None]
        grown = self._grow([states[index] for index in asked], [requests[index] for index in asked])
        sketches = {index: one for index, one in zip(asked, grown, strict=True) if requests[index].prices is not None}
        found = {
            index: one
            for index, one in zip(asked, grown, strict=True)
            if index not in sketches and enough is not None and one.gain >= enough
        }
        self._net_gains = {index: _net_gain(requests[index].prices, one.gains) for index, one in sketches.items()}
        if sketches:
            kinds, rate = [_kind(gain) for gain in self._net_gains.values()], _rate_of(requests)
            is_drafted = self._plan.may_draft and self._drafting.is_used(kinds, rate)
            # If only tries use the draft, this pauses the clock: a draft's time does not include catching up with a
            # prompt.
            self._drafting.advance(kinds, rate)
            for index, one in sketches.items():
                if self._plan.may_draft and states[index].tries < _TRIES:
                    states[index].tries += 1
                elif not is_drafted:
                    found[index] = one
        return found

    def _cut_by_prices(
        self, requests: Sequence[DraftRequest], grown: dict[int, Growth], drafted: Sequence[int], started: float
    ) -> None:
        """Cut the trees that follow prices where further nodes gain less than their time, and learn from the round."""
        priced = {index: prices for index in grown if (prices := requests[index].prices) is not None}
        if not priced:
            return
        if learned := [index for index in drafted if index in self._net_gains]:
            without = [self._net_gains[index] for index in learned]
            added = [
                _net_gain(priced[index], grown[index].gains) - gain
                for index, gain in zip(learned, without, strict=True)
            ]
            self._drafting.learn([_kind(gain) for gain in without], added, self._drafting_ms)
        taken, net = allocate(list(priced.values()), [grown[index].gains for index in priced])
        for index, count in zip(priced, taken, strict=True):
            grown[index].cut(count)
        took = (perf_counter() - started) * 1e3 + self._learning_ms - self._drafting_ms
        if learned:  # a draft that did not pay does not count against the trees
            net = max(net - _rate_of(requests) * self._drafting_ms, sum(self._net_gains.values()))
        self._growing_of(len(requests)).learn((0,), (net,), took)

    def _bring_up_to_date(self, state: UnionState, request: DraftRequest) -> None:
        """Choose the acceptance model, and add the request's new ids to its text."""
        state.acceptance = state.greedy if request.sampling.params.is_greedy else state.sampled
        if state.text is not None:
            state.text.follow(request.ids)

    def _grow(
        self,
        states: Sequence[UnionState],
        requests: Sequence[DraftRequest],
        drafts: Sequence[DraftTree] | None = None,
    ) -> list[Growth]:
        """The most likely tree of each request."""
        for state, request in zip(states, requests, strict=True):
            state.scale = 1.0 if request.prices is None else state.kept
        wanted = [
            GrowthRequest(
                sampling=request.sampling,
                matrix=state.matrix,
                text=state.text,
                acceptance=state.acceptance,
                budget=request.budget,
                max_depth=request.max_depth,
                draft=None if drafts is None else drafts[index],
                prices=request.prices and replace(request.prices, rate=request.prices.rate / state.scale),
            )
            for index, (state, request) in enumerate(zip(states, requests, strict=True))
        ]
        grown = self.grower.grow(wanted)
        for state, one in zip(states, grown, strict=True):
            one.gains = [gain * state.scale for gain in one.gains]
        return grown

    def observe(self, states: Sequence[UnionState], observations: Sequence[Observation]) -> None:
        super().observe(states, observations)
        started, lessons = perf_counter(), []
        for state, observation in zip(states, observations, strict=True):
            if state.grown is not None:
                own = len(observation.tree) - observation.tree.forced  # no gain was expected of a grammar's tokens
                state.learn(sum(0 < node < own for node in observation.verdict.path))
                lessons.append(_lesson(state.acceptance, state.grown, observation))
        self.grower.learn(lessons)
        self._learning_ms = (perf_counter() - started) * 1e3

    def reset(self) -> None:
        super().reset()
        self.greedy.reset()
        self.sampled.reset()
        self._drafting, self._growing = TimedOption(), {}


def _grower(models: Sequence[AcceptanceModel], matrix: TransitionMatrix) -> Grower:
    """The kernels where they run, for exactly the classes that they compute; a subclass runs its own Python."""
    is_own = all(type(model) is AcceptanceModel for model in models) and type(matrix) is TransitionMatrix
    return CompiledGrower() if is_own and loaded_kernels() is not None else ReferenceGrower()


def _lesson(model: AcceptanceModel, grown: Growth, observation: Observation) -> Lesson:
    """What the target chose after each accepted node of a tree that was expanded."""
    path = observation.verdict.path
    tokens = observation.tree.tokens.tolist() if len(path) > 1 else []
    children = {edge: node for node, edge in enumerate(zip(grown.parents, grown.tokens, strict=True))}
    nodes, chosen = list[int](), list[int]()
    node: int | None = 0
    for token in (*(tokens[one] for one in path[1:]), observation.verdict.next_token):
        if node is None or node >= len(grown.candidates):
            break
        nodes.append(node)
        chosen.append(token)
        node = children.get((node, token))  # not where a grammar added it
    return Lesson(model, grown.candidates, nodes, chosen)


def _net_gain(prices: Prices | None, gains: Sequence[float]) -> float:
    """Net gain of nodes over a pass without any, in multiples of what their request gains in a usual round."""
    return 0.0 if prices is None else prices.best_count(gains)[1] / prices.pace


def _kind(net_gain: float) -> int:
    """The class of a request by what its tree gains without a draft, in halves of a usual round's gain: what a draft
    adds depends on it."""
    return min(int(2 * net_gain), 10)


def _rate_of(requests: Sequence[DraftRequest]) -> float:
    """The price of a millisecond in usual rounds' gains, from the first request with prices."""
    prices = next(request.prices for request in requests if request.prices is not None)
    return prices.rate / prices.pace
