"""Keyed scores: what a draft model must rank by, if the target's own draw is to agree."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import SamplingContext
from outpace.sampling import scores as scores_module
from outpace.sampling.noise import gumbel, noise_key
from outpace.sampling.scores import Pool, best_scores, keyed_scores
from outpace.sampling.verification import draw_keyed
from outpace.sampling.warp import history_of, process, warp

VOCAB = 30
FIRST = 17
SAMPLED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.5, top_k=4),
    SamplingParams(temperature=1.0, top_p=0.6),
    SamplingParams(temperature=0.8, min_p=0.2),
]


def context(params: SamplingParams, seed: int = 0, sample: int = 0) -> SamplingContext:
    return SamplingContext(params, seed, sample, [0] * FIRST)


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize(
    ("params", "noise"), [(SamplingParams(), True), *((params, False) for params in (SamplingParams(), *SAMPLED))]
)
def test_scores_without_noise_are_log_probabilities(params: SamplingParams, noise: bool) -> None:
    """Guards against noise in greedy drafts or where it is switched off, and the target's warp as confidence there."""
    logits = random_logits(8)
    scores = keyed_scores(logits, [context(params, seed) for seed in range(8)], list(range(8)), noise)
    assert torch.equal(scores, torch.log_softmax(logits, dim=-1))


@pytest.mark.parametrize("params", SAMPLED)
def test_a_perfect_draft_ranks_the_targets_own_draw_first(params: SamplingParams) -> None:
    """Guards against noise of another position, sample, seed or warp than the target will use: q = p must agree.

    400 rows at 20 depths of 4 samples; one agreement missed fails the test.
    """
    rows = 400
    logits = random_logits(rows)
    contexts = [context(params, row % 5, row % 4) for row in range(rows)]
    depths = [row % 20 for row in range(rows)]
    best = keyed_scores(logits, contexts, depths).argmax(dim=-1).tolist()
    assert best == draw_keyed(list(logits), contexts, [range(depth) for depth in depths])
    assert best != keyed_scores(logits, contexts, [depth + 1 for depth in depths]).argmax(dim=-1).tolist()


@pytest.mark.parametrize("params", [SamplingParams(), *SAMPLED])
def test_the_best_of_a_pool_are_named_in_the_targets_ids(params: SamplingParams) -> None:
    """Guards against columns of a pool that are taken for ids, and scores that belong to other ids."""
    logits, contexts = random_logits(5), [context(params, seed) for seed in range(5)]
    ids = torch.tensor([3, 4, 9, 11, 17, 20, 28])
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, ids, False)
    wanted = keyed_scores(logits.masked_fill(others, -torch.inf), contexts, [2] * 5).topk(3, dim=-1)
    pool = Pool(ids.expand(5, -1), VOCAB)
    tokens, log_probs, *_ = best_scores(logits[:, ids], contexts, [2] * 5, 3, pool=pool)
    torch.testing.assert_close(log_probs, wanted.values, atol=1e-6, rtol=1e-6)
    is_ranked = wanted.values > -torch.inf  # what options rule out comes in any order
    assert torch.equal(tokens[is_ranked], wanted.indices[is_ranked])
    assert best_scores(logits[:, ids], contexts, [2] * 5, 99, pool=pool).tokens.shape == (5, 7)
    whole = best_scores(logits, contexts, [2] * 5, 3)
    assert torch.equal(whole.tokens, keyed_scores(logits, contexts, [2] * 5).topk(3, dim=-1).indices)


WIDE = 1003  # no multiple of any vector's length


def level_of_trees(every: list[SamplingParams]) -> tuple[list[SamplingContext], list[int], list[list[int]], Tensor]:
    """Rows of a level as sources ask for it, nodes of a request side by side: contexts, depths, paths and pool ids.
    Requests that differ in nothing but their ids still have the same key."""
    contexts, depths, paths, ids = list[SamplingContext](), list[int](), list[list[int]](), list[Tensor]()
    for number, params in enumerate(every):
        own, pool = context(params, number // 2), torch.randperm(WIDE, generator=torch.Generator().manual_seed(number))
        for node in range(1 + number % 4):
            contexts.append(own)
            depths.append(2)
            paths.append([node, 3])
            ids.append(pool[:321])
    return contexts, depths, paths, torch.stack(ids)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(
    "every",
    [
        [SAMPLED[0]] * 4,
        [SAMPLED[3]],
        [*SAMPLED, SamplingParams(), *SAMPLED],
        [SamplingParams(repetition_penalty=1.2, temperature=0.9, min_p=0.01), SAMPLED[1]] * 2,
        [SamplingParams(logit_bias=((3, 2.0),), temperature=1.0)],
    ],
)
def test_scores_are_those_of_every_row_by_itself(every: list[SamplingParams], pooled: bool) -> None:
    """Guards against noise shared by rows that await other draws or score other ids, and against noise, biases and
    penalties of a column instead of an id: to the bit, each row has the plain formula's scores."""
    contexts, depths, paths, ids = level_of_trees(every)
    depths[-1] += 1
    width = ids.shape[1] if pooled else WIDE
    logits = random_logits(len(contexts), vocab=width)
    found = keyed_scores(logits, contexts, depths, True, paths, Pool(ids, WIDE) if pooled else None)
    for row, own in enumerate(contexts):
        columns = ids[row] if pooled else torch.arange(WIDE)
        full = torch.full((1, WIDE), -math.inf).index_copy(1, columns, logits[row : row + 1])
        processed = process(full, own.params, [history_of(own, paths[row])])[:, columns]
        params = replace(own.params, repetition_penalty=1.0, logit_bias=())  # the rest of them
        expected = torch.log_softmax(processed, dim=-1)[0]
        if not params.is_greedy:
            noise = gumbel([noise_key(own.seed, 0, FIRST + depths[row])], columns)
            expected = torch.log_softmax(warp(processed, params, is_draft=True) + noise, dim=-1)[0]
        assert torch.equal(found[row], expected), row


def test_noise_is_worked_out_once_per_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a beam that pays for the same noise at each of its nodes: it is most of the price of a row."""
    made = []

    def counted(keys: list[tuple[int, int]], ids: Tensor) -> Tensor:
        made.append(len(keys))
        return gumbel(keys, ids)

    monkeypatch.setattr(scores_module, "gumbel", counted)
    own, other = context(SAMPLED[0], 1), context(SAMPLED[0], 2)
    keyed_scores(random_logits(9), [own] * 5 + [other] * 4, [3] * 5 + [2] * 3 + [3])
    keyed_scores(random_logits(7), [own] * 7, [3] * 7)
    assert made == [3, 1]


def test_options_that_name_any_id_leave_a_pool_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against truncation and noise of a whole vocabulary for the few ids of a pool, where a request has
    penalties: a level of the lattice's beam took as long as some passes of its target."""
    widths = []

    def counted(keys: list[tuple[int, int]], ids: Tensor) -> Tensor:
        widths.append(ids.shape[-1])
        return gumbel(keys, ids)

    monkeypatch.setattr(scores_module, "gumbel", counted)
    contexts, depths, paths, ids = level_of_trees([SamplingParams(repetition_penalty=1.2, temperature=0.9, top_k=9)])
    logits = random_logits(len(contexts), vocab=ids.shape[1])
    keyed_scores(logits, contexts, depths, True, paths, Pool(ids, WIDE))
    assert widths == [ids.shape[1]]
