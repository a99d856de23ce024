"""Keyed scores: how likely the target's own draw is to agree with a draft token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import Stream
from outpace.sampling.noise import gumbel, noise_key
from outpace.sampling.process import history_of, process
from outpace.sampling.warp import warp


def keyed_scores(
    logits: Tensor,
    streams: Sequence[Stream],
    depths: Sequence[int],
    noise: bool = True,
    paths: Sequence[Sequence[int]] | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """log_softmax(log q + g) with the noise of the target's own draw at each position; log q where there is none.

    At temperature > 0 the probability q(x) says little about a draft's acceptance: what counts is whether x wins
    under the noise that the target will use. Shapes, gates and reranking therefore receive these scores.

    Args:
        logits: [F, V] float32 draft logits, a column for each of the target's ids, or [F, M] of some of them.
        streams: the request of each row.
        depths: depth of each row's node; the token after it stands `depth` places after the pending token's successor.
        noise: whether sampled requests draft with their noise.
        paths: per row the drafted tokens down to the node; read for requests with `has_processors`, which need it.
        ids: [F, M] the target's id of each column; None if there are all V. Processors need all.

    Returns:
        Like logits, float32 log-scores, each row normalised; -inf where the sampling parameters rule a token out.
    """
    scores = torch.empty_like(logits)
    if ids is None:
        ids = torch.arange(logits.shape[1], device=logits.device).expand(len(logits), -1)
    else:
        assert not any(stream.params.has_processors for stream in streams), "processors need a column for every id"
    by_params: dict[SamplingParams, list[int]] = {}
    for row, stream in enumerate(streams):
        by_params.setdefault(stream.params, []).append(row)
    for params, members in by_params.items():
        rows, histories = logits[members], None
        if params.has_processors and paths is not None:
            histories = [history_of(streams[row], paths[row]) for row in members]
        if params.is_greedy or not noise:
            scores[members] = torch.log_softmax(process(rows, params, histories or ()), dim=-1)
            continue
        keys = [
            noise_key(streams[row].seed, streams[row].sample_index, streams[row].first_position + depths[row])
            for row in members
        ]
        scores[members] = torch.log_softmax(warp(rows, params, histories) + gumbel(keys, ids[members]), dim=-1)
    return scores
