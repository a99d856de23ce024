"""Log-probabilities of emitted tokens: the model's own, whatever the request's options made of them."""

import math

import pytest
import torch

from outpace.core.protocols import NodeOutputs
from outpace.sampling.draw import token_logprobs

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0], [1.0, 1.0, 5.0, 0.0, -torch.inf], [9.0, 0.0, 0.0, 0.0, 0.0]])


def outputs_of(logits: torch.Tensor, top: int = 2) -> NodeOutputs:
    best = logits.topk(top, dim=-1)
    return NodeOutputs(logits, best.indices, best.values)


@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_values_ranks_and_alternatives(count: int) -> None:
    """Guards against rows of other nodes, ranks from 0, alternatives out of order, and more of them than asked for."""
    entries = token_logprobs(outputs_of(LOGITS), [0, 1], [3, 0], count)
    assert [entry.token_id for entry in entries] == [3, 0]
    for row, entry in enumerate(entries):
        exact = torch.log_softmax(LOGITS[row].double(), dim=0)
        assert entry.logprob == pytest.approx(float(exact[entry.token_id]), abs=1e-6)
        assert entry.rank == 1 + sum(value > exact[entry.token_id] for value in exact.tolist())
        possible = sorted((value for value in exact.tolist() if value > -math.inf), reverse=True)
        assert [value for _, value in entry.top] == pytest.approx(possible[:count], abs=1e-6)
        assert [value for _, value in entry.top] == pytest.approx(
            [float(exact[token]) for token, _ in entry.top], abs=1e-6
        )
    assert [entry.rank for entry in entries] == [2, 2]


def test_the_nodes_of_the_path_are_read() -> None:
    """Guards against entries taken row after row where the path skips rejected nodes."""
    entries = token_logprobs(outputs_of(LOGITS), [0, 2], [1, 0], 1)
    assert [entry.top[0][0] for entry in entries] == [1, 0]
    assert [entry.rank for entry in entries] == [1, 1]


def test_the_exact_logits_of_the_best_tokens_count() -> None:
    """Guards against log-probabilities from bfloat16 logits, in which close tokens tie."""
    exact = torch.tensor([[10.0, 10.01, 9.99, 0.0]])
    best = exact.topk(3)
    outputs = NodeOutputs(exact.bfloat16(), best.indices, best.values)
    (entry,) = token_logprobs(outputs, [0], [1], 3)
    assert [token for token, _ in entry.top] == [1, 0, 2]
    assert entry.logprob == pytest.approx(float(torch.log_softmax(exact, dim=-1)[0, 1]), abs=1e-6)
