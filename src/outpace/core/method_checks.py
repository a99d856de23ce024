"""Checks of proposers, sources and trees, which may be a third party's."""

from collections.abc import Sequence
from typing import Any

from outpace.core.protocols import TOP_CANDIDATES, DraftRequest, Needs, Proposer
from outpace.core.timing import TREE
from outpace.core.tree import MAX_TREE_NODES, DraftTree
from outpace.lib.checks import is_int, shown
from outpace.lib.errors import MethodError

_STATES = ("open", "can_fork", "fork", "rewind", "prefill", "observe", "reset")
PROPOSER, SOURCE = (*_STATES, "close", "propose"), (*_STATES, "begin", "expand")


def check_proposer(name: str, proposer: Any) -> None:
    """Raise MethodError, with the method's name, for an object that cannot be used as a `Proposer`."""
    _check_members(name, proposer, PROPOSER, "BaseProposer")
    kind, budget = type(proposer).__name__, getattr(proposer, "budget", None)
    if budget is None or not is_int(budget) or not 0 <= budget < MAX_TREE_NODES:
        raise MethodError(
            f"method {name}: {kind}.budget={shown(budget)}: must be a whole number from 0 to {MAX_TREE_NODES - 1}, the "
            "drafted nodes of a tree"
        )
    if type(proposer).__hash__ is None:
        raise MethodError(
            f"method {name}: {kind} cannot be hashed; a dataclass needs eq=False, a class with __eq__ a __hash__"
        )


def check_source(name: str, source: Any) -> None:
    """Raise MethodError, with the method's name, for an object that cannot be used as a `LevelSource`."""
    _check_members(name, source, SOURCE, "BaseSource")


def _check_members(name: str, made: Any, methods: Sequence[str], base: str) -> None:
    kind = type(made).__name__
    remedy = f"derive the class from outpace.methods.{base}"
    if isinstance(made, type):
        raise MethodError(f"method {name}: got the class {made.__name__}, not an object; call it: {made.__name__}(...)")
    for one in methods:
        if not callable(getattr(made, one, None)):
            raise MethodError(f"method {name}: {kind} has no method {one}(); {remedy}")
    needs = getattr(made, "needs", None)
    if not isinstance(needs, Needs):
        raise MethodError(
            f"method {name}: {kind}.needs={shown(needs)}: must be an outpace.methods.Needs, as in Needs(top_k=8); "
            f"{remedy}, which needs nothing"
        )
    most = {"top_k": TOP_CANDIDATES, "prices": MAX_TREE_NODES - 1}
    taps = needs.taps if isinstance(needs.taps, tuple) else (needs.taps,)
    for field, value in [("top_k", needs.top_k), ("prices", needs.prices), *(("taps", tap) for tap in taps)]:
        if not is_int(value) or not 0 <= value <= most.get(field, value):
            wanted = f"a whole number from 0 to {most[field]}" if field in most else "layers, as in taps=(4, 12)"
            raise MethodError(f"method {name}: {kind}.needs: {field}={shown(value)}: must be {wanted}")


def proposed(proposer: Proposer, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
    """Call a proposer; raises MethodError unless it returns one tree for each request."""
    name = type(proposer).__name__
    try:
        with TREE:
            trees: Any = proposer.propose(states, requests)
    except MethodError as error:  # of a tree that could not be made, or of a nested proposer
        if str(error).startswith("method "):
            raise
        raise MethodError(f"method {name}: {error}") from error
    if not isinstance(trees, list | tuple):
        raise MethodError(
            f"method {name}: propose() returned {shown(trees)}, a {type(trees).__name__}; return a list with one "
            "DraftTree for each request"
        )
    if len(trees) != len(requests):
        raise MethodError(
            f"method {name}: propose() returned {len(trees)} trees for {len(requests)} requests; return one DraftTree "
            "for each request, in their order"
        )
    for tree in trees:
        if not isinstance(tree, DraftTree):
            raise MethodError(
                f"method {name}: propose() returned {shown(tree)}, a {type(tree).__name__}, instead of a tree; return "
                "DraftTree.chain(torch.tensor(ids)), where ids[0] is the pending token request.ids[-1]"
            )
    return list(trees)


def check_sizes(proposer: Proposer, trees: Sequence[DraftTree], requests: Sequence[DraftRequest]) -> None:
    """Raise MethodError for trees that are larger or deeper than requests allow."""
    # A proposer may move slots between its requests, within the sum of their budgets and the room of a slot.
    is_over = sum(len(tree) - 1 for tree in trees) > sum(request.budget for request in requests)
    for tree, request in zip(trees, requests, strict=True):
        nodes, depth = len(tree) - 1, tree.topology.max_depth
        most = request.budget if is_over else MAX_TREE_NODES - 1
        if nodes > most or depth > request.max_depth:
            raise MethodError(
                f"method {type(proposer).__name__}: proposed {nodes} nodes of depth {depth}; the budget is "
                f"{request.budget} nodes of depth {request.max_depth}: propose at most request.budget nodes, none "
                "deeper than request.max_depth"
            )


def check_tree(proposer: Proposer, tree: DraftTree, tokens: Sequence[int], pending: int, vocab_size: int) -> None:
    """Raise MethodError for a tree that would change the answer, or has ids or distributions of another vocabulary."""
    name = type(proposer).__name__
    if tokens[0] != pending:
        raise MethodError(
            f"method {name}: proposed a tree that begins with {tokens[0]}; node 0 must be the pending token {pending}, "
            "which is request.ids[-1], or the answer would change"
        )
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        outside = next(token for token in tokens if not 0 <= token < vocab_size)
        raise MethodError(
            f"method {name}: proposed token id {outside}; ids must be from 0 to {vocab_size - 1}, those of the "
            "target's vocabulary: leave out all others"
        )
    for node, distribution in (tree.draft_probs or {}).items():
        if len(distribution) != vocab_size:
            raise MethodError(
                f"method {name}: draft_probs[{node}] has {len(distribution)} entries; give one probability for each of "
                f"the target's {vocab_size} ids"
            )
