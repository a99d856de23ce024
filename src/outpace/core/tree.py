"""Draft trees: the one data structure that every method proposes and every verifier walks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from outpace.core.events import RETRIEVED, NodeOrigin, origins_of
from outpace.lib.checks import shown
from outpace.lib.errors import MethodError

MAX_TREE_NODES = 512
"""Of one request, the pending token included."""


class Topology:
    """The shape of a tree, without its tokens. Build with `Topology.of` or `Topology.chain`.

    Node 0 is the pending token; `parents[i] < i` for every other node. Structure lives on the host because
    verification walks it there; shapes recur round after round, so everything derived from one is computed once.
    """

    def __init__(self, parents: tuple[int, ...]) -> None:
        if not parents or parents[0] != -1:
            raise MethodError(f"parents={shown(parents)}: node 0 is the pending token and its parent must be -1")
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise MethodError(f"parents[{node}]={parent}: a parent must come before its child (0..{node - 1})")
        self.parents = parents

    @staticmethod
    def of(parents: Sequence[int]) -> "Topology":
        """The topology with these parents, shared between trees of the same shape.

        Raises:
            MethodError: node 0 is not the root, or a parent does not come before its child.
        """
        return _cached_topology(tuple(parents))

    @staticmethod
    def chain(length: int) -> "Topology":
        """A path of `length` nodes, the pending token included."""
        return _cached_topology(tuple(range(-1, length - 1)))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Drafted tokens from the pending token to each node; 0 for node 0."""
        depths = [0] * len(self.parents)
        for node in range(1, len(self.parents)):
            depths[node] = depths[self.parents[node]] + 1
        return tuple(depths)

    @cached_property
    def max_depth(self) -> int:
        return max(self.depths)

    @cached_property
    def depth_tensor(self) -> Tensor:
        return torch.tensor(self.depths)  # [N]

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in index order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node in range(1, len(self.parents)):
            children[self.parents[node]].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def ancestor_mask(self) -> Tensor:
        """[N, N] bool: entry (i, j) is true when j is i or an ancestor of i."""
        if self.is_chain:
            return torch.ones(len(self), len(self), dtype=torch.bool).tril()
        # Pointer jumping: every step doubles how far up nodes have seen, so a tree takes the logarithm of its depth.
        mask = torch.eye(len(self), dtype=torch.bool)
        jump = torch.tensor((0, *self.parents[1:]))  # [N] ancestor `distance` levels up, the root where there is none
        distance = 1
        while distance <= self.max_depth:
            mask |= mask[jump]
            jump = jump[jump]
            distance *= 2
        return mask

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root down to `node`, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))


@lru_cache(maxsize=1024)
def _cached_topology(parents: tuple[int, ...]) -> Topology:
    return Topology(parents)


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A proposal: tokens on a topology, with the distribution they were drawn from.

    Attributes:
        tokens: [N] int64; node 0 is the pending token. N = 1 is an empty draft, that is plain decoding.
        draft_probs: by node, the distribution [V] from which its children were drawn: the first from it, each further
            one from what the ones before it leave, all of them before anything below that depth was decided. Children
            of a node that is missing are *point masses*: each token was chosen, not drawn. None if all are.
        draft_passes: forward passes of a draft model that it took.
        scores: [M] float32 on the host, cumulative keyed score of each of the first nodes, 0 for node 0, or the
            logarithm of its acceptance probability; None if there are none.
        origins: [N] of each node; empty stands for "drafted". No drafted node comes after or below a retrieved one, and
            forced ones come last.
    """

    tokens: Tensor
    topology: Topology
    draft_probs: Mapping[int, Tensor] | None = None
    draft_passes: int = 0
    scores: Tensor | None = None
    origins: tuple[NodeOrigin, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor) or self.tokens.dtype != torch.int64 or self.tokens.ndim != 1:
            given = f"{self.tokens.dtype} {tuple(self.tokens.shape)}" if isinstance(self.tokens, Tensor) else None
            raise MethodError(
                f"tokens must be int64 [N], got {given or shown(self.tokens)}; "
                "give torch.tensor(ids, dtype=torch.int64)"
            )
        if not isinstance(self.topology, Topology):
            raise MethodError(f"topology={shown(self.topology)}: must be a Topology; give Topology.of(parents)")
        if self.tokens.shape[0] != len(self.topology.parents):
            raise MethodError(
                f"{len(self.tokens)} tokens on a topology of {len(self.topology)} nodes; give one parent for each token"
            )
        if not self.origins:
            object.__setattr__(self, "origins", origins_of("drafted", len(self.topology)))
        elif len(self.origins) != len(self.topology):
            raise MethodError(f"{len(self.origins)} origins on a topology of {len(self.topology)} nodes")
        for node, distribution in (self.draft_probs or {}).items():
            if not 0 <= node < len(self) or distribution.ndim != 1:
                raise MethodError(
                    f"draft_probs[{node}]: must be [V] of a node below {len(self)}, got {tuple(distribution.shape)}"
                )

    @staticmethod
    def chain(
        tokens: Tensor, draft_probs: Mapping[int, Tensor] | None = None, origin: NodeOrigin = "drafted"
    ) -> "DraftTree":
        """A chain draft of one source; tokens[0] is the pending token."""
        count = max(len(tokens), 1)
        return DraftTree(tokens, Topology.chain(count), draft_probs, origins=origins_of(origin, count))

    def __len__(self) -> int:
        return len(self.topology.parents)

    def without_unreachable(self, ends: Collection[int], tokens: Sequence[int]) -> "DraftTree":
        """The tree without the nodes below a drafted token that ends the request: they cannot be generated."""
        if not any(token in ends for token in tokens[1:]):
            return self
        parents, kept, reached = self.topology.parents, [0], {0}
        for node, above in enumerate(parents[1:], start=1):
            if above in reached and (above == 0 or tokens[above] not in ends):
                reached.add(node)
                kept.append(node)
        return self.keeping(kept)

    def keeping(self, kept: Sequence[int]) -> "DraftTree":
        """The tree of some of its nodes, the first among them and every one's parent."""
        if len(kept) == len(self):
            return self
        place = {node: number for number, node in enumerate(kept)}
        distributions = {
            place[node]: distribution for node, distribution in (self.draft_probs or {}).items() if node in place
        }
        return replace(
            self,
            tokens=self.tokens[kept],
            topology=Topology.of([-1, *(place[self.topology.parents[node]] for node in kept[1:])]),
            draft_probs=distributions or None,
            scores=None if self.scores is None else self.scores[[node for node in kept if node < len(self.scores)]],
            origins=tuple(self.origins[node] for node in kept),
        )

    def with_forced(self, tokens: Sequence[int], parents: Sequence[int]) -> "DraftTree":
        """The tree with forced nodes after all others."""
        if not tokens:
            return self
        return replace(
            self,
            tokens=torch.cat([self.tokens, self.tokens.new_tensor(tokens)]),
            topology=Topology.of([*self.topology.parents, *parents]),
            origins=self.origins + origins_of("forced", len(tokens) + 1)[1:],
        )

    @property
    def drafted(self) -> int:
        """How many nodes, the first ones, were neither retrieved nor forced, the pending token among them."""
        return len(self) - self.retrieved - self.forced

    @property
    def retrieved(self) -> int:
        """How many nodes were retrieved or matched."""
        return sum(origin in RETRIEVED for origin in self.origins)

    @property
    def forced(self) -> int:
        """How many nodes, the last ones, a grammar forces."""
        return self.origins.count("forced")
