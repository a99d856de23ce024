"""Losses: sums over rows, computed in pieces, over all ids or the most frequent ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from outpace.drafters.ranked_vocabulary import rank_tokens
from outpace.drafters.training.batch import Facts
from outpace.drafters.training.settings import Section
from outpace.lib.errors import InvalidRequest

SMALLEST = 1e-6  # least probability of all ids that are not candidates, a limit of float32
PACE_FLOOR = 0.5  # D-PACE's alpha, the least acceptance that a draft counts with
ROWS_AT_ONCE = 1024
LARGE, KEPT = 65_536, 16_384
"""Size of vocabulary above which the target's head takes most of a drafter's time; and the number of its ids that are
then drafted by default."""
FEW_ROWS, GPU_SCORES = 256, 2**26
"""Rows scored at a time on a CPU, where the float32 scores of more rows exceed the caches; and scores at a time on a
GPU, where each piece costs its launches."""


def summed(
    compute: Callable[..., Tensor],
    rows: Sequence[Tensor],
    weights: Sequence[Tensor] = (),
    at_once: int | list[int] = ROWS_AT_ONCE,
) -> Tensor:
    """The sum of a loss over rows. A piece's gradients are computed together with its loss, so logits are never all in
    memory, and nothing is computed twice.

    Args:
        compute: gets a piece of each tensor and returns sums [S]; the first is the loss.
        rows: tensors [R, ...], split into the same pieces.
        weights: trained tensors that `compute` reads as well.
        at_once: rows of a piece, or of each.

    Returns:
        [S], of which only the first is differentiable.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*rows, *weights)):
        sums: Tensor = _Summed.apply(compute, at_once, len(rows), *rows, *weights)  # type: ignore[no-untyped-call]
        return sums
    return torch.stack([compute(*piece) for piece in zip(*(tensor.split(at_once) for tensor in rows))]).sum(dim=0)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Tensor], at_once: int | list[int], count: int, *tensors: Tensor
    ) -> Tensor:
        rows, weights = tensors[:count], tensors[count:]
        wanted = ctx.needs_input_grad[3 : 3 + count]
        total: Tensor | int = 0
        of_rows: list[list[Tensor]] = [[] for _ in rows]
        of_weights = [torch.zeros_like(weight) for weight in weights]
        for piece in zip(*(tensor.split(at_once) for tensor in rows), strict=True):
            leaves = [part.detach().requires_grad_(want) for part, want in zip(piece, wanted, strict=True)]
            with torch.enable_grad():
                sums = compute(*leaves)
                loss = sums[0]
            asked = [leaf for leaf in leaves if leaf.requires_grad]
            gradients = iter(torch.autograd.grad(loss, [*asked, *weights]))
            for kept, leaf in zip(of_rows, leaves, strict=True):
                if leaf.requires_grad:
                    kept.append(next(gradients))
            for whole, part in zip(of_weights, gradients, strict=True):
                whole += part
            total = sums.detach() + total
        ctx.gradients = [torch.cat(kept) if kept else None for kept in of_rows] + of_weights
        assert isinstance(total, Tensor)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if gradient is None else gradient * outer[0] for gradient in ctx.gradients]
        return (None, None, None, *scaled)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights [R] times the cross-entropies of logits [R, V] with labels, in float32 at least.

    Args:
        logits: [R, V].
        labels: ids [R], or distributions [R, V].
        weights: [R].
    """
    return (row_losses(logits, labels)[0] * weights).sum()


def row_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies [R] of logits [R, V], in float32 at least; and without gradients how likely each row's draft is
    accepted, [R]: the probability of the true id, or the overlap of the two distributions.

    Args:
        logits: [R, V].
        labels: ids [R], or distributions [R, V].
    """
    losses, accepted, _, _ = losses_and_candidates(logits, labels, logits.new_empty(len(logits), 0, dtype=torch.long))
    return losses, accepted


