"""Grafting: retrieved continuations take the slots that a draft leaves free (Graft, arXiv 2605.20104, section 3.2).

Retrievers are the transition matrix along a template and the longest match; slots go to a node of each in turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from outpace.core.drafting import UNKNOWN, Retrieved, Retriever
from outpace.core.events import NodeOrigin
from outpace.core.method_checks import proposed
from outpace.core.protocols import DraftRequest, Proposer, Stateless
from outpace.core.timing import MERGE, REBUILD, RETRIEVE
from outpace.core.tree import DraftTree, Topology
from outpace.gpu.backend import SideStream
from outpace.lib.places import places_of
from outpace.trees.proposer import Nested
from outpace.trees.retrieval.suffix import TextMatch
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.shapes.rank_paths import RankPath, rank_plan


class MatrixRetriever(MatrixLearner):
    """Graft's retrieval (arXiv 2605.20104, section 3.2): a whole template for every request, a level per lookup, on the
    device without a host read.

    Args:
        paths: the template in the order in which its nodes get slots, each path behind its prefix.
    """

    def __init__(self, matrix: TransitionMatrix, paths: Sequence[RankPath], private: bool = False) -> None:
        super().__init__(matrix, private)
        device, nodes = matrix.successors.device, list[RankPath]([(), *paths])
        node_of = {path: node for node, path in enumerate(nodes)}
        self._topology = Topology.of([-1, *(node_of[path[:-1]] for path in paths)])
        self._levels = [(places.to(device), ranks.to(device)) for places, ranks in rank_plan(paths).levels]
        read = sorted(nodes, key=lambda path: (len(path), path))  # as levels are read
        self._order = torch.tensor([read.index(path) for path in nodes], device=device)

    def prepare(
        self, states: Sequence[TransitionMatrix], requests: Sequence[DraftRequest], paths: Sequence[Tensor]
    ) -> list[Retrieved]:
        known = paths[0].new_tensor([request.sampling.before for request in requests])
        before = torch.stack([known[index] if len(path) == 1 else path[-2] for index, path in enumerate(paths)])
        roots = torch.stack([path[-1] for path in paths])  # [R]
        before, roots = before.to(self._order.device), roots.to(self._order.device)
        found: dict[int, Tensor] = {}
        for matrix, members in places_of(states).items():
            found |= zip(members, self._read(matrix, before[members], roots[members]), strict=True)
        return [Retrieved(found[index], self._topology) for index in range(len(states))]

    def _read(self, matrix: TransitionMatrix, before: Tensor, roots: Tensor) -> Tensor:
        """[R, E + 1] tokens of the template below roots [R], which follow the tokens `before` [R], in its order."""
        level, above = roots[:, None], before[:, None]
        levels = [level]
        for places, ranks in self._levels:
            parents, above = level[:, places], above[:, places]  # [R, F]
            rows = matrix.after(above, parents.clamp(min=0))  # [R, F, 8]
            level = rows.gather(2, ranks.expand(len(rows), -1)[..., None])[..., 0]
            level = level.masked_fill(rows[..., 0] == rows[..., 1], UNKNOWN)  # ids of a known row differ
            levels.append(level)
            above = parents
        return torch.cat(levels, dim=1)[:, self._order]


class SuffixRetriever(Stateless):
    """Retrieves the tokens that followed an earlier occurrence of the longest repeated suffix of a request's ids, as a
    chain (SAM-Decoding's retrieval, arXiv 2411.10666, section 3)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def open(self, slot: int, alone: bool = False) -> TextMatch:
        return TextMatch()

    def rewind(self, state: TextMatch, length: int) -> None:
        state.rewind(length)

    def prepare(
        self, states: Sequence[TextMatch], requests: Sequence[DraftRequest], paths: Sequence[Tensor]
    ) -> list[Retrieved]:
        found = []
        for match, request, path in zip(states, requests, paths, strict=True):
            match.follow(request.ids)
            chain = match.continuation(request.budget, path[1:].tolist() if len(path) > 1 else [])
            tokens = torch.tensor([UNKNOWN, *chain], device=self._device)
            found.append(Retrieved(tokens, Topology.chain(len(tokens)), "matched"))
        return found


LEFT_OUT = -1


class Offer(NamedTuple):
    """What was retrieved to continue one node of a tree."""

    below: int
    found: Retrieved


def free_slots(trees: Sequence[DraftTree], requests: Sequence[DraftRequest]) -> list[int]:
    """How many nodes may be added to each tree.

    Where a shape has moved slots between requests, those with fewer nodes than their budget share what is left.
    Requests that are verified by rejection keep their own slots.
    """
    kept = [len(tree) - 1 for tree in trees]
    free = [max(request.budget - count, 0) for request, count in zip(requests, kept, strict=True)]
    moved = sum(max(count - request.budget, 0) for request, count in zip(requests, kept, strict=True))
    shares = [not request.sampling.params.is_rejection for request in requests]
    total = sum(count for count, is_shared in zip(free, shares, strict=True) if is_shared)
    if not moved or not total:
        return free
    left = max(total - moved, 0)
    return [count * left // total if is_shared else count for count, is_shared in zip(free, shares, strict=True)]


@MERGE
def graft(
    trees: Sequence[DraftTree], offers: Sequence[Sequence[Offer]], requests: Sequence[DraftRequest]
) -> list[DraftTree]:
    """Fill each tree up to its request's budget. Slots for which too little was retrieved stay empty.

    Retrieved nodes are added in order, from several offers in turn. A node that the tree already has takes no slot, so
    siblings have different tokens. The tree's own nodes keep their numbers, and retrieved ones come last.

    Raises:
        ValueError: a free slot in a tree whose siblings were drawn: adding chosen ones would change what is accepted.
    """
    slots = free_slots(trees, requests)
    changed = [index for index, count in enumerate(slots) if count]
    if not changed:
        return list(trees)
    drafted = torch.cat([trees[index].tokens for index in changed]).tolist()  # one host read each
    found = [offer.found.tokens for index in changed for offer in offers[index]]
    options = torch.cat(found).tolist() if found else []
    grafted = list(trees)
    for index in changed:
        tree, request = trees[index], requests[index]
        if tree.draft_probs is not None:
            raise ValueError("draft_probs: retrieved nodes are chosen, and this tree's were drawn; leave it ungrafted")
        tokens, drafted = drafted[: len(tree)], drafted[len(tree) :]
        hybrid = _Hybrid(tree, tokens, slots[index], request.max_depth, request.sampling.ending_ids)
        queues = []
        for below, one in offers[index]:
            queues.append(_queue(below, one, options[: len(one.topology)]))
            options = options[len(one.topology) :]
        hybrid.retrieve(queues)
        grafted[index] = hybrid.tree()
    return grafted


_Option = tuple[list[int], int, int, int, NodeOrigin]
"""Places of an offer's nodes in the tree, one of these nodes, the node above it, its token, and its origin."""


def _queue(below: int, found: Retrieved, tokens: Sequence[int]) -> Iterator[_Option]:
    places = [below] + [LEFT_OUT] * (len(found.topology) - 1)
    for node, above in enumerate(found.topology.parents[1:], start=1):
        yield places, node, above, tokens[node], found.origin


class _Hybrid:
    """A tree that is being filled.

    It loops over nodes on the host: 36 nodes of one request merge in 0.08 ms. A version in tensor operations, level by
    level over the batch, took 0.56 ms.
    """

    def __init__(self, tree: DraftTree, tokens: Sequence[int], free: int, max_depth: int, ends: Sequence[int]) -> None:
        self._tree, self._free, self._max_depth, self._ends = tree, free, max_depth, ends
        self._parents, self._tokens = list(tree.topology.parents), list(tokens)
        self._depths, self._origins = list(tree.topology.depths), list(tree.origins)
        # Backwards, so that among siblings with the same token the first is found, as a verifier does.
        keys = zip(self._parents[::-1], self._tokens[::-1], strict=True)
        self._node_of = dict(zip(keys, range(len(tree) - 1, -1, -1), strict=True))

    def _place(self, above: int, token: int, origin: NodeOrigin) -> int:
        """The node with this token below `above`, added if there is a free slot; else LEFT_OUT."""
        place = self._node_of.get((above, token))
        if place is not None or not self._free:
            return LEFT_OUT if place is None else place
        self._free -= 1
        place = self._node_of[above, token] = len(self._parents)
        self._parents.append(above)
        self._tokens.append(token)
        self._depths.append(self._depths[above] + 1)
        self._origins.append(origin)
        return place

    def retrieve(self, queues: Sequence[Iterator[_Option]]) -> None:
        """Add retrieved nodes, one of each queue in turn."""
        for turn in zip_longest(*queues):
            for places, node, above, token, origin in filter(None, turn):
                place = places[above]
                is_final = place > 0 and self._tokens[place] in self._ends
                if place >= 0 and token != UNKNOWN and self._depths[place] < self._max_depth and not is_final:
                    places[node] = self._place(place, token, origin)
            if not self._free:
                return

    @REBUILD
    def tree(self) -> DraftTree:
        """The tree, retrieved nodes last."""
        return replace(
            self._tree,
            tokens=torch.tensor(self._tokens, device=self._tree.tokens.device),
            topology=Topology.of(self._parents),
            origins=tuple(self._origins),
        )


class GraftedProposer(Nested):
    """Grafts what a retriever retrieves into the slots that another proposer's tree leaves of the budget.

    The base decides how many slots are free: a gate of its shape ends drafting early. A full tree is unchanged.

    Args:
        retrievers: one or more; slots go to a node of each in turn.
        place: "root": retrieval continues the pending token, on a stream of its own while the base drafts;
            "tail": it continues the leaves of the draft, the likeliest first, in turn (Graft(TAIL), section 2.2; of a
            cut chain, appendix F).
        reserved: share of the budget that the base does not get, for retrieval without pruning (Graft(ROOT), section
            2.2).
    """

    def __init__(
        self,
        base: Proposer,
        retrievers: Sequence[Retriever],
        device: torch.device,
        place: Literal["root", "tail"] = "root",
        reserved: float = 0.0,
    ) -> None:
        assert not any(one.needs.taps for one in retrievers), "only the base may need taps: it gets them in its order"
        self.base, self.retrievers, self.budget = base, tuple(retrievers), base.budget
        top_k = max(one.needs.top_k for one in (base, *retrievers))
        self.needs = replace(base.needs, top_k=top_k, prices=0)  # retrieval fills the whole budget
        self._device, self._place, self._reserved = device, place, reserved
        self._side = SideStream(device)

    def _each(self) -> list[tuple[str, Any]]:
        return [("of_base", self.base), *((f"of_{place}", one) for place, one in enumerate(self.retrievers))]

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        bases = [state.of_base for state in states]
        if not any(request.budget for request in requests):
            return proposed(self.base, bases, requests)
        offered = [
            replace(request, budget=request.budget - int(request.budget * self._reserved)) for request in requests
        ]
        if self._place == "root":
            with RETRIEVE, self._side.overlapped():
                pending = torch.tensor([request.ids[-1:] for request in requests], device=self._device)  # [R, 1]
                retrieved = self._retrieved(states, requests, list(pending))
        try:
            trees = proposed(self.base, bases, offered)
        finally:  # also after an interrupt: the next update must not write what retrieval still reads
            if self._place == "root":
                self._side.join([one.tokens for found in retrieved for one in found])
        if self._place == "root":
            offers = [[Offer(0, one) for one in found] for found in zip(*retrieved, strict=True)]
        else:
            offers = self._after_leaves(states, requests, trees)
        return graft(trees, offers, requests)

    def _retrieved(
        self, states: Sequence[Any], requests: Sequence[DraftRequest], paths: Sequence[Tensor]
    ) -> list[list[Retrieved]]:
        """For each retriever, the continuation of each path."""
        parts = self._each()[1:]
        return [part.prepare([getattr(state, name) for state in states], requests, paths) for name, part in parts]

    @RETRIEVE
    def _after_leaves(
        self, states: Sequence[Any], requests: Sequence[DraftRequest], trees: Sequence[DraftTree]
    ) -> list[list[Offer]]:
        """Continuations of the leaves of each tree, of at most as many leaves as the tree has free slots."""
        slots = free_slots(trees, requests)
        finals = [request.sampling.ending_ids for request in requests]
        ends = [(index, node) for index, tree in enumerate(trees) for node in _ends(tree, slots[index], finals[index])]
        offers: list[list[Offer]] = [[] for _ in trees]
        if ends:
            members = [index for index, _ in ends]
            paths = [trees[index].tokens[list(trees[index].topology.path(node))] for index, node in ends]
            for found in self._retrieved([states[i] for i in members], [requests[i] for i in members], paths):
                for (index, node), one in zip(ends, found, strict=True):
                    offers[index].append(Offer(node, one))
        return offers


def _ends(tree: DraftTree, count: int, finals: Sequence[int]) -> list[int]:
    """At most `count` leaves of a tree, by score if there are any, else by number; none whose token is one of `finals`,
    which end the request."""
    tokens, children = tree.tokens.tolist(), tree.topology.children
    ends = [node for node in range(len(tree)) if not children[node] and (not node or tokens[node] not in finals)]
    if tree.scores is not None:
        scores = tree.scores.tolist()
        ends.sort(key=lambda node: -scores[node])
    return ends[:count]
