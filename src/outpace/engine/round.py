"""One round: propose token trees, verify them in one target pass, commit one path each, and let proposers observe."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch

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
from outpace.engine.pricing import Pricing, RoundPlan
from outpace.engine.session import Gain, Session
from outpace.kernels.draw import draw_natively, draws_natively
from outpace.lib.errors import InvalidRequest, NonFiniteLogits
from outpace.sampling.draw import BatchDraw, FastDraw, RejectionDraw, match, rejection, token_logprobs


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