def losses_and_candidates(logits: Tensor, labels: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `row_losses`, and also the log-probabilities [R, C] of candidates, and that [R] of all other ids together. One
    pass over [R, V] gives all gradients. `candidates`: [R, C], different indices of logits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    made: tuple[Tensor, Tensor, Tensor, Tensor] = _RowLosses.apply(wide, labels, candidates)  # type: ignore[no-untyped-call]
    return made


class _RowLosses(torch.autograd.Function):
    """Computes its gradient in place: tensors [R, V] take most of a small drafter's time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        log_probs = torch.log_softmax(logits, dim=-1)
        own = log_probs.gather(1, candidates)  # [R, C]
        rest = (1 - own.exp().sum(dim=-1)).clamp_min(SMALLEST)
        if labels.is_floating_point():
            losses = -(log_probs * labels).sum(dim=-1)
            probs = log_probs.exp_()
            accepted = torch.minimum(probs, labels).sum(dim=-1)
        else:
            losses = -log_probs.gather(1, labels[:, None])[:, 0]
            probs, accepted = log_probs.exp_(), torch.exp(-losses)
        ctx.save_for_backward(probs, labels, candidates, own, rest)
        ctx.mark_non_differentiable(accepted)
        return losses, accepted, own, rest.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, _: Tensor, of_own: Tensor, of_rest: Tensor) -> tuple[Tensor | None, ...]:
        probs, labels, candidates, own, rest = ctx.saved_tensors
        outside = of_rest / rest  # d log(1 - sum of p) = -(sum of dp) / rest
        gradient = probs.mul_((outer - of_own.sum(dim=-1) + outside * (1 - rest))[:, None])
        if labels.is_floating_point():
            gradient.addcmul_(labels, outer[:, None], value=-1)
        else:
            gradient[torch.arange(len(labels), device=labels.device), labels] -= outer
        gradient.scatter_add_(1, candidates, of_own - outside[:, None] * own.exp())
        return gradient, None, None


def depth_weights(depth: int, gamma: float, device: torch.device) -> Tensor:
    """[depth] exp(-(k - 1) / gamma) for depths k from 1 (DFlash; Domino 4.2)."""
    return torch.exp(-torch.arange(depth, device=device, dtype=torch.float32) / gamma)


def paced_weights(cells: Tensor, accepted: Tensor, depth: int) -> Tensor:
    """D-PACE's weights (arXiv 2605.18810): how many tokens a round may still gain at a draft and after it.

    Args:
        cells: [R] int64, ascending: each supervised row's depth, from 0, plus `depth` times its block's number.
        accepted: [R] how likely each draft is accepted, given that those before are.
        depth: most rows of a block.

    Returns:
        [R] without gradients.
    """
    depths = cells % depth
    numbers, blocks = (cells // depth).unique(return_inverse=True)  # [B], [R]
    likely = accepted.new_ones(len(numbers), depth)
    likely[blocks, depths] = PACE_FLOOR + (1 - PACE_FLOOR) * accepted.detach()
    reached = torch.zeros_like(likely)
    reached[blocks, depths] = likely.cumprod(dim=1)[blocks, depths]  # depths that are not supervised gain nothing
    return reached.flip(1).cumsum(dim=1).flip(1)[blocks, depths]


class VocabularySettings(Section):
    """The ids that the loss compares, and that the drafter drafts by default."""

    vocabulary: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="Compare the ids supervised most often, this many; other tokens are not learned. None: all; but "
        "16,384 where the target has more than 65,536 and the drafter uses its head.",
    )
    sampled: int = Field(
        default=0,
        ge=0,
        description="Other ids drawn per step, which represent all the rest so that these are not forgotten (sampled "
        "softmax, Bengio and Senecal 2008, with uniform draws).",
    )

    def kept(self, size: int, has_head: bool = False) -> int:
        """How many of a target's `size` ids are compared. `has_head`: the drafter has a head of its own, with which
        other engines draft all ids."""
        usual = KEPT if size > LARGE and not has_head else size
        return usual if self.vocabulary is None else min(self.vocabulary, size)


@dataclass(frozen=True, eq=False)
class Compared:
    """The ids that a step's loss compares.

    Attributes:
        ids: [K] int64; None for all.
        shift: [K] float32 added to the logits of target and drafter: the log of how many ids each represents. None
            where each represents itself.
        places: [V] int64, index of each id among the ranked ones, -1 for others.
    """

    ids: Tensor | None = None
    shift: Tensor | None = None
    places: Tensor | None = None

    def labels(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Index of ids [...] among the ranked ones, 0 for others; and which are ranked, bool [...]."""
        if self.places is None:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        places = self.places[ids]
        return places.clamp(min=0), places >= 0

    def shifted(self, logits: Tensor) -> Tensor:
        """Logits [R, K] with the shift added."""
        return logits if self.shift is None else logits + self.shift

    def rows_at_once(self, whole: int, vocab_size: int) -> int:
        """How many rows of logits take as much memory as `whole` rows of all ids."""
        return whole if self.ids is None else whole * vocab_size // len(self.ids)


class LossVocabulary:
    """The vocabulary of a loss: most of a small drafter's training time goes into scores of a large vocabulary, of
    which most text uses a small part. `ranked`: [K] ids in ascending order; None for all."""

    def __init__(self, ranked: Tensor | None = None, vocab_size: int = 0, drawn: int = 0) -> None:
        self.ranked, self._size, self._drawn = ranked, vocab_size, drawn
        self._places: Tensor | None = None
        if ranked is not None:
            places = torch.full((vocab_size,), -1, device=ranked.device)
            self._places = places.index_copy(0, ranked, torch.arange(len(ranked), device=ranked.device))
            self._others = (self._places < 0).nonzero()[:, 0]

    @classmethod
    def chosen(
        cls, settings: VocabularySettings, facts: Facts, device: torch.device, has_head: bool = False
    ) -> "LossVocabulary":
        """The ids that settings choose. `has_head`: as of `VocabularySettings.kept`."""
        size = len(facts.counts)
        keep = settings.kept(size, has_head)
        left = size - keep
        if settings.sampled > left:
            raise InvalidRequest(
                f"objective.sampled={settings.sampled}: beyond objective.vocabulary={keep} there are {left} ids; take "
                "fewer, or a smaller vocabulary"
            )
        if not left:
            return cls()
        # A drafter that cannot draft the EOS loses the last round of every answer.
        ends = [number for number in facts.special if number < size and facts.counts[number]]  # tokenizers have more
        if keep < len(ends):
            raise InvalidRequest(
                f"objective.vocabulary={keep}: must be at least {len(ends)}, the special ids that occur"
            )
        return cls(rank_tokens(facts.counts.cpu(), keep, ends).to(device), size, settings.sampled)

    def labels(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As `Compared.labels`, which is the same in every step."""
        return Compared(places=self._places).labels(ids)

    def of(self, ranked: Tensor) -> "LossVocabulary":
        """The same with other ids [K], ascending."""
        return LossVocabulary(ranked, self._size, self._drawn)

    def draw(self, seed: int) -> Compared:
        """The ids that the loss compares in the step with this seed."""
        if self.ranked is None or not self._drawn:
            return Compared(self.ranked, None, self._places)
        count = self._drawn
        generator = torch.Generator().manual_seed(seed)
        drawn = self._others[torch.randperm(len(self._others), generator=generator)[:count].to(self._others.device)]
        shift = torch.zeros(len(self.ranked) + count, device=self.ranked.device)
        shift[len(self.ranked) :] = math.log(len(self._others) / count)
        return Compared(torch.cat((self.ranked, drawn)), shift, self._places)
