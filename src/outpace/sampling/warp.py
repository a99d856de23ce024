"""Logits to the distribution that tokens are drawn from, for target and draft alike.

First the options that depend on earlier ids (penalties, biases, bans), then temperature and truncation. transformers'
processors are not used: `NoBadWordsLogitsProcessor` ignores a sequence when the history is exactly one token shorter
than it, drops bans of an EOS id, and keeps a vocabulary-wide bias per instance. Tests compare this module with both
wherever the rules coincide.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import SamplingContext


@dataclass(frozen=True)
class History:
    """The ids before one token, along the path that leads to it. `prompt_set`: as of `SamplingContext`; None to make it
    when it is read."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    eos_token_ids: tuple[int, ...] = ()
    prompt_set: frozenset[int] | None = field(default=None, compare=False)


def history_of(context: SamplingContext, path_tokens: Sequence[int] = ()) -> History:
    """The history of the token after a node.

    Args:
        path_tokens: tokens of the nodes below node 0 down to the node, whether verified or still being drafted. No
            siblings: a node's distribution depends on its own path alone.
    """
    penalises = context.params.repetition_penalty != 1.0 and context.params.penalty_window is None
    known = context.prompt_set if penalises else None
    return History(context.prompt, [*context.generated, *path_tokens], context.eos_token_ids, known)


