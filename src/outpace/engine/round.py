"""One round: plan budgets, propose token trees, verify them in one target pass, commit one path each, and observe.

Plans follow measured times of passes and what requests gain, both learned from clocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from weakref import WeakKeyDictionary

import torch

from outpace.budget.costs import ROWS, Averages, PassCosts, PassTimes, Prices, averaged
from outpace.budget.decisions import RoundRates, TreeSizes
from outpace.core.events import RoundTrace, TokenLogprob
from outpace.core.protocols import (
    NO_TOKEN,
    Chunk,
    DraftRequest,
    NodeOutputs,
    Observation,
    PromptChunk,
    Proposer,
    Target,
    Verdict,
    check_sizes,
    check_tree,
    proposed,
)
from outpace.core.tree import DraftTree, Topology
from outpace.engine.forced import under_grammar
from outpace.engine.session import Gain, Session
from outpace.kernels.draw import draw_natively, draws_natively
from outpace.lib.errors import InvalidRequest, NonFiniteLogits
from outpace.sampling.draw import BatchDraw, FastDraw, RejectionDraw, match, rejection, token_logprobs

_KEPT = 0.97  # of averages over rounds, a round later: about thirty are remembered
_PACE_KEPT = 0.95  # of what a request gained
_REPEATS, _SECONDS = 5, 1.0  # measurements of each size at most, and how long they may take before another starts


@dataclass(frozen=True)
class RoundPlan:
    """How a round drafts.

    Attributes:
        budgets: drafted nodes of each request at most.
        prices: of each request; None for those that follow none.
        is_drafted: false where requests that follow prices or sizes draft nothing, since rounds are faster so.
    """

    budgets: Sequence[int]
    prices: Sequence[Prices | None]
    is_drafted: bool = True


class Pricing:
    """Plans rounds by prices that it learns from their clocks.

    Clocks decide which nodes are taken, and never what is generated: under "match" the target's own draws decide,
    whatever the tree. Under "rejection" the tree affects the answer, so that such requests get no prices.
    """

    def __init__(self, costs: PassCosts) -> None:
        self._costs = costs
        self._ms = Averages(_KEPT)  # of a round, by its number of requests
        self._paces: WeakKeyDictionary[Session, float] = WeakKeyDictionary()  # tokens gained per round
        self._pace: float | None = None  # of all requests
        self._sizes: WeakKeyDictionary[Proposer, TreeSizes] = WeakKeyDictionary()
        self._rates = RoundRates()

    def plan(self, target: Target, sessions: Sequence[Session]) -> RoundPlan:
        """How the next round of these requests drafts. Passes are measured when this is first needed.

        A request gets its own budget; or fewer nodes, where it shares the round, its method follows no prices itself,
        and more nodes do not pay.
        """
        count, budgets = len(sessions), [session.budget for session in sessions]
        nothing: list[Prices | None] = [None] * count
        if not _follow(sessions):
            return RoundPlan(budgets, nothing)
        if count > 1 and not self._rates.drafts(count):
            follow = [session.is_priced or session.is_sized for session in sessions]
            own = [0 if one else budget for one, budget in zip(follow, budgets, strict=True)]
            return RoundPlan(own, nothing, is_drafted=False)
        times = self._times(target, sessions)
        paces = [self._paces.get(session, self._pace or 1.0) for session in sessions]
        each = count / self._ms.known.get(count, times.ms[0])
        prices = [
            Prices(pace * each, times, pace) if session.is_priced else None
            for session, pace in zip(sessions, paces, strict=True)
        ]
        rate = sum(paces) / self._ms.known.get(count, times.ms[0])
        for proposer, members in _sized(sessions).items():
            sizes = self._sizes.setdefault(proposer, TreeSizes(max(budgets[index] for index in members)))
            for index, nodes in zip(members, sizes.budgets(len(members), times, rate), strict=True):
                budgets[index] = nodes
        return RoundPlan(budgets, prices)

    def pays(self, count: int) -> bool:
        """Whether drafting pays in rounds of so many requests, as far as is known."""
        return count == 1 or self._rates.pays(count)

    def learn(
        self,
        sessions: Sequence[Session],
        plan: RoundPlan,
        trees: Sequence[DraftTree],
        verdicts: Mapping[int, Verdict],
        clock: "Phases",
        tokens: Sequence[int],
    ) -> None:
        """Learn from a round, if any of its requests follows prices."""
        if not _follow(sessions):
            return
        if len(sessions) > 1:
            self._rates.advance(len(sessions), plan.is_drafted)
            if plan.is_drafted or all(len(tree) == 1 for tree in trees):
                self._rates.learn(len(sessions), sum(tokens), clock.ms())
        self.learn_times(sessions, sum(map(len, trees)), clock.ms("forward", "verify"), clock.ms(), tokens)
        for proposer, members in (_sized(sessions) if plan.is_drafted else {}).items():
            ms = clock.ms("draft") if len(members) == len(sessions) else None
            seen = [_seen(trees[index], verdicts.get(index)) for index in members]
            self._sizes[proposer].learn([plan.budgets[index] for index in members], seen, ms)

    def learn_times(
        self, sessions: Sequence[Session], rows: int, pass_ms: float, round_ms: float, tokens: Sequence[int]
    ) -> None:
        """Learn how long a round took, and what each request gained in tokens."""
        self._costs.learn(len(sessions), rows, _context(sessions), pass_ms)
        self._ms.learn(len(sessions), round_ms)
        for session, gained in zip(sessions, tokens, strict=True):
            self._paces[session] = averaged(self._paces.get(session, self._pace), float(gained), _PACE_KEPT)
        self._pace = averaged(self._pace, sum(tokens) / len(tokens), _KEPT)

    def _times(self, target: Target, sessions: Sequence[Session]) -> PassTimes:
        """Of passes of these requests, for all numbers of nodes that they may have together."""
        if not self._costs.is_known:
            first = sessions[0]
            assert first.slot is not None, "a session in a round has a slot"
            measure(self._costs, target, first.slot, first.ids[-1], first.written)
        return self._costs.times(len(sessions), _context(sessions), sum(session.budget for session in sessions))


def measure(costs: PassCosts, target: Target, slot: int, token: int, context: int = 0) -> None:
    """Estimate or time passes after the contents of a slot, which stays as it was. Rounds correct the times.

    Args:
        token: what the passes compute.
        context: tokens in the slot, whose time is subtracted where the target knows it.
    """
    context_ms = target.context_times() if hasattr(target, "context_times") else (0.0, 0.0)
    if hasattr(target, "estimated_times") and (times := target.estimated_times(ROWS)) is not None:
        costs.set_measured(times, context_ms)
        return
    trees = [DraftTree(torch.full((rows,), token), Topology.chain(rows)) for rows in ROWS]
    # The largest allocates memory; where passes are captured as graphs, each size is captured first.
    for tree in trees if getattr(target, "captures", False) else trees[-1:]:
        _seconds(target, slot, tree)
    seconds: list[list[float]] = []
    while not seconds or (len(seconds) < _REPEATS and sum(map(sum, seconds)) < _SECONDS):
        seconds.append([_seconds(target, slot, tree) for tree in trees])
    each, row = context_ms
    measured = [min(own) * 1e3 for own in zip(*seconds, strict=True)]
    without = [ms - context * (each + row * rows) for rows, ms in zip(ROWS, measured, strict=True)]
    costs.set_measured([max(less, ms / 10) for less, ms in zip(without, measured, strict=True)], context_ms)


def _seconds(target: Target, slot: int, tree: DraftTree) -> float:
    started = perf_counter()
    (outputs,) = target.forward([slot], [tree], [()])
    outputs.top_ids.tolist()  # waits for a GPU
    return perf_counter() - started


def _seen(tree: DraftTree, verdict: Verdict | None) -> tuple[int, list[int]] | None:
    """The method's own nodes in a tree, and the accepted ones; not those that a grammar forces."""
    own = len(tree) - tree.forced
    return None if verdict is None else (own - 1, [node for node in verdict.path[1:] if node < own])


