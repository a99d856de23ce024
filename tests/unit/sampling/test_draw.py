"""The random primitives of verification, keyed by position, whatever stands beside them in the batch; and
log-probabilities of emitted tokens: the model's own, whatever the request's options made of them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import NO_TOKEN, NodeOutputs, SamplingContext
from outpace.core.tree import Topology
from outpace.sampling import verification
from outpace.sampling.noise import Purpose, gumbel, noise_key, uniform
from outpace.sampling.verification import BatchDraw, RejectionDraw, draw_keyed, token_logprobs
from outpace.sampling.warp import History, history_of, warp

VOCAB = 20
ROOT = Topology.chain(1)


def outputs_of(logits: Tensor, top: int = 4) -> NodeOutputs:
    top_logits, top_ids = logits.topk(top, dim=-1)
    return NodeOutputs(logits, top_ids, top_logits)


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


MIXED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.3, top_p=0.6),
    SamplingParams(temperature=0.7, top_k=3),
]


def test_mixed_rows_draw_what_each_draws_alone() -> None:
    """Guards against rows of different parameters that are warped together or handed back in another order."""
    rows = list(random_logits(len(MIXED)))
    positions = [9, 4, 4, 31, 9, 2]
    pairs = zip(MIXED, positions, strict=True)
    contexts = [SamplingContext(params, seed, seed % 2, [0] * at) for seed, (params, at) in enumerate(pairs)]
    together = draw_keyed(rows, contexts, [[]] * len(rows))
    alone = [draw_keyed([rows[i]], [contexts[i]], [[]])[0] for i in range(len(rows))]
    keys = [noise_key(s.seed, s.sample_index, position) for s, position in zip(contexts, positions, strict=True)]
    scores = torch.cat([warp(row[None], params) for row, params in zip(rows, MIXED, strict=True)])
    by_definition = (scores + gumbel(keys, torch.arange(VOCAB))).argmax(dim=-1).tolist()
    assert together == alone == by_definition


@pytest.mark.parametrize(
    ("params", "left"),
    [(SamplingParams(temperature=0.7, top_k=3), 3), (SamplingParams(repetition_penalty=1.3), 1)],
    ids=["truncated", "greedy"],
)
def test_noise_is_worked_out_only_for_what_may_be_drawn(
    params: SamplingParams, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against the noise of a whole vocabulary where top-k leaves few ids, or temperature 0 one: it takes longer
    than all other work on a row. And against other tokens than with all of the noise."""
    widths = []

    def counted(keys: list[tuple[int, int]], ids: Tensor) -> Tensor:
        widths.append(len(ids))
        return gumbel(keys, ids)

    monkeypatch.setattr(verification, "gumbel", counted)
    context = SamplingContext(params, 8, 0, [1, 2, 3, 4])
    for seed in range(9):
        row = random_logits(1, seed)
        noise = gumbel([noise_key(8, 0, 4)], torch.arange(VOCAB)) * bool(params.temperature)
        expected = (warp(row, params, [history_of(context)]) + noise).argmax(dim=-1).tolist()
        assert draw_keyed(list(row), [context], [[]]) == expected
    assert max(widths) <= left + 1  # id 0, whether it may be drawn or not


def test_the_top_logits_decide_where_the_compute_dtype_ties() -> None:
    """Guards against drawing from bfloat16 logits, and log-probabilities of them: rounding makes ties that float32 does
    not have."""
    exact = torch.tensor([[10.0, 10.01, 9.99, 0.0]])
    top = exact.topk(3)
    outputs = NodeOutputs(exact.bfloat16(), top.indices, top.values)
    assert len(set(outputs.logits[0, :3].tolist())) == 1
    greedy = BatchDraw([outputs], [ROOT], [[0]], [SamplingContext(SamplingParams(), 0, 0, [0] * 5)])
    assert greedy([(0, 0)]) == [1]
    assert outputs.scores(0)[:3].tolist() == exact[0, :3].tolist()
    cold = RejectionDraw(outputs, ROOT, [0], SamplingContext(SamplingParams(temperature=0.001), 0, 0, [0] * 5))
    assert int(cold.target_probs(0).argmax()) == 1
    assert float(cold.target_probs(0)[1]) > 0.99
    (entry,) = token_logprobs(outputs, [0], [1], 3)
    assert [token for token, _ in entry.top] == [1, 0, 2]
    assert entry.logprob == pytest.approx(float(torch.log_softmax(exact, dim=-1)[0, 1]), abs=1e-6)


