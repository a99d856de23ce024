"""Pair scores of a block's candidates, and best-first trees over them, by the compiled kernels (cpp/lattice.h).

Python reference: `drafters.lattice.reference.weave`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.kernels import structs
from outpace.kernels.build import call, threads

_INPUTS = ("pending", "a", "b", "places", "ids", "gates", "base", "others", "sharpness")


@dataclass(frozen=True, eq=False)
class LatticeRows:
    """One request's block: C candidates for each of D depths. Tensors are contiguous, numbers float32, ids int64.

    Attributes:
        pending: [r] A of the pending token.
        a, b: [M, r] of candidates, by place.
        places: [D, C] the candidates' rows of `a` and `b`.
        ids: [D, C] the target's ids of the candidates.
        gates: [D, r] H of the block's outputs.
        base: [D, C] base logits.
        others: [D] logit of all ids that are no candidates.
        sharpness: [D] 1 / the temperature of calibration.
        temperature: of the request.
        token: the pending one.
        budget: drafted nodes of the tree; 0 to compute the scores alone.
        max_depth: of the tree.
        endings: ids below which nothing is drafted.
        keys: of the noise of the target's draw at each depth; empty without noise.
    """

    pending: Tensor
    a: Tensor
    b: Tensor
    places: Tensor
    ids: Tensor
    gates: Tensor
    base: Tensor
    others: Tensor
    sharpness: Tensor
    temperature: float = 1.0
    token: int = 0
    budget: int = 0
    max_depth: int = 0
    endings: Sequence[int] = ()
    keys: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, eq=False)
class Woven:
    """The result.

    Attributes:
        scores: [D, C, C] logit of each candidate after each candidate of the depth above; of the first depth only the
            first row has a meaning.
        log_mass: [D, C] logarithm of the probability of all candidates together after each of those above.
        tokens, parents: [N] int64 of the tree's nodes, in the order in which they joined; node 0 is the pending token.
        path_scores: [N] logarithm of the probability of each node's path, or its keyed score.
    """

    scores: Tensor
    log_mass: Tensor
    tokens: Tensor
    parents: Tensor
    path_scores: Tensor


def weave(rows: Sequence[LatticeRows]) -> list[Woven]:
    """Scores and trees of all requests in one call."""
    blocks, kept, made = structs.array(structs.Lattice, len(rows))(), [], list[Woven]()
    for block, one in zip(blocks, rows, strict=True):
        depth, width = one.ids.shape
        noise = torch.tensor(one.keys, dtype=torch.int32)
        endings = torch.tensor(one.endings, dtype=torch.int64)
        tokens, parents = torch.empty(2, one.budget + 1, dtype=torch.int64)
        tokens[0] = one.token
        scores, log_mass = torch.zeros(depth, width, width), torch.zeros(depth, width)
        woven = Woven(scores, log_mass, tokens, parents, torch.empty(one.budget + 1))
        given = {name: getattr(one, name) for name in _INPUTS} | {"endings": endings}
        for name, tensor in (*given.items(), *vars(woven).items()):
            setattr(block, name, tensor.data_ptr())
        block.noise = noise.data_ptr() if one.keys else None
        block.temperature, block.depth, block.width = one.temperature, depth, width
        block.rank, block.ending_count = len(one.pending), len(one.endings)
        block.budget, block.max_depth = one.budget, one.max_depth
        kept.append((given, noise))
        made.append(woven)
    call("weave", blocks, len(rows), threads())
    sizes = [block.count for block in blocks]
    return [
        replace(one, tokens=one.tokens[:size], parents=one.parents[:size], path_scores=one.path_scores[:size])
        for one, size in zip(made, sizes, strict=True)
    ]
