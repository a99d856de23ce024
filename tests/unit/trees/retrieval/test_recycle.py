"""Token Recycling's matrix: what it learns, in which order, and what it forgets."""

import torch

from outpace.core.params import SamplingParams
from outpace.drafters.build_context import BuildContext
from outpace.engine.engine import Engine
from outpace.methods.catalog import build_proposer, parse_method
from outpace.testing import ToyTarget, decode
from outpace.testing.requests import draft_request, no_draft_model
from outpace.trees.proposer import StaticProposer
from outpace.trees.retrieval.transition_matrix import SUCCESSORS, TokenRecycling, TransitionMatrix
from outpace.trees.shapes.rank_paths import RecyclingTemplate

CPU = torch.device("cpu")


def test_it_learns_from_prompts_rejected_nodes_and_across_requests() -> None:
    """Guards against a matrix fed by accepted tokens alone, or cleared between prompts."""
    target = ToyTarget(vocab_size=12, seed=5)
    proposer = build_proposer(parse_method("recycle:budget=20"), BuildContext(12, CPU, no_draft_model))
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
    trees = proposer.propose([matrix] * 3, requests)
    assert [len(tree) - 1 for tree in trees] == [80, 13, 0]
    assert trees[1].topology.max_depth <= 3
    for tree, request in zip(trees, requests, strict=True):
        assert int(tree.tokens[0]) == request.ids[-1]
        for node in range(1, len(tree)):
            parent_token = int(tree.tokens[tree.topology.parents[node]])
            assert int(tree.tokens[node]) in matrix.successors[parent_token].tolist()
    first_level = [int(trees[0].tokens[node]) for node in trees[0].topology.children[0]]
    assert first_level == matrix.successors[17].tolist()


def test_private_matrices_are_read_by_their_own_requests() -> None:
    """Guards against a batch whose private rows are mixed up, in a frontier where requests have several nodes each."""
    proposer = StaticProposer(TokenRecycling(TransitionMatrix(30, CPU), private=True), RecyclingTemplate(), 80, CPU)
    states = [proposer.open(slot) for slot in range(3)]
    for shift, state in enumerate(states, start=1):
        state.successors = (torch.arange(30)[:, None] + shift * torch.arange(1, SUCCESSORS + 1)) % 30
    trees = proposer.propose(states, [draft_request([7], 20, 9)] * 3)
    for shift, tree in enumerate(trees, start=1):
        steps = {(int(tree.tokens[node]) - int(tree.tokens[tree.topology.parents[node]])) % 30 for node in range(1, 21)}
        assert steps <= {shift * rank % 30 for rank in range(1, SUCCESSORS + 1)}
        assert len(steps) > 1