def test_certain_acceptances_are_certain() -> None:
    """Guards against a uniform of exactly 0 or 1: an impossible token accepted or a certain one refused."""
    outputs = outputs_of(torch.zeros(2, 4))
    for seed in range(200):
        context = SamplingContext(SamplingParams(temperature=1.0), seed, 0, [0] * 7)
        draw = RejectionDraw(outputs, Topology.chain(2), [0, 1], context)
        assert draw.bernoulli(1.0, 1)
        assert not draw.bernoulli(0.0, 1)
        assert draw.categorical(torch.tensor([0.0, 0.0, 1.0, 0.0]), 0) == 2


def test_rejection_noise_is_keyed_by_absolute_position() -> None:
    """Guards against noise that restarts each round: node 0 of the next round is another position.

    A node of depth d under a tree at position t must use what a root at t + d would use.
    """
    params = SamplingParams(temperature=1.0)
    outputs = outputs_of(torch.zeros(3, VOCAB))
    flat, chain = torch.full((VOCAB,), 1 / VOCAB), Topology.chain(3)
    tree = RejectionDraw(outputs, chain, [0] * 3, SamplingContext(params, 3, 0, [0] * 20))
    roots = [
        RejectionDraw(outputs, chain, [0] * 3, SamplingContext(params, 3, 0, [0] * (20 + depth))) for depth in range(3)
    ]
    drawn = [tree.categorical(flat, node) for node in range(3)]
    assert drawn == [root.categorical(flat, 0) for root in roots]
    assert len(set(drawn)) > 1
    key = noise_key(3, 0, 21, Purpose.RESIDUAL)
    assert drawn[1] == int(gumbel([key], torch.arange(VOCAB)).argmax())


def test_an_acceptance_has_a_noise_value_of_its_own() -> None:
    """Guards against acceptances decided by the target's noise, which a drafter may have drawn its tokens with.

    Each acceptance compares with one value, keyed by purpose, the drafted token's position and the node.
    """
    context = SamplingContext(SamplingParams(temperature=1.0), 3, 1, [0] * 20)
    draw = RejectionDraw(outputs_of(torch.zeros(4, 4)), Topology.of([-1, 0, 0, 1]), [0] * 4, context)
    for node, position in ((1, 20), (2, 20), (3, 21)):
        value = float(uniform([noise_key(3, 1, position, Purpose.ACCEPT)], torch.tensor([node])))
        assert draw.bernoulli(value + 1e-6, node)
        assert not draw.bernoulli(value, node)


# Two siblings with a child each; tokens differ, so that every node has a history of its own.
TREE, TOKENS = Topology.of([-1, 0, 0, 1, 2]), [4, 5, 6, 7, 8]
PATHS = [[], [5], [6], [5, 7], [6, 8]]
PROMPT, SAID = [1, 2], [3, 4]
PENALISED: dict[str, Any] = {"repetition_penalty": 1.8, "frequency_penalty": 0.7, "bad_words_ids": [[7, 0], [8, 1]]}


def penalised(**options: Any) -> SamplingContext:
    return SamplingContext(SamplingParams.from_options(**PENALISED, **options), 8, 0, PROMPT + SAID, len(PROMPT), (9,))


class CountingOutputs(NodeOutputs):
    """Notes which nodes are looked at."""

    def scores(self, row: int) -> Tensor:
        seen: list[int] = self.__dict__.setdefault("seen", [])
        seen.append(row)
        return super().scores(row)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_node_is_drawn_after_its_own_path(temperature: float) -> None:
    """Guards against penalties by the root's history, or by rows that stand before a node without being above it."""
    context = penalised(temperature=temperature)
    row = random_logits(1, seed=3) / 4
    outputs = outputs_of(row.expand(5, VOCAB).contiguous())
    drawn = BatchDraw([outputs], [TREE], [TOKENS], [context])([(0, node) for node in range(5)])
    for node, path in enumerate(PATHS):
        scores = warp(row, context.params, [History(PROMPT, [*SAID, *path], (9,))])[0]
        noise = gumbel([noise_key(8, 0, 4 + len(path))], torch.arange(VOCAB))[0] * bool(temperature)
        assert drawn[node] == int((scores + noise).argmax()), node
        distribution = RejectionDraw(outputs, TREE, TOKENS, context).target_probs(node)
        assert torch.equal(distribution, scores.exp()), node
    sampled = RejectionDraw(outputs, TREE, TOKENS, penalised(temperature=1.0))
    distributions = {tuple(sampled.target_probs(node).tolist()) for node in range(5)}
    assert len(distributions) == 5, "every path must have its own distribution, or nothing was tested"


