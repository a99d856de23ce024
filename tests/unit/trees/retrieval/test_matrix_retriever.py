"""What Graft retrieves: the matrix along a template, for every request its own."""

import torch

from outpace.core.drafting import UNKNOWN, Retrieved
from outpace.testing.toy import draft_request
from outpace.trees.grafting import MatrixRetriever
from outpace.trees.retrieval.transition_matrix import SUCCESSORS, TransitionMatrix
from outpace.trees.shapes.rank_paths import grafted_paths

CPU = torch.device("cpu")
V = 300
PATHS = grafted_paths()


def _random_matrix(matrix: TransitionMatrix, seed: int) -> TransitionMatrix:
    generator = torch.Generator().manual_seed(seed)
    matrix.successors.copy_(torch.stack([torch.randperm(V, generator=generator)[:SUCCESSORS] for _ in range(V)]))
    return matrix


def _follow(matrix: TransitionMatrix, root: int) -> list[int]:
    """The definition, path by path: the parent's row at the rank, UNKNOWN behind rows that were never seen."""
    tokens: dict[tuple[int, ...], int] = {(): root}
    for path in grafted_paths():
        above = tokens[path[:-1]]
        is_known = above != UNKNOWN and bool(matrix.successors[above].any())
        tokens[path] = int(matrix.successors[above, path[-1]]) if is_known else UNKNOWN
    return list(tokens.values())


def _usable(retrieved: Retrieved) -> list[int]:
    """The tokens, with all that stands below an unknown one unknown."""
    found: list[int] = []
    for token, above in zip(retrieved.tokens.tolist(), retrieved.topology.parents, strict=True):
        found.append(UNKNOWN if above >= 0 and found[above] == UNKNOWN else token)
    return found


def test_the_whole_template_is_read_from_one_matrix_or_from_each_request_s_own() -> None:
    """Guards against levels, ranks or requests mixed up, and tokens that are not in the order of the slots."""
    shared = MatrixRetriever(_random_matrix(TransitionMatrix(V, CPU), 0), PATHS)
    private = MatrixRetriever(TransitionMatrix(V, CPU), PATHS, private=True)
    roots = [5, 17, 5, 299]
    for fill in (shared, private):
        states = [fill.open(slot) for slot in range(len(roots))]
        if fill is private:
            states = [_random_matrix(state, seed) for seed, state in enumerate(states)]
        paths = [torch.tensor([8, root]) for root in roots]  # what stands before the last token is of no account
        found = fill.prepare(states, [draft_request([8], 60, 20)] * 4, paths)
        for root, state, retrieved in zip(roots, states, found, strict=True):
            assert retrieved.tokens.tolist() == _follow(state, root)
            assert retrieved.topology.max_depth == 9


def test_rows_never_seen_retrieve_nothing() -> None:
    """Guards against token 0 taking slots from good candidates, and against 0 taken for unseen where it is a token."""
    matrix = TransitionMatrix(V, CPU)
    fill = MatrixRetriever(matrix, PATHS)
    (nothing,) = fill.prepare([matrix], [draft_request([4], 60, 20)], [torch.tensor([4])])
    assert _usable(nothing) == [4] + [UNKNOWN] * 80
    matrix.update(torch.tensor([4, 0]), torch.stack([torch.arange(8), torch.arange(40, 48)]))
    (some,) = fill.prepare([matrix], [draft_request([4], 60, 20)], [torch.tensor([4])])
    assert _usable(some) == _follow(matrix, 4)
    known = [token for token in _usable(some) if token != UNKNOWN]
    assert 0 in known, "a token like any other where a seen row names it"
    assert 8 < len(known) < 30
