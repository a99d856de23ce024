"""Options that change logits by the ids before them: penalties, biases, bans.

transformers' own processors are not used. `RepetitionPenaltyLogitsProcessor` is the same rule and has no companion for
presence and frequency. `NoBadWordsLogitsProcessor` lets a sequence through when the history is exactly one token
shorter than it, drops bans of an EOS id without a word, and keeps a vocabulary-wide bias per instance; tests hold this
module to both wherever the rules coincide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import Stream


@dataclass(frozen=True)
class History:
    """The ids before one token, along the path that leads to it."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    eos_token_ids: tuple[int, ...] = ()


def history_of(stream: Stream, path_tokens: Sequence[int] = ()) -> History:
    """The history of the token after a node.

    Args:
        path_tokens: tokens of the nodes below node 0 down to the node, whether verified or still being drafted. No
            siblings: a node's distribution depends on its own path alone.
    """
    prompt, output = stream.ids[: stream.prompt_length], stream.ids[stream.prompt_length :]
    return History(prompt, [*output, *path_tokens], stream.eos_token_ids)


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
        raise ValueError(f"{len(histories)} histories for {len(logits)} rows")
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
        seen = sorted({*history.prompt_ids, *history.output_ids})
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and history.output_ids:
        generated = torch.tensor(history.output_ids, device=row.device)
        counts = torch.bincount(generated, minlength=len(row)).to(row.dtype)  # [V]
        row -= params.frequency_penalty * counts
        row -= params.presence_penalty * (counts > 0).to(row.dtype)


def _banned(params: SamplingParams, history: History, vocab_size: int) -> list[int]:
    banned = []
    if len(history.output_ids) < params.min_new_tokens:
        # Ids outside the vocabulary can be named as EOS ids and never occur; a negative one would index from the end.
        banned += [token for token in history.eos_token_ids if 0 <= token < vocab_size]
    for *prefix, last in params.bad_words_ids:
        if _ends_with(history, prefix):
            banned.append(last)
    return banned


def _ends_with(history: History, tokens: Sequence[int]) -> bool:
    """Whether prompt and output together end with these tokens; true for none."""
    output = list(history.output_ids[-len(tokens) :]) if tokens else []
    missing = len(tokens) - len(output)
    before = list(history.prompt_ids[-missing:]) if missing else []
    return before + output == list(tokens)
