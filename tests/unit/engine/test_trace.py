"""What a request that asks is told of its rounds: the verified tree, who named each token, and what was accepted."""

from collections.abc import Callable

import pytest
import torch

from outpace.core.events import NodeOrigin, RequestMetrics, StepEvent
from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.core.tree import DraftTree, Topology
from outpace.engine.engine import Engine
from outpace.testing import OracleDrafter, ToyTarget, decode
from outpace.testing.sources import ToySource, blend
from outpace.trees.grafting import GraftedProposer, MatrixRetriever, SuffixRetriever
from outpace.trees.proposer import EmptyDraft, GrowingProposer
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.shapes.beam import Beam, BeamConfig
from outpace.trees.shapes.rank_paths import grafted_paths
from outpace.trees.union.proposer import UnionPlan
from tests.unit.engine.doubles import CharDetokenizer, named, run, text_of
from tests.unit.trees.union.worlds import union_of

VOCAB = 12
CPU = torch.device("cpu")
PROMPT = [4, 6, 4, 6, 4, 6, 4]  # repetitive, so that matches are found


def drafting() -> Proposer:
    return GrowingProposer(ToySource(blend(0.8, VOCAB)), Beam(BeamConfig(depth=2, breadth=2)), 5)


def grafted() -> Proposer:
    matrix = MatrixRetriever(TransitionMatrix(VOCAB, CPU), grafted_paths())
    return GraftedProposer(drafting(), [SuffixRetriever(CPU), matrix], CPU, reserved=0.0)


def union() -> Proposer:
    matrix = MatrixLearner(TransitionMatrix(VOCAB, CPU), False)
    plan = UnionPlan(draft_budget=4, skip_draft_above=None)
    return union_of(drafting(), matrix, plan, budget=14)


def traced(proposer: Proposer, budget: int | None = None, **options: object) -> tuple[list[StepEvent], RequestMetrics]:
    params = SamplingParams(max_new_tokens=60, seed=3, trace=True, **options)  # type: ignore[arg-type]
    session = run(Engine(ToyTarget(VOCAB)), PROMPT, params, proposer, budget)
    return session.events, session.metrics


FAMILIES: dict[str, tuple[Callable[[], Proposer], set[str]]] = {
    "plain": (EmptyDraft, set()),
    "model": (drafting, {"drafted"}),
    "lookup": (lambda: named("lookup:budget=2", VOCAB), {"matched"}),
    "recycle": (lambda: named("recycle:budget=16", VOCAB), {"retrieved"}),
    "lookahead": (lambda: named("lookahead:budget=15", VOCAB), {"retrieved"}),
    "samd": (lambda: named("samd:budget=9,min_match=2", VOCAB), {"matched", "retrieved"}),
    "graft": (grafted, {"drafted", "matched", "retrieved"}),
    "union-without-draft": (lambda: named("outpace:draft=none,budget=9", VOCAB), {"matched", "retrieved"}),
    "union": (union, {"drafted", "matched", "retrieved"}),
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_who_named_its_tokens(family: str, temperature: float) -> None:
    """Guards against tokens said to come from elsewhere, a path of other tokens, and counters that disagree with it."""
    make, expected = FAMILIES[family]
    events, metrics = traced(make(), budget=14 if family == "graft" else None, temperature=temperature)
    rounds = [one for event in events for one in event.rounds]
    assert {origin for one in rounds for origin in one.origins} == {"pending"} | expected
    assert events[0].rounds == ()
    assert events[0].origins == ("bonus",)
    counts: dict[str, int] = {}
    for event in events[1:]:
        (one,) = event.rounds
        assert len(one.tokens) == len(one.parents) == len(one.origins)
        assert one.origins[0] == "pending"
        assert "pending" not in one.origins[1:]
        assert one.path[0] == 0
        assert one.path == Topology.of(one.parents).path(one.path[-1])
        decided = (*(one.tokens[node] for node in one.path[1:]), one.next_token)
        assert event.tokens == decided[: len(event.tokens)]
        assert len(event.origins) == len(event.tokens)
        for origin in event.origins:
            counts[origin] = counts.get(origin, 0) + 1
    bonus = counts.pop("bonus", 0)
    assert counts == metrics.accepted_by_origin
    assert sum(counts.values()) == metrics.accepted
    assert 1 + bonus + metrics.accepted == metrics.new_tokens
    assert sum(len(one.tokens) - 1 for one in rounds) == metrics.drafted


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_changes_nothing(family: str) -> None:
    """Guards against an answer that depends on being watched, and against untraced requests that carry rounds."""
    make, _ = FAMILIES[family]
    events, metrics = traced(make())
    params = SamplingParams(max_new_tokens=60, seed=3)
    (session,) = decode(Engine(ToyTarget(VOCAB)), [PROMPT], [params], [make()])
    assert session.generated == [token for event in events for token in event.tokens]
    assert all(event.rounds == () for event in session.events)
    assert session.metrics.accepted_by_origin == metrics.accepted_by_origin


def test_counters_are_those_of_the_answer_and_not_of_the_path() -> None:
    """Guards against accepted drafts behind a stop string that are counted by origin, or reported as emitted."""
    (plain,) = decode(Engine(ToyTarget(VOCAB)), [PROMPT], [SamplingParams(max_new_tokens=20)], [EmptyDraft()])
    stop = text_of(plain.generated[4:7])
    engine = Engine(ToyTarget(VOCAB), CharDetokenizer)
    params = SamplingParams(max_new_tokens=20, stop=(stop,), trace=True)
    session = run(engine, PROMPT, params, OracleDrafter([plain.ids]))
    (event,) = [event for event in session.events if event.rounds]
    assert len(event.rounds[0].path) == 9
    assert session.metrics.accepted_by_origin == {"drafted": session.metrics.accepted}
    assert session.metrics.accepted == len(event.tokens) < 8
    assert event.origins == ("drafted",) * len(event.tokens)


def test_a_tree_keeps_its_origins_when_it_is_cut() -> None:
    """Guards against origins that stay behind when nodes below an ending token are left out, or are shifted by one."""
    origins: tuple[NodeOrigin, ...] = ("pending", "drafted", "matched", "retrieved", "forced")
    tree = DraftTree(torch.tensor([1, 9, 2, 3, 4]), Topology.of([-1, 0, 1, 0, 3]), origins=origins)
    cut = tree.without_unreachable({9}, tree.tokens.tolist())
    assert cut.origins == ("pending", "drafted", "retrieved", "forced")
    assert cut.with_forced([7, 8], [1, 4]).origins == (*cut.origins, "forced", "forced")
    assert DraftTree.chain(torch.tensor([1, 2])).origins == ("pending", "drafted")
    with pytest.raises(ValueError, match="1 origins on a topology of 2 nodes"):
        DraftTree(torch.tensor([1, 2]), Topology.chain(2), origins=("pending",))