def _follow(sessions: Sequence[Session]) -> bool:
    """Whether any request of a round follows prices or sizes. A single request's method drafts as configured."""
    return any(session.is_priced or (session.is_sized and len(sessions) > 1) for session in sessions)


def _sized(sessions: Sequence[Session]) -> dict[Proposer, list[int]]:
    """Places of the requests whose budgets follow sizes, by proposer."""
    groups: dict[Proposer, list[int]] = {}
    for index, session in enumerate(sessions):
        if session.is_sized and len(sessions) > 1:
            groups.setdefault(session.proposer, []).append(index)
    return groups


def _context(sessions: Sequence[Session]) -> int:
    """Average length of the requests' contexts."""
    return sum(len(session.ids) for session in sessions) // len(sessions)


class Phases:
    """A clock for the phases of one round: `with phase("forward"):`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase. Time between two phases counts to the second one."""
        yield
        now = perf_counter()
        self._seconds[name], self._last = now - self._last, now

    def ms(self, *names: str) -> float:
        """Milliseconds of some phases, or of all."""
        return sum(seconds for name, seconds in self._seconds.items() if not names or name in names) * 1e3

    def count(self, gains: Sequence[Gain], trees: Sequence[DraftTree]) -> None:
        """Add the round to the metrics of its requests, which verified these trees."""
        took = [(f"{name}_ms", seconds * 1e3) for name, seconds in self._seconds.items()]
        for gain, tree in zip(gains, trees, strict=True):
            metrics, drafted = gain.metrics, len(tree) - 1
            metrics.steps += 1
            metrics.drafted += drafted
            metrics.retrieved += tree.retrieved
            metrics.forced += tree.forced
            metrics.draft_passes += tree.draft_passes
            metrics.plain_steps += drafted == 0
            metrics.graft_ms += tree.graft_ms
            if gain.session.constraint is not None:
                metrics.grammar_ms += gain.session.constraint.take_ms()
            counted = vars(metrics)
            for name, ms in took:
                counted[name] += ms
            if gain.error is None:
                metrics.decode_ms = gain.since_first_token(self._last)


