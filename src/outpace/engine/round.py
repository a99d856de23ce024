"""One round: plan budgets, propose token trees, verify them in one target pass, commit one path each, and observe.

The pass also writes the next chunks of prompts.
"""

from collections.abc import Sequence

from outpace.core.events import RoundTrace
from outpace.core.method_checks import check_sizes, check_tree, proposed
from outpace.core.protocols import DraftRequest, NodeOutputs, Observation, Target, Verdict
from outpace.core.tree import DraftTree
from outpace.engine.forced import under_grammar
from outpace.engine.phases import Phases
from outpace.engine.pricing import Pricing, RoundPlan
from outpace.engine.prompts import Prompts
from outpace.engine.session import Change, Session
from outpace.engine.validity import logprobs, valid_verdicts
from outpace.lib.places import places_of
from outpace.sampling.verification import BatchDraw, RejectionDraw, match, rejection


def run_round(
    target: Target, changes: Sequence[Change], pricing: Pricing | None = None, prompts: Prompts | None = None
) -> None:
    """Advance every session by one round: 1 to K + 1 tokens.

    Args:
        changes: of requests of any mix of methods, lengths, temperatures and tree sizes. A request whose logits are not
            finite on its path, or whose options leave no token there, gains an error and no tokens.
        pricing: plans the round; None uses the requests' own budgets.
        prompts: chunks of other requests' prompts, which the pass also writes.
    """
    sessions = [change.session for change in changes]
    slots = [_slot(session) for session in sessions]
    plan = RoundPlan([session.budget for session in sessions], [None] * len(sessions))
    if pricing is not None:
        plan = pricing.plan(target, sessions, 0 if prompts is None else prompts.rows)
    phase = Phases()
    with phase("draft"):
        with phase.parts:
            trees = propose(sessions, plan)
        tokens = [tree.tokens.tolist() for tree in trees]
        for index, (session, tree) in enumerate(zip(sessions, trees, strict=True)):
            check_tree(session.proposer, tree, tokens[index], session.ids[-1], target.vocab_size)
            kept = tree.without_unreachable(session.sampling.ending_ids, tokens[index])
            if session.constraint is not None:
                said = tokens[index] if kept is tree else kept.tokens.tolist()
                kept = under_grammar(kept, said, session, plan.prices[index])
            if kept is not tree:
                trees[index], tokens[index] = kept, kept.tokens.tolist()
    with phase("forward"):
        taps = [session.proposer.needs.taps for session in sessions]
        chunk_outputs, outputs = target.run_pass([] if prompts is None else prompts.chunks, slots, trees, taps)
    with phase("verify"):
        verdicts = valid_verdicts(changes, outputs, verify(sessions, trees, tokens, outputs), tokens)
    with phase("commit"):
        target.commit([slots[index] for index in verdicts], [verdict.path for verdict in verdicts.values()])
        for index, verdict in verdicts.items():
            session, tree = sessions[index], trees[index]
            gained = [*(tokens[index][node] for node in verdict.path[1:]), verdict.next_token]
            origins = [tree.origins[node] for node in verdict.path[1:]]
            scores = logprobs(session, outputs[index], verdict.path, gained)
            changes[index].emit(gained, scores, origins)
            if session.params.trace:
                changes[index].trace = RoundTrace(
                    tuple(tokens[index]), tree.topology.parents, tree.origins, verdict.path, verdict.next_token
                )
    with phase("observe"):
        observe(sessions, trees, outputs, verdicts)
    phase.count(changes, trees)
    tokens_gained = [len(change.tokens) for change in changes]
    if prompts is not None:
        with phase("prompts"):
            prompts.take(chunk_outputs)
        if pricing is not None:
            pricing.learn_prompts(sessions, prompts.context, prompts.rows, sum(map(len, trees)), phase)
    if pricing is not None:
        pricing.learn(sessions, plan, trees, verdicts, phase, tokens_gained, has_prompts=prompts is not None)


def write_prompts(target: Target, prompts: Prompts, pricing: Pricing | None = None) -> None:
    """Write the next chunks of prompts in a pass of their own."""
    phase = Phases()
    with phase("prompts"):
        chunk_outputs, _ = target.run_pass(prompts.chunks, (), ())
        prompts.take(chunk_outputs)
    if pricing is not None:
        pricing.learn_prompts((), prompts.context, prompts.rows, 0, phase)


def propose(sessions: Sequence[Session], plan: RoundPlan) -> list[DraftTree]:
    """One tree per session; each proposer is called once for all its sessions."""
    trees: dict[int, DraftTree] = {}
    for proposer, members in places_of(session.proposer for session in sessions).items():
        requests = []
        for index in members:
            session, budget = sessions[index], plan.budgets[index]
            prices = plan.prices[index] if session.is_priced and plan.is_drafted else None
            requests.append(DraftRequest(session.sampling, budget, session.max_depth if budget else 0, prices))
        states = [sessions[index].state for index in members]
        own = proposed(proposer, states, requests)
        check_sizes(proposer, own, requests)
        trees |= zip(members, own, strict=True)
    return [trees[index] for index in range(len(sessions))]


def verify(
    sessions: Sequence[Session],
    trees: Sequence[DraftTree],
    tokens: Sequence[list[int]],
    outputs: Sequence[NodeOutputs],
) -> list[Verdict]:
    """A verdict for each session, by its request's verification rule."""
    verdicts: dict[int, Verdict] = {}
    matched = [index for index, session in enumerate(sessions) if session.params.verification == "match"]
    if matched:
        topologies = [trees[index].topology for index in matched]
        draw = BatchDraw(
            [outputs[index] for index in matched],
            topologies,
            [tokens[index] for index in matched],
            [sessions[index].sampling for index in matched],
        )
        verdicts |= zip(matched, match(topologies, [tokens[index] for index in matched], draw), strict=True)
    for index, session in enumerate(sessions):
        if index not in verdicts:
            primitives = RejectionDraw(outputs[index], trees[index].topology, tokens[index], session.sampling)
            verdicts[index] = rejection(
                trees[index], tokens[index], primitives.target_probs, primitives.categorical, primitives.bernoulli
            )
    return [verdicts[index] for index in range(len(sessions))]


def observe(
    sessions: Sequence[Session],
    trees: Sequence[DraftTree],
    outputs: Sequence[NodeOutputs],
    verdicts: dict[int, Verdict],
) -> None:
    """Let each proposer observe its verified trees."""
    for proposer, members in places_of(session.proposer for session in sessions).items():
        valid = [index for index in members if index in verdicts]
        if valid:
            observations = [
                Observation(trees[index], verdicts[index], outputs[index], sessions[index].sampling.before)
                for index in valid
            ]
            proposer.observe([sessions[index].state for index in valid], observations)


def _slot(session: Session) -> int:
    assert session.slot is not None, "a session in a round has a slot"
    return session.slot
