"""The best ids of each row of draft logits: by the compiled kernels where nothing but the logits counts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outpace.core.protocols import Stream
from outpace.models.compiled import loaded_kernels
from outpace.models.gpu.capture import HEAD_ROWS, Captured, captures_on
from outpace.models.head import LmHead, SubsetHead
from outpace.models.largest import largest
from outpace.sampling.scores import Best, Pool, best_scores


def own_scores_of(head: LmHead | SubsetHead, device: torch.device) -> Callable[[Tensor], Tensor]:
    """`head.own_scores`, captured where passes on a device are."""
    if not captures_on(device):
        return head.own_scores
    captured = Captured(lambda hidden: (head.own_scores(hidden),), HEAD_ROWS, device)
    return lambda hidden: captured(hidden)[0]


def counts_logits_alone(streams: Sequence[Stream], wants_entropy: bool) -> bool:
    """Whether the best ids of these requests are those of the largest logits, and nothing else is asked."""
    return not wants_entropy and all(stream.params.is_greedy and not stream.params.has_processors for stream in streams)


def best_ids(
    logits: Tensor,
    streams: Sequence[Stream],
    depths: Sequence[int],
    width: int,
    noise: bool = True,
    paths: Sequence[Sequence[int]] | None = None,
    pool: Pool | None = None,
    wants_entropy: bool = False,
    draws: bool = False,
) -> Best:
    """As `sampling.scores.best_scores`, in one pass over the logits where that is enough."""
    is_readable = logits.device.type == "cpu" and logits.dtype == torch.float32 and loaded_kernels() is not None
    if not is_readable or not counts_logits_alone(streams, wants_entropy):
        return best_scores(
            logits, streams, depths, width, noise, paths, pool=pool, wants_entropy=wants_entropy, draws=draws
        )
    log_probs, columns = largest(logits, min(width, logits.shape[1]), normalised=True)  # [F, C]
    return Best(columns if pool is None else pool.ids.gather(1, columns), log_probs, None, {})
