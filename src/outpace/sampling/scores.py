"""Keyed scores: how likely the target's own draw is to agree with a draft token; and draws, where none can agree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core.protocols import SamplingContext
from outpace.lib.places import places_of
from outpace.sampling.noise import Purpose, draw_key, gumbel
from outpace.sampling.warp import distribution_of, history_of, process


@dataclass(frozen=True, eq=False)
class Pool:
    """The ids of the columns of logits that do not cover the whole vocabulary.

    Attributes:
        ids: [F, C] int64, distinct within a row; equal in all rows of one request at one depth.
        vocab_size: V.
    """

    ids: Tensor
    vocab_size: int


class Best(NamedTuple):
    """The best ids of each row, or ids drawn from it.

    Attributes:
        entropy: [F] float32, in nats, of each row's whole distribution of keyed scores; None if not requested.
        draft_probs: by row, the distribution [V] that its ids were drawn from; ids of other rows were chosen by score.
    """

    tokens: Tensor
    log_probs: Tensor
    entropy: Tensor | None
    draft_probs: Mapping[int, Tensor]


def keyed_scores(
    logits: Tensor,
    contexts: Sequence[SamplingContext],
    depths: Sequence[int],
    noise: bool = True,
    paths: Sequence[Sequence[int]] | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """log_softmax(log q + g) with the noise of the target's own draw at each position; log q for requests without
    noise.

    At temperature > 0 the probability q(x) says little about a draft's acceptance: what counts is whether x wins
    under the noise that the target will use. Shapes, gates and reranking therefore receive these scores. Rejection
    does not use that noise: its requests get log q, warped as the target is.

    Args:
        logits: [F, V] float32 draft logits, in the target's ids.
        contexts: each row's; pass the same object in all rows of a request, or its noise is computed again.
        depths: depth of each row's node; the token after it is `depth` positions after the pending token's successor.
        noise: whether sampled requests draft with their noise.
        paths: per row the drafted tokens down to the node; read for requests with `has_processors`, which need it.
        pool: if given, logits and scores are [F, C], of these ids; all others count as -inf.

    Returns:
        [F, V] float32 log-scores, each row normalised; -inf where the sampling parameters rule a token out.
    """
    by_params = places_of(context.params for context in contexts)
    if len(by_params) == 1:
        return _scores_alike(logits, contexts, depths, noise, paths, pool)
    scores = torch.empty_like(logits)
    for members in by_params.values():
        own = [contexts[row] for row in members], [depths[row] for row in members]
        along = None if paths is None else [paths[row] for row in members]
        part = None if pool is None else Pool(pool.ids[members], pool.vocab_size)
        scores[members] = _scores_alike(logits[members], *own, noise, along, part)
    return scores


def _scores_alike(
    logits: Tensor,
    contexts: Sequence[SamplingContext],
    depths: Sequence[int],
    noise: bool,
    paths: Sequence[Sequence[int]] | None,
    pool: Pool | None,
) -> Tensor:
    """`keyed_scores` of rows with the same parameters."""
    params, logits = contexts[0].params, _processed(logits, contexts, paths, pool)
    if params.is_greedy or not noise:
        return torch.log_softmax(logits, dim=-1)
    distribution = distribution_of(logits, params, is_draft=True)
    if params.is_rejection:
        return distribution
    ids = torch.arange(logits.shape[1], device=logits.device) if pool is None else pool.ids
    return torch.log_softmax(distribution + _noise_of(contexts, depths, ids), dim=-1)


def _processed(
    logits: Tensor, contexts: Sequence[SamplingContext], paths: Sequence[Sequence[int]] | None, pool: Pool | None
) -> Tensor:
    """`process` of rows with the same parameters."""
    params = contexts[0].params
    if not params.has_processors:
        return logits
    histories = [] if paths is None else list(map(history_of, contexts, paths))
    if pool is None:
        return process(logits, params, histories)
    # These options may name any id. Nothing else looks at the whole vocabulary: a lattice's pool has 16 of its ids.
    full = logits.new_full((len(logits), pool.vocab_size), -torch.inf).scatter_(1, pool.ids, logits)
    return process(full, params, histories).gather(1, pool.ids)


def _noise_of(
    contexts: Sequence[SamplingContext], depths: Sequence[int], ids: Tensor, purpose: Purpose = Purpose.TARGET
) -> Tensor:
    """[F, C] noise of the target's draw after each row's node, or [1, C] if all rows share a draw. It is computed once
    per draw: it costs more than all other work on a row."""
    rows, keys, draws = awaited_draws(contexts, depths, purpose)
    noise = gumbel(keys, ids if ids.ndim == 1 else ids[rows])  # [D, C]
    return noise if len(rows) == 1 else noise[draws]


def awaited_draws(
    contexts: Sequence[SamplingContext], depths: Sequence[int], purpose: Purpose = Purpose.TARGET
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """The target's draws after the rows' nodes: the first row of each draw, the key of its noise, and each row's
    draw."""
    awaited = [(id(context), depth) for context, depth in zip(contexts, depths, strict=True)]
    first: dict[tuple[int, int], int] = {}
    for row, draw in enumerate(awaited):
        first.setdefault(draw, row)
    keys = [draw_key(contexts[row], depths[row], purpose) for row in first.values()]
    place = {draw: number for number, draw in enumerate(first)}
    return list(first.values()), keys, [place[draw] for draw in awaited]


def best_scores(
    logits: Tensor,
    contexts: Sequence[SamplingContext],
    depths: Sequence[int],
    width: int,
    noise: bool = True,
    paths: Sequence[Sequence[int]] | None = None,
    pool: Pool | None = None,
    wants_entropy: bool = False,
    draws: bool = False,
) -> Best:
    """The best ids of each row by keyed score, with their scores.

    Args:
        logits, contexts, depths, noise, paths, pool: as for `keyed_scores`.
        width: ids per row; fewer if there are not as many.
        wants_entropy: whether to compute the entropy of each row's whole distribution.
        draws: whether to draw the ids of requests under rejection, with independent noise, if `noise`.
    """
    scores = keyed_scores(logits, contexts, depths, noise, paths, pool)
    drawn = [row for row, context in enumerate(contexts) if draws and noise and context.params.is_rejection]
    ranking = scores
    if drawn:
        ids = torch.arange(scores.shape[1], device=scores.device) if pool is None else pool.ids[drawn]
        own = [contexts[row] for row in drawn], [depths[row] for row in drawn]
        # Sorting by log q + Gumbel noise draws from q without replacement. Nodes of a depth may share the noise: a walk
        # passes only one of them, so no position is decided twice.
        ranking = scores.index_add(
            0, torch.tensor(drawn, device=scores.device), _noise_of(*own, ids, Purpose.DRAFT).expand(len(drawn), -1)
        )
    columns = ranking.topk(min(width, scores.shape[1]), dim=-1).indices
    log_probs = scores.gather(1, columns)
    tokens = columns if pool is None else pool.ids.gather(1, columns)
    entropy = torch.special.entr(scores.exp()).sum(dim=-1) if wants_entropy else None  # [F]
    return Best(tokens, log_probs, entropy, {row: _whole(scores[row].exp(), row, pool) for row in drawn})


def _whole(distribution: Tensor, row: int, pool: Pool | None) -> Tensor:
    """[V] the distribution of a row, 0 outside its pool."""
    if pool is None:
        return distribution
    return distribution.new_zeros(pool.vocab_size).scatter_(0, pool.ids[row], distribution)