FAST_DRAW = FastDraw(draws_natively, draw_natively)


def run_round(target: Target, gains: Sequence[Gain], pricing: Pricing | None = None) -> None:
    """Advance every session by one round: 1 to K + 1 tokens.

    Args:
        gains: of requests of any mix of methods, lengths, temperatures and tree sizes. A request whose logits are not
            finite on its path, or whose options leave no token there, gains an error and no tokens.
        pricing: plans the round; None for the requests' own budgets.
    """
    sessions = [gain.session for gain in gains]
    slots = [_slot(session) for session in sessions]
    plan = RoundPlan([session.budget for session in sessions], [None] * len(sessions))
    if pricing is not None:
        plan = pricing.plan(target, sessions)
    phase = Phases()
    with phase("draft"):
        trees = propose(target, sessions, plan)
        tokens = [tree.tokens.tolist() for tree in trees]
        for index, (session, tree) in enumerate(zip(sessions, trees, strict=True)):
            check_tree(session.proposer, tree, tokens[index], session.ids[-1], target.vocab_size)
            kept = tree.without_unsayable(session.stream.ending_ids, tokens[index])
            if session.constraint is not None:
                said = tokens[index] if kept is tree else kept.tokens.tolist()
                kept = under_grammar(kept, said, session, room(target, session), plan.prices[index])
            if kept is not tree:
                trees[index], tokens[index] = kept, kept.tokens.tolist()
    with phase("forward"):
        taps = [session.proposer.needs.taps for session in sessions]
        outputs = target.forward(slots, trees, taps)
    with phase("verify"):
        verdicts = keep_sound(gains, outputs, verify(sessions, trees, tokens, outputs), tokens)
    with phase("commit"):
        target.commit([slots[index] for index in verdicts], [verdict.path for verdict in verdicts.values()])
        for index, verdict in verdicts.items():
            session, tree = sessions[index], trees[index]
            gained = [*(tokens[index][node] for node in verdict.path[1:]), verdict.next_token]
            forced = sum(node >= len(tree) - tree.forced for node in verdict.path)
            retrieved = sum(node >= tree.drafted for node in verdict.path) - forced
            origins = [tree.origins[node] for node in verdict.path[1:]]
            scores = logprobs(session, outputs[index], verdict.path, gained)
            gains[index].emit(gained, scores, retrieved, forced, origins)
            if session.params.trace:
                parents, walked = tree.topology.parents, (verdict.path, verdict.next_token)
                gains[index].rounds = (RoundTrace(tuple(tokens[index]), parents, tree.origins, *walked),)
    with phase("observe"):
        observe(sessions, trees, outputs, verdicts)
    phase.count(gains, trees)
    if pricing is not None:
        pricing.learn(sessions, plan, trees, verdicts, phase, [len(gain.tokens) for gain in gains])


