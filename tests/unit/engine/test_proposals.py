"""What a proposer hands over is checked where it would change what is said, or break a round for others."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from outpace.core.params import SamplingParams
from outpace.core.protocols import BaseProposer, DraftRequest, Needs
from outpace.core.tree import DraftTree, Topology
from outpace.lib.errors import MethodError
from outpace.testing import decode
from outpace.trees.grafting import GraftedProposer, MatrixRetriever
from outpace.trees.retrieval.transition_matrix import TransitionMatrix
from outpace.trees.shapes.rank_paths import grafted_paths, retrieval_plan
from tests.unit.engine.doubles import VOCAB, toy_engine


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
    "no tree": (
        Whole(lambda request: []),
        "method Whole: propose.. returned 0 trees for 1 requests; return one DraftTree for each",
    ),
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
    matrix = MatrixRetriever(TransitionMatrix(VOCAB, torch.device("cpu")), retrieval_plan(grafted_paths()))
    proposer = GraftedProposer(base, [matrix], torch.device("cpu"))
    with pytest.raises(MethodError, match=r"^method Returned: propose.. returned \["):
        decode(toy_engine(), [[1, 2, 3]], [SamplingParams(max_new_tokens=10)], [proposer])


class Complete:
    """All that a proposer has, without a base class."""

    needs, budget = Needs(), 2
    open = fork = close = rewind = prefill = observe = reset = lambda self, *arguments: None

    def can_fork(self, own: bool) -> bool:
        return False

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [chain(request) for request in requests]


DEFECTS: dict[str, tuple[str, Any, str]] = {
    "no needs": ("needs", None, r"Flawed.needs=None: must be an outpace.methods.Needs"),
    "needs in a dictionary": ("needs", {"top_k": 8}, r"Flawed.needs=\{'top_k': 8\}: must be an outpace.methods.Needs"),
    "half a logit": ("needs", Needs(top_k=1.5), r"top_k=1.5: must be a whole number from 0 on"),  # type: ignore[arg-type]
    "a layer below the first": ("needs", Needs(taps=(-1,)), r"taps=-1: must be layers, as in"),
    "one layer": ("needs", Needs(taps=4.0), r"taps=4.0: must be layers, as in"),  # type: ignore[arg-type]
    "no observe": (
        "observe",
        None,
        r"Flawed has no method observe\(\); derive the class from outpace.methods.BaseProp",
    ),
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


def test_a_proposer_needs_no_base_class() -> None:
    """Guards against a check that asks for more than the engine uses."""
    (session,) = decode(toy_engine(), [[1, 2, 3]], [SamplingParams(max_new_tokens=5)], [Complete()])
    assert len(session.generated) == 5


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