def test_only_visited_nodes_are_computed() -> None:
    """Guards against penalties worked out for whole trees, and against any work for greedy requests without options."""
    logits = random_logits(5)
    best = logits.topk(4)
    counted = [CountingOutputs(logits, best.indices, best.values) for _ in range(3)]
    contexts = [penalised(temperature=1.0), penalised(), SamplingContext(SamplingParams(), 8, 0, PROMPT + SAID, 2)]
    draw = BatchDraw(counted, [TREE] * 3, [TOKENS] * 3, contexts)
    draw([(0, 0), (1, 0), (2, 0)])
    draw([(1, 2), (2, 2)])
    draw([(1, 4)])
    assert [outputs.__dict__.get("seen", []) for outputs in counted] == [[0], [0, 2, 4], []]


def test_requests_with_and_without_options_share_a_draw() -> None:
    """Guards against histories or paths that slip to a neighbour where only some requests have them."""
    contexts = [
        penalised(temperature=1.0),
        SamplingContext(SamplingParams(temperature=1.0), 3, 0, [0] * 7, 2),
        penalised(),
        SamplingContext(SamplingParams(), 3, 0, [0] * 7, 2),
        SamplingContext(penalised(temperature=1.0).params, 5, 1, [11, 12, 13], 1),
    ]
    outputs = [outputs_of(random_logits(5, seed)) for seed in range(5)]
    queries = [(index, node) for node in (3, 0, 4) for index in (4, 2, 0, 3, 1)]
    together = BatchDraw(outputs, [TREE] * 5, [TOKENS] * 5, contexts)(queries)
    single = [BatchDraw([outputs[i]], [TREE], [TOKENS], [contexts[i]]) for i in range(5)]
    assert together == [single[index]([(0, node)])[0] for index, node in queries]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_drawn_where_none_is_left(temperature: float) -> None:
    """Guards against an arbitrary banned token where all are banned; rejection must neither accept nor draw one."""
    banned = [[5, token] for token in range(VOCAB)]
    params = SamplingParams.from_options(temperature=temperature, bad_words_ids=banned, top_p=0.9)
    context = SamplingContext(params, 0, 0, [1, 2], 1)
    outputs = outputs_of(random_logits(3))
    tree = Topology.of([-1, 0, 0])
    drawn = BatchDraw([outputs], [tree], [[2, 5, 6]], [context])([(0, 1), (0, 2)])
    assert drawn[0] == NO_TOKEN
    assert 0 <= drawn[1] < VOCAB
    rejecting = RejectionDraw(outputs, tree, [2, 5, 6], context)
    distribution = rejecting.target_probs(1)
    assert distribution.tolist() == [0.0] * VOCAB
    assert rejecting.categorical(distribution, 1) == NO_TOKEN
    assert not rejecting.bernoulli(float(distribution[3]), 2)


LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0], [9.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 5.0, 0.0, -torch.inf]])


@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_values_ranks_and_alternatives(count: int) -> None:
    """Guards against rows of rejected nodes, ranks from 0, alternatives out of order, and more than asked for."""
    entries = token_logprobs(outputs_of(LOGITS, top=2), [0, 2], [3, 0], count)
    assert [entry.token_id for entry in entries] == [3, 0]
    for row, entry in zip((0, 2), entries, strict=True):
        exact = torch.log_softmax(LOGITS[row].double(), dim=0)
        assert entry.logprob == pytest.approx(float(exact[entry.token_id]), abs=1e-6)
        assert entry.rank == 1 + sum(value > exact[entry.token_id] for value in exact.tolist())
        possible = sorted((value for value in exact.tolist() if value > -math.inf), reverse=True)
        assert [value for _, value in entry.top] == pytest.approx(possible[:count], abs=1e-6)
        assert all(value == pytest.approx(float(exact[token]), abs=1e-6) for token, value in entry.top)
    assert [entry.rank for entry in entries] == [2, 2]
