"""Token Recycling's matrix: what it learns, in which order, and what it forgets."""

import pytest
import torch

from outpace.core.errors import InvalidRequest
from outpace.core.params import SamplingParams
from outpace.drafters.catalog import build_proposer, parse_method
from outpace.drafters.recycle import SUCCESSORS, TokenRecycling, TransitionMatrix
from outpace.drafters.surroundings import Surroundings
from outpace.engine.engine import Engine
from outpace.shaping.proposer import StaticProposer
from outpace.shaping.rank_paths import Chain, RecyclingTemplate
from outpace.testing import ToyTarget, decode
from tests.unit.drafters.requests import draft_request, no_draft_model

CPU = torch.device("cpu")


def _rows(*firsts: int) -> torch.Tensor:
    """Rows of 8 ids, told apart by their first."""
    return torch.stack([torch.arange(first, first + SUCCESSORS) for first in firsts])


def test_the_last_of_equal_tokens_wins() -> None:
    """Guards against a result that depends on how threads interleave when one token is verified twice in a round."""
    matrix = TransitionMatrix(50, CPU)
    for _ in range(20):
        matrix.reset()
        tokens = torch.tensor([3, 7, 3, 3, 9, 7] * 200)
        matrix.update(tokens, torch.cat([_rows(1, 2, 3, 4, 5, 6)] * 199 + [_rows(11, 12, 13, 14, 15, 16)]))
        assert matrix.successors[3].tolist() == list(range(14, 22))
        assert matrix.successors[7].tolist() == list(range(16, 24))
        assert matrix.successors[9].tolist() == list(range(15, 23))
    assert matrix.successors[0].eq(0).all()


def test_wider_top_ids_are_cut_to_eight() -> None:
    """Guards against a matrix that silently takes its candidates from a wider ranking."""
    matrix = TransitionMatrix(50, CPU)
    matrix.update(torch.tensor([1]), torch.arange(16)[None])
    assert matrix.successors[1].tolist() == list(range(8))


def test_it_learns_from_prompts_rejected_nodes_and_across_requests() -> None:
    """Guards against a matrix fed by accepted tokens alone, or cleared between prompts."""
    target = ToyTarget(vocab_size=12, seed=5)
    proposer = build_proposer(parse_method("recycle:budget=20"), Surroundings(12, CPU, no_draft_model))
    assert isinstance(proposer, StaticProposer)
    assert isinstance(proposer.source, TokenRecycling)
    matrix = proposer.source.matrix
    engine = Engine(target)
    (first,) = decode(engine, [[1, 2, 3]], [SamplingParams(max_new_tokens=1)], [proposer])
    seen = {token for token in range(12) if matrix.successors[token].any()}
    assert seen == {1, 2, 3}, "the prefill teaches the prompt's tokens"
    (session,) = decode(engine, [[4]], [SamplingParams(max_new_tokens=12)], [proposer])
    seen = {token for token in range(12) if matrix.successors[token].any()}
    assert {1, 2, 3, 4} < seen
    assert seen - set(session.ids) - set(first.ids), "rejected nodes taught rows that no request contains"
    proposer.reset()
    assert not matrix.successors.any()


def test_trees_follow_the_matrix() -> None:
    """Guards against a template read with parents or ranks mixed up: each node succeeds its parent."""
    matrix = TransitionMatrix(200, CPU)
    matrix.successors = torch.randint(0, 200, (200, SUCCESSORS), generator=torch.Generator().manual_seed(0))
    proposer = StaticProposer(TokenRecycling(matrix), RecyclingTemplate(), 80, CPU)
    requests = [draft_request([17], 80, 9), draft_request([99, 5], 13, 3), draft_request([1], 0, 9)]
    trees = proposer.propose([None] * 3, requests)
    assert [len(tree) - 1 for tree in trees] == [80, 13, 0]
    assert trees[1].topology.max_depth <= 3
    for tree, request in zip(trees, requests, strict=True):
        assert int(tree.tokens[0]) == request.ids[-1]
        for node in range(1, len(tree)):
            parent_token = int(tree.tokens[tree.topology.parents[node]])
            assert int(tree.tokens[node]) in matrix.successors[parent_token].tolist()
    first_level = [int(trees[0].tokens[node]) for node in trees[0].topology.children[0]]
    assert first_level == matrix.successors[17].tolist()


def test_chain_shape_follows_first_successors() -> None:
    """Guards against a chain that strays from rank 0."""
    matrix = TransitionMatrix(30, CPU)
    matrix.successors[:, 0] = (torch.arange(30) + 1) % 30
    proposer = StaticProposer(TokenRecycling(matrix), Chain(), 5, CPU)
    (tree,) = proposer.propose([None], [draft_request([28], 5, 9)])
    assert tree.tokens.tolist() == [28, 29, 0, 1, 2, 3]


def test_vocabularies_too_small_are_refused() -> None:
    """Guards against an index error deep in a round: eight successors need eight tokens."""
    with pytest.raises(InvalidRequest, match="at least 8 tokens, not 5"):
        TransitionMatrix(5, CPU)


@pytest.mark.parametrize(
    "spec", ["recycle:budget=-1", "recycle:budget=512", "recycle:shape=round", "lookup:shape=chain"]
)
def test_bad_options_are_refused(spec: str) -> None:
    """Guards against options that are read and then ignored."""
    with pytest.raises(InvalidRequest, match="method="):
        parse_method(spec)
