"""What the engine and a proposer owe each other: drafts that are checked where they would change what is said or break
a round for others, a budget that is kept, and the truth about what happened."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from outpace.core.params import SamplingParams
from outpace.core.protocols import BaseProposer, DraftRequest, Needs
from outpace.core.tree import MAX_TREE_NODES, DraftTree, Topology
from outpace.lib.errors import InvalidRequest, MethodError
from outpace.testing import OracleDrafter, decode
from outpace.trees.grafting import GraftedProposer, MatrixRetriever
from outpace.trees.retrieval.transition_matrix import TransitionMatrix
from outpace.trees.shapes.rank_paths import grafted_paths
from tests.unit.engine.doubles import PROMPT, VOCAB, distinct_answer, run, toy_engine


class Returned(BaseProposer):
    """What it proposes is made by a function of the request."""

    def __init__(self, make: Callable[[DraftRequest], Any]) -> None:
        self._make = make

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._make(request) for request in requests]


class Whole(Returned):
    """What it makes of the only request is the whole answer, not the tree of a request."""

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        proposed: list[DraftTree] = self._make(requests[0])
        return proposed


def chain(request: DraftRequest, *tokens: int) -> DraftTree:
    return DraftTree.chain(torch.tensor([request.ids[-1], *tokens]))


def skewed(request: DraftRequest) -> DraftTree:
    return DraftTree.chain(torch.tensor([request.ids[-1], 1]), {0: torch.full((VOCAB - 1,), 1 / VOCAB)})


MISTAKES: dict[str, tuple[BaseProposer, str]] = {
    "another first token": (
        Returned(lambda request: DraftTree.chain(torch.tensor([(request.ids[-1] + 1) % 4, 1]))),
        r"method Returned: proposed a tree that begins with \d+; node 0 must be the pending token \d+, which is "
        r"request.ids\[-1\], or the answer would change",
    ),
    "no tree": (Whole(lambda request: []), "method Whole: propose.. returned 0 trees for 1 requests; return one Draft"),
    "a list for a tree": (
        Returned(lambda request: [request.ids[-1], 1]),
        r"method Returned: propose.. returned \[\d+, 1\], a list, instead of a tree; return DraftTree.chain\(",
    ),
    "nothing": (Whole(lambda request: None), "method Whole: propose.. returned None, a NoneType; return a list"),
    "a tree for a list": (Whole(lambda request: chain(request, 1)), "returned .*, a DraftTree; return a list with one"),
    "floats": (
        Returned(lambda request: DraftTree.chain(torch.tensor([float(request.ids[-1]), 1.0]))),
        r"method Returned: tokens must be int64 \[N\], got torch.float32 \(2,\); give torch.tensor\(ids, dtype=",
    ),
    "ids in a list": (
        Returned(lambda request: DraftTree([request.ids[-1], 1], Topology.chain(2))),  # type: ignore[arg-type]
        r"method Returned: tokens must be int64 \[N\], got \[\d+, 1\]; give torch.tensor\(",
    ),
    "parents in a list": (
        Returned(lambda request: DraftTree(torch.tensor([request.ids[-1], 1]), [-1, 0])),  # type: ignore[arg-type]
        r"method Returned: topology=\[-1, 0\]: must be a Topology; give Topology.of\(parents\)",
    ),
    "parents that come later": (
        Returned(lambda request: DraftTree(torch.tensor([request.ids[-1], 1, 2]), Topology.of([-1, 2, 0]))),
        r"method Returned: parents\[1\]=2: a parent must come before its child",
    ),
    "too many nodes": (
        Returned(lambda request: DraftTree(torch.tensor([request.ids[-1], *range(9)]), Topology.of([-1, *[0] * 9]))),
        "method Returned: proposed 9 nodes of depth 1; the budget is 8 nodes of depth 8: propose at most",
    ),
    "too deep": (
        Returned(lambda request: chain(request, *range(request.max_depth + 1))),
        "method Returned: proposed 9 nodes of depth 9; the budget is 8 nodes of depth 8: .* request.max_depth",
    ),
    "another vocabulary": (Returned(skewed), r"method Returned: draft_probs\[0\] has 59 entries; give one"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_a_method_are_named(mistake: str) -> None:
    """Guards against a method of another package that silently changes the answer, and against an AttributeError or an
    IndexError from inside the engine that names neither the method nor what to write instead."""
    proposer, message = MISTAKES[mistake]
    with pytest.raises(MethodError, match=message):
        decode(toy_engine(), [[1, 2, 3]], [SamplingParams(max_new_tokens=10)], [proposer])


def test_a_mistake_inside_a_graft_names_the_method_that_made_it() -> None:
    """Guards against an AttributeError of the graft, whose base is a method of another package that returns lists."""
    base = Returned(lambda request: [request.ids[-1], 1])
    matrix = MatrixRetriever(TransitionMatrix(VOCAB, torch.device("cpu")), grafted_paths())
    proposer = GraftedProposer(base, [matrix], torch.device("cpu"))
    with pytest.raises(MethodError, match=r"^method Returned: propose.. returned \["):
        decode(toy_engine(), [[1, 2, 3]], [SamplingParams(max_new_tokens=10)], [proposer])


class Complete:
    """All that a proposer has, without a base class. Nothing can refer to it weakly."""

    __slots__ = ()
    needs, budget = Needs(), 2
    open = fork = close = rewind = prefill = observe = reset = lambda self, *arguments: None

    def can_fork(self, own: bool) -> bool:
        return False

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [chain(request) for request in requests]


DEFECTS: dict[str, tuple[str, Any, str]] = {
    "no needs": ("needs", None, r"Flawed.needs=None: must be an outpace.methods.Needs"),
    "needs in a dictionary": ("needs", {"top_k": 8}, r"Flawed.needs=\{'top_k': 8\}: must be an outpace.methods.Needs"),
    "half a logit": ("needs", Needs(top_k=1.5), r"top_k=1.5: must be a whole number from 0 to"),  # type: ignore[arg-type]
    "more ids than a pass returns": ("needs", Needs(top_k=32), r"top_k=32: must be a whole number from 0 to 16"),
    "a layer below the first": ("needs", Needs(taps=(-1,)), r"taps=-1: must be layers, as in"),
    "one layer": ("needs", Needs(taps=4.0), r"taps=4.0: must be layers, as in"),  # type: ignore[arg-type]
    "no observe": ("observe", None, r"Flawed has no method observe\(\); derive the class from outpace.methods.Base"),
    "no budget": ("budget", None, r"Flawed.budget=None: must be a whole number from 0 to 511"),
    "a budget beyond all": ("budget", 512, r"Flawed.budget=512: must be a whole number from 0 to 511"),
    "no hash": ("__hash__", None, r"Flawed cannot be hashed; .* a class with __eq__ a __hash__"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_of_a_proposer_are_named_when_it_is_handed_over(defect: str) -> None:
    """Guards against an AttributeError or a TypeError from inside the engine, in the first round or, where `observe` or
    `close` is missing, at the end of a request."""
    member, value, message = DEFECTS[defect]
    proposer = type("Flawed", (Complete,), {member: value})()
    with pytest.raises(MethodError, match=f"^method Flawed: .*{message}"):
        toy_engine().add([1, 2, 3], SamplingParams(max_new_tokens=5), proposer)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**6])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    """Guards against a library's error from deep inside a pass, or a lookup from the end of a table, where a method of
    somebody else's drafts an id that there is not; and against a vocabulary's last id refused."""

    def drafting(id_: int) -> BaseProposer:
        return Returned(lambda request: chain(request, *[id_][: request.max_depth]))

    said = f"method Returned: proposed token id {token}; ids must be from 0 to {VOCAB - 1}, those of the target's vocab"
    with pytest.raises(MethodError, match=said):
        decode(toy_engine(), [[1, 2, 3]], [SamplingParams(max_new_tokens=5)], [drafting(token)])
    for inside in (0, VOCAB - 1):
        (session,) = decode(toy_engine(), [[1, 2, 3]], [SamplingParams(max_new_tokens=5)], [drafting(inside)])
        assert len(session.generated) == 5


class Lending(OracleDrafter):
    """Gives the slots of its first request to the others: four siblings each, whatever was asked for."""

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        pending, topology = [request.ids[-1] for request in requests], Topology.of((-1, 0, 0, 0, 0))
        lent = [DraftTree(torch.tensor([token, 0, 0, 0, 0]), topology) for token in pending[1:]]
        return [DraftTree.chain(torch.tensor(pending[:1])), *lent]


@pytest.mark.parametrize(("budget", "is_fine"), [(2, True), (1, False)])
def test_slots_may_move_between_requests_of_a_proposer(budget: int, is_fine: bool) -> None:
    """Guards against a batch that drafts more than all its budgets, and slots that cannot be lent."""
    engine, proposer = toy_engine(), Lending([])
    params = SamplingParams(max_new_tokens=20)
    sessions = [session for _ in range(2) for session in engine.add(PROMPT, params, proposer, budget)]
    with nullcontext() if is_fine else pytest.raises(ValueError, match="4 nodes of depth 1; the budget is 1 nodes"):
        for _ in range(6):
            engine.step()
        assert [session.metrics.drafted for session in sessions] == [0, 4 * sessions[1].metrics.steps]
        assert sessions[1].generated == distinct_answer(20)[: len(sessions[1].generated)]


class Hoarding(OracleDrafter):
    """Gives the slots of all requests to the first one."""

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        first, *others = [chain(request) for request in requests]
        wide = [first.tokens, torch.zeros(MAX_TREE_NODES, dtype=torch.int64)]
        return [DraftTree(torch.cat(wide), Topology.of([-1] + [0] * MAX_TREE_NODES)), *others]


def test_a_tree_of_more_rows_than_a_slot_has_room_for_is_refused() -> None:
    """Guards against an assertion deep in a pass near the end of a context, which ends the round for all requests."""
    engine, proposer = toy_engine(), Hoarding([])
    params = SamplingParams(max_new_tokens=20)
    sessions = [session for _ in range(2) for session in engine.add(PROMPT, params, proposer, MAX_TREE_NODES - 1)]
    engine.step()
    assert all(session.generated for session in sessions)
    with pytest.raises(MethodError, match=f"proposed {MAX_TREE_NODES} nodes of depth 1; the budget is 511 nodes"):
        engine.step()


def test_a_requests_budget_replaces_the_proposers() -> None:
    """Guards against a budget that is taken but ignored; 0 means no drafts at all."""
    answer = distinct_answer(13)
    for budget, drafted, steps in ((0, 0, 12), (3, 9, 3), (5, 10, 2), (None, 10, 2)):
        engine = toy_engine()
        oracle = OracleDrafter([PROMPT + answer], budget=8)
        session = run(engine, PROMPT, SamplingParams(max_new_tokens=13), oracle, budget)
        assert (session.metrics.drafted, session.metrics.steps) == (drafted, steps), f"budget {budget}"
    for budget in (-1, 512):
        with pytest.raises(InvalidRequest, match=f"budget={budget}: must be an integer from 0 to 511"):
            toy_engine().add(PROMPT, SamplingParams(), OracleDrafter([]), budget)


def test_the_proposer_is_told_what_happened() -> None:
    """Guards against observations that are shifted by a round: path and next token must be what was emitted."""
    answer = distinct_answer(13)
    oracle = OracleDrafter([PROMPT + answer], budget=3)
    decode(toy_engine(), [PROMPT], [SamplingParams(max_new_tokens=13)], [oracle])
    told = [answer[0]]
    for observation in oracle.observations:
        path = list(observation.verdict.path)
        assert observation.tree.tokens[0] == told[-1], "node 0 is the pending token"
        assert observation.outputs.top_ids[path[-1], 0] == observation.verdict.next_token
        told += [*observation.tree.tokens[path[1:]].tolist(), observation.verdict.next_token]
    assert told == answer
