"""The best ids of each row of draft logits, by the compiled kernels where only logits and keyed noise decide."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outpace.core.protocols import SamplingContext
from outpace.gpu.capture import HEAD_ROWS, Captured, captures_on
from outpace.kernels.build import loaded_kernels
from outpace.kernels.topk import KeyedDraws, largest
from outpace.models.head import LmHead
from outpace.sampling.scores import Best, Pool, awaited_draws, best_scores


def own_scores_of(head: LmHead, device: torch.device) -> Callable[[Tensor], Tensor]:
    """`head.own_scores`, over static buffers (CUDA graphs) on a device whose passes are captured."""
    if not captures_on(device):
        return head.own_scores
    captured = Captured(lambda hidden: (head.own_scores(hidden),), HEAD_ROWS, device)
    return lambda hidden: captured(hidden)[0]


def counts_scores_alone(contexts: Sequence[SamplingContext], noise: bool, wants_entropy: bool) -> bool:
    """Whether logits, or logits / temperature + noise, are enough to rank the ids of these requests: no other option
    changes them, and no entropy is wanted. Never under rejection: there the tree affects the answer, which must not
    depend on the other requests of the round."""
    return not wants_entropy and all(
        not (params.has_processors or params.is_rejection) and (params.is_greedy or not noise or params.is_tempered)
        for params in (context.params for context in contexts)
    )


def draws_of(
    contexts: Sequence[SamplingContext], depths: Sequence[int], noise: bool, ids: Tensor | None
) -> KeyedDraws | None:
    """The keyed draws whose noise ranks the ids of each row; None if no row has one. `ids`: [C] the ids of all rows'
    columns, or [F, C] of each row's; None where column numbers are ids."""
    rows = [row for row, context in enumerate(contexts) if noise and not context.params.is_greedy]
    if not rows:
        return None
    first, keys, of_rows = awaited_draws([contexts[row] for row in rows], [depths[row] for row in rows])
    draws, temperatures = [-1] * len(contexts), [0.0] * len(contexts)
    for row, draw in zip(rows, of_rows, strict=True):
        draws[row], temperatures[row] = draw, contexts[row].params.temperature
    own = None if ids is None else [ids if ids.ndim == 1 else ids[rows[row]] for row in first]
    return KeyedDraws(keys, own, draws, temperatures)


def best_ids(
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
    """As `sampling.scores.best_scores`, in one call of the compiled kernels where logits and noise alone decide."""
    is_readable = logits.device.type == "cpu" and logits.dtype == torch.float32 and loaded_kernels() is not None
    if not is_readable or not counts_scores_alone(contexts, noise, wants_entropy):
        return best_scores(
            logits, contexts, depths, width, noise, paths, pool=pool, wants_entropy=wants_entropy, draws=draws
        )
    keyed = draws_of(contexts, depths, noise, None if pool is None else pool.ids)
    log_probs, columns = largest(logits, min(width, logits.shape[1]), normalised=True, draws=keyed)  # [F, C]
    return Best(columns if pool is None else pool.ids.gather(1, columns), log_probs, None, {})