def propose(target: Target, sessions: Sequence[Session], plan: RoundPlan) -> list[DraftTree]:
    """One tree per session; each proposer is called once for all its sessions."""
    trees: dict[int, DraftTree] = {}
    for proposer, members in by_proposer(sessions).items():
        requests = []
        for index in members:
            session = sessions[index]
            depth = room(target, session) if plan.budgets[index] else 0
            requests.append(DraftRequest(session.stream, plan.budgets[index], depth, plan.prices[index]))
        states = [sessions[index].state for index in members]
        own = proposed(proposer, states, requests)
        check_sizes(proposer, own, requests)
        trees |= zip(members, own, strict=True)
    return [trees[index] for index in range(len(sessions))]


def room(target: Target, session: Session) -> int:
    """How deep a draft may be: the target's own token follows it, so the last token that fits is never a draft."""
    return max(min(session.remaining, target.max_length - len(session.ids)) - 1, 0)


def verify(
    sessions: Sequence[Session],
    trees: Sequence[DraftTree],
    tokens: Sequence[list[int]],
    outputs: Sequence[NodeOutputs],
) -> list[Verdict]:
    """A verdict for each session, by the rule that its request names."""
    verdicts: dict[int, Verdict] = {}
    matched = [index for index, session in enumerate(sessions) if session.params.verification == "match"]
    if matched:
        topologies = [trees[index].topology for index in matched]
        draw = BatchDraw(
            [outputs[index] for index in matched],
            topologies,
            [tokens[index] for index in matched],
            [sessions[index].stream for index in matched],
            FAST_DRAW,
        )
        verdicts |= zip(matched, match(topologies, [tokens[index] for index in matched], draw), strict=True)
    for index, session in enumerate(sessions):
        if index not in verdicts:
            primitives = RejectionDraw(outputs[index], trees[index].topology, tokens[index], session.stream)
            verdicts[index] = rejection(
                trees[index], tokens[index], primitives.target_probs, primitives.categorical, primitives.bernoulli
            )
    return [verdicts[index] for index in range(len(sessions))]


def keep_sound(
    gains: Sequence[Gain],
    outputs: Sequence[NodeOutputs],
    verdicts: Sequence[Verdict],
    tokens: Sequence[Sequence[int]],
) -> dict[int, Verdict]:
    """The verdicts whose path has finite logits and a next token; the other sessions get an error.

    Only nodes on the path count: plain decoding would not have computed the others. NaN and infinity sort first, so
    that the top logit is checked. Where no token is left after accepted drafts, the answer may have ended before: the
    round then ends with the last of them, and the next round, if any, finds no token.
    """
    is_finite = bool(torch.isfinite(torch.cat([output.top_logits[:, 0] for output in outputs])).all())
    sound: dict[int, Verdict] = {}
    for index, (gain, output, verdict) in enumerate(zip(gains, outputs, verdicts, strict=True)):
        session = gain.session
        depth = None
        if not is_finite:
            nodes = torch.isfinite(output.top_logits[:, 0]).tolist()
            depth = next((depth for depth, node in enumerate(verdict.path) if not nodes[node]), None)
        if depth is None and verdict.next_token == NO_TOKEN and verdict.accepted_drafts:
            sound[index] = Verdict(verdict.path[:-1], tokens[index][verdict.path[-1]])
        elif depth is None and verdict.next_token != NO_TOKEN:
            sound[index] = verdict
        elif depth is None:
            failed = session.constraint is not None and session.constraint.error
            gain.error = InvalidRequest(
                f"request {session.request_id}: grammar={session.params.grammar}: at position {len(session.ids)} it is "
                f"too much for the grammar library ({failed}); simplify it"
                if failed
                else f"request {session.request_id}: its grammar, penalties, logit_bias, bad words and min_new_tokens "
                f"leave no token to choose at position {len(session.ids)}: relax them"
            )
        else:
            gain.error = NonFiniteLogits(
                f"request {session.request_id}: the target's logits for position {len(session.ids) + depth} are not "
                "finite; check the weights, or load the model with dtype='float32'"
            )
    return sound


