"""What a method hands over is checked here: its proposer once, its trees each round.

Methods of other packages come in without a type checker. A mistake in one ends in an error that names the method, the
value and the remedy, not in one from inside the engine.
"""

from collections.abc import Sequence
from typing import Any

from outpace.core.protocols import DraftRequest, Needs, Proposer
from outpace.core.tree import MAX_TREE_NODES, DraftTree
from outpace.lib.checks import is_int, shown
from outpace.lib.errors import MethodError

OF_BOTH = ("open", "can_fork", "fork", "rewind", "prefill", "observe", "reset")
PROPOSER = (*OF_BOTH, "close", "propose")
SOURCE = (*OF_BOTH, "begin", "expand")


def check_proposer(name: str, proposer: Any) -> None:
    """Refuse an object that cannot be used as a `Proposer`.

    Args:
        name: of the method, for the error.
        proposer: what it built, or an object that was given instead of a name.

    Raises:
        MethodError: an attribute or a method is missing, or has a value that cannot be used.
    """
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
    """Refuse an object that cannot be used as a `LevelSource`.

    Raises:
        MethodError: as `check_proposer`.
    """
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
    counts = {"top_k": needs.top_k, "prices": needs.prices}
    taps = needs.taps if isinstance(needs.taps, tuple) else (needs.taps,)
    for field, value in [*counts.items(), *(("taps", tap) for tap in taps)]:
        if not is_int(value) or value < 0:
            wanted = "layers, as in taps=(4, 12)" if field == "taps" else "a whole number from 0 on"
            raise MethodError(f"method {name}: {kind}.needs: {field}={shown(value)}: must be {wanted}")


def proposed(proposer: Proposer, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
    """What a proposer proposes: one tree for each request.

    Raises:
        MethodError: it is something else.
    """
    name = type(proposer).__name__
    try:
        trees: Any = proposer.propose(states, requests)
    except MethodError as error:  # of a tree that could not be made, or of a proposer inside this one
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
    """Refuse trees that are larger or deeper than requests allow.

    Raises:
        MethodError: one of them is.
    """
    # A proposer may move slots from one of its requests to another; it has no more than they have together.
    is_over = sum(len(tree) - 1 for tree in trees) > sum(request.budget for request in requests)
    for tree, request in zip(trees, requests, strict=True):
        nodes, depth = len(tree) - 1, tree.topology.max_depth
        if (is_over and nodes > request.budget) or depth > request.max_depth:
            raise MethodError(
                f"method {type(proposer).__name__}: proposed {nodes} nodes of depth {depth}; the budget is "
                f"{request.budget} nodes of depth {request.max_depth}: propose at most request.budget nodes, none "
                "deeper than request.max_depth"
            )


def check_tree(proposer: Proposer, tree: DraftTree, tokens: Sequence[int], pending: int, vocab_size: int) -> None:
    """Refuse a tree whose ids would change the answer, or that has ids or distributions of another vocabulary.

    Args:
        proposer: whose tree it is.
        tree: what it proposed.
        tokens: of the tree, on the host.
        pending: the token that node 0 must be.
        vocab_size: of the target.

    Raises:
        MethodError: node 0 is another token, an id is outside the vocabulary, or a distribution has another length.
    """
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