def process(logits: Tensor, params: SamplingParams, histories: Sequence[History]) -> Tensor:
    """Apply the options that act before temperature and truncation.

    The order is vLLM's: logit bias, then the repetition penalty, then frequency and presence, so that a biased logit
    is what the penalty divides or multiplies. Bans (bad words, EOS ids before `min_new_tokens`) come last here and
    first in vLLM, which is the same: nothing brings a banned token back.

    Returns:
        [R, V] float32, -inf for banned tokens; a row may be -inf throughout. The input itself if no option is set.
    """
    if not params.has_processors:
        return logits
    if params.bad_words:
        raise ValueError(f"bad_words={params.bad_words!r}: must be resolved to bad_words_ids first")
    if len(histories) != len(logits):
        raise ValueError(f"{len(histories)} histories for {len(logits)} rows: give one history per row")
    logits = logits.clone()
    if params.logit_bias:
        tokens, biases = zip(*params.logit_bias)
        logits[:, list(tokens)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
    for row, history in zip(logits, histories, strict=True):  # row is a view [V]
        _penalise(row, params, history)
        banned = _banned(params, history, len(row))
        if banned:
            row[banned] = -torch.inf
    return logits


def _penalise(row: Tensor, params: SamplingParams, history: History) -> None:
    if params.repetition_penalty != 1.0:
        said = _said(history, params.penalty_window)
        seen = torch.tensor(list(said), dtype=torch.int64, device=row.device)  # once: a list is converted at each use
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and history.output_ids:
        generated, counts = torch.tensor(history.output_ids, device=row.device).unique(return_counts=True)
        row[generated] -= params.frequency_penalty * counts.to(row.dtype)
        row[generated] -= params.presence_penalty


def _banned(params: SamplingParams, history: History, vocab_size: int) -> list[int]:
    banned: list[int] = []
    if len(history.output_ids) < params.min_new_tokens:
        # Ids outside the vocabulary can be named as EOS ids and never occur; a negative one would index from the end.
        banned += [token for token in history.eos_token_ids if 0 <= token < vocab_size]
    return banned + [last for *prefix, last in params.bad_words_ids if _last(history, len(prefix)) == prefix]


def _said(history: History, window: int | None) -> Set[int]:
    """Each of the last `window` ids of prompt and output once; None for all."""
    if window is not None:
        return set(_last(history, window))
    prompt = frozenset(history.prompt_ids) if history.prompt_set is None else history.prompt_set
    return prompt.union(history.output_ids)


def _last(history: History, count: int) -> list[int]:
    """The last `count` ids of prompt and output together."""
    output = history.output_ids[-count:] if count else []
    missing = count - len(output)
    return [*(history.prompt_ids[-missing:] if missing else []), *output]


_TOP_P_GUESS = 256


def warp(
    logits: Tensor, params: SamplingParams, histories: Sequence[History] | None = None, is_draft: bool = False
) -> Tensor:
    """Apply all options: `process`, then temperature, top-k, top-p and min-p in transformers' order, with its ties.

    Args:
        histories: R histories, one per row, each along the row's own path; needed if `params.has_processors`.
        is_draft: the exact distribution is not needed: if top-p needs more than the likeliest 256 tokens it removes
            none, which avoids a host read.

    Returns:
        [R, V] float32 normalised log-probabilities, -inf for removed tokens; at temperature 0 all mass is on the
        largest logit. A row with no token left is -inf throughout.
    """
    return distribution_of(process(logits, params, histories or ()), params, is_draft)


def distribution_of(processed: Tensor, params: SamplingParams, is_draft: bool = False) -> Tensor:
    """As `warp`, of logits that `process` has returned."""
    if not params.has_processors:
        return _distribution(processed, params, is_draft)
    # Not only -inf: a penalty of 1e-40 overflows, and an infinite score is no distribution either.
    is_empty = ~torch.isfinite(processed.amax(dim=-1, keepdim=True))  # [R, 1]
    return _distribution(processed, params, is_draft).masked_fill(is_empty, -torch.inf)


def _distribution(logits: Tensor, params: SamplingParams, is_draft: bool) -> Tensor:
    if params.is_greedy:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter_(-1, best, 0.0)
    log_probs = _tempered(logits, params)
    if 0 < params.top_k < logits.shape[-1]:
        kth = log_probs.topk(params.top_k, dim=-1).values[:, -1:]
        log_probs = _keep(log_probs, log_probs >= kth)
    if params.top_p < 1.0:
        log_probs = _keep(log_probs, log_probs >= _top_p_floor(log_probs, params.top_p, is_draft))
    if params.min_p > 0.0:
        floor = log_probs.amax(dim=-1, keepdim=True) + torch.log(torch.tensor(params.min_p)).item()
        log_probs = _keep(log_probs, log_probs >= floor)
    return log_probs


def _tempered(logits: Tensor, params: SamplingParams) -> Tensor:
    """[R, V] log-probabilities at the request's temperature. Differences to the largest logit are divided, since logits
    divided by a small temperature lose digits and may overflow."""
    return torch.log_softmax((logits - logits.amax(dim=-1, keepdim=True)) / params.temperature, dim=-1)


def cutoff_distance(logits: Tensor, params: SamplingParams, token: int, history: History | None = None) -> float:
    """How far, in nats, a token's log-probability lies from the nearest cut-off that could drop or admit it.

    The certificate uses it: a rounding error larger than this distance can change which tokens may be drawn.
    """
    distance = float("inf")
    logits = process(logits[None], params, () if history is None else [history])[0]
    if params.is_greedy:
        return distance
    log_probs = _tempered(logits[None], params)
    if 0 < params.top_k < log_probs.shape[-1]:
        kth, next_best = log_probs.topk(params.top_k + 1, dim=-1).values[0, -2:]
        distance = min(distance, _to_other_side(log_probs[0, token], kth, next_best))
        log_probs = _keep(log_probs, log_probs >= kth)
    if params.top_p < 1.0:
        ordered = log_probs[0].sort(descending=True).values
        floor = _top_p_floor(log_probs, params.top_p)[0, 0]
        mass = ordered.exp().cumsum(0)
        last = int((ordered >= floor).sum()) - 1
        # The set grows or shrinks when the mass at its edge crosses top_p: measured as a relative change of mass.
        edges = mass[max(last - 1, 0) : last + 1] if last else mass[:1]
        slack = float((edges - params.top_p).abs().min() / params.top_p)
        dropped = ordered[last + 1] if last + 1 < len(ordered) else torch.tensor(-torch.inf)
        distance = min(distance, slack, _to_other_side(log_probs[0, token], floor, dropped))
        log_probs = _keep(log_probs, log_probs >= floor)
    if params.min_p > 0.0:
        floor = log_probs.amax() + torch.log(torch.tensor(params.min_p))
        distance = min(distance, float((log_probs[0, token] - floor).abs()))
    return distance


def _to_other_side(log_prob: Tensor, last_kept: Tensor, first_dropped: Tensor) -> float:
    """The distance from a kept token to the best dropped one, or from a dropped token to the worst kept one."""
    return float(log_prob - first_dropped if log_prob >= last_kept else last_kept - log_prob)


def _keep(log_probs: Tensor, keep: Tensor) -> Tensor:
    return torch.log_softmax(log_probs.masked_fill(~keep, -torch.inf), dim=-1)


def _top_p_floor(log_probs: Tensor, top_p: float, is_draft: bool = False) -> Tensor:
    """[R, 1] log-probability of the last token that the nucleus needs to reach `top_p`; see `warp` for drafts."""
    vocab = log_probs.shape[-1]
    count = min(_TOP_P_GUESS, vocab)
    while True:
        ordered = log_probs.topk(count, dim=-1).values  # [R, count]
        # A token is needed while the mass before it is below top_p; a full sort is rarely necessary. In float64: a GPU
        # adds in an order that depends on the number of rows, and float32 would let that decide what a row keeps.
        shares = ordered.double().exp()
        before = shares.cumsum(dim=-1) - shares
        needed = (before < top_p).sum(dim=-1, keepdim=True)
        if is_draft and count < vocab:
            return ordered.gather(-1, (needed - 1).clamp(min=0)).masked_fill(needed == count, -torch.inf)
        if count == vocab or int(needed.max()) < count:
            return ordered.gather(-1, (needed - 1).clamp(min=0))  # none is needed where the row is NaN
        count = min(count * 8, vocab)