def logprobs(
    session: Session, outputs: NodeOutputs, path: Sequence[int], tokens: Sequence[int]
) -> Sequence[TokenLogprob]:
    """Log-probabilities of the tokens chosen after the nodes of a path, if requested."""
    count = session.params.logprobs
    return () if count is None else token_logprobs(outputs, path, tokens, count)


def observe(
    sessions: Sequence[Session],
    trees: Sequence[DraftTree],
    outputs: Sequence[NodeOutputs],
    verdicts: dict[int, Verdict],
) -> None:
    """Let each proposer observe its verified trees."""
    for proposer, members in by_proposer(sessions).items():
        sound = [index for index in members if index in verdicts]
        if sound:
            observations = [
                Observation(trees[index], verdicts[index], outputs[index], sessions[index].stream.before)
                for index in sound
            ]
            proposer.observe([sessions[index].state for index in sound], observations)


def by_proposer(sessions: Sequence[Session]) -> dict[Proposer, list[int]]:
    """Indices of the sessions that share a proposer."""
    groups: dict[Proposer, list[int]] = {}
    for index, session in enumerate(sessions):
        groups.setdefault(session.proposer, []).append(index)
    return groups


def _slot(session: Session) -> int:
    assert session.slot is not None, "a session in a round has a slot"
    return session.slot


def run_prefill(target: Target, gains: Sequence[Gain], size: int, is_crowded: bool = False) -> None:
    """Write the next chunk of every prompt; a prompt that is complete gains its first token.

    Args:
        is_crowded: drafting does not pay for so many requests. Methods that follow prices then skip the target's top
            ids in a prompt, which take a product with the whole vocabulary at every position.
    """
    sessions, chunks = [gain.session for gain in gains], []
    for gain in gains:
        session, needs = gain.session, gain.session.proposer.needs
        assert session.slot is not None
        gain.prefilled = min(session.prefilled + size, len(session.prompt_ids))
        tokens = torch.tensor(session.prompt_ids[session.prefilled : gain.prefilled])
        is_last = gain.prefilled == len(session.prompt_ids)
        is_spared = is_crowded and (session.is_priced or session.is_sized)
        chunks.append(Chunk(session.slot, tokens, needs.top_k > 0 and not is_spared, is_last, needs.taps))
    outputs = target.prefill(chunks)
    for proposer, members in by_proposer(sessions).items():
        states = [sessions[index].state for index in members]
        seen = []
        for index in members:
            session, output = sessions[index], outputs[index]
            before = session.prompt_ids[session.prefilled - 1] if session.prefilled else NO_TOKEN
            seen.append(PromptChunk(chunks[index].tokens, output.top_ids, output.features, before))
        proposer.prefill(states, seen)
    ready = [(gain, output.last) for gain, output in zip(gains, outputs, strict=True) if output.last is not None]
    if not ready:
        return
    first, last = [gain for gain, _ in ready], [output for _, output in ready]
    pending = [[gain.session.prompt_ids[-1]] for gain in first]
    draw = BatchDraw(
        last, [Topology.chain(1)] * len(first), pending, [gain.session.stream for gain in first], FAST_DRAW
    )
    drawn = draw([(index, 0) for index in range(len(first))])
    verdicts = keep_sound(first, last, [Verdict((0,), token) for token in drawn], pending)
    for index, verdict in verdicts.items():
        token = verdict.next_token
        first[index].emit([token], logprobs(first[index].session, last[index], (0,), [token]))
