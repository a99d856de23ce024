"""Which ids a loss compares.

Most of a small drafter's training is scores of a large vocabulary, and most text is made of few of its tokens: a loss
may compare the ids that are supervised most often, and let a few of the others stand for the rest.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.drafters.ranked_vocabulary import rank_tokens
from outpace.drafters.training.facts import Facts
from outpace.lib.errors import InvalidRequest


class VocabularySettings(BaseModel):
    """Ids that the loss compares, and that the drafter drafts by default.

    Attributes:
        vocabulary: how many ids, those supervised most often; tokens that are none of them are not learned. None for
            all.
        sampled: other ids that are drawn for each batch and stand for all the rest, so that these are not forgotten
            (sampled softmax, Bengio and Senecal 2008, with uniform draws).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    vocabulary: Annotated[int, Field(ge=2)] | None = None
    sampled: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, eq=False)
class Compared:
    """The ids that a batch's loss compares.

    Attributes:
        ids: [K] int64; None for all.
        shift: [K] float32 to add to the logits of both sides: log of how many ids each one stands for.
        places: [V] int64, where an id is among the ranked ones, -1 for all others.
    """

    ids: Tensor | None = None
    shift: Tensor | None = None
    places: Tensor | None = None

    def labels(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where ids [...] are among the compared ones, 0 where they are not; and which are, bool [...]."""
        if self.places is None:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        places = self.places[ids]
        return places.clamp(min=0), places >= 0

    def shifted(self, logits: Tensor) -> Tensor:
        """Logits [R, K] with each id counted as often as it stands for others."""
        return logits if self.shift is None else logits + self.shift

    def rows_at_once(self, whole: int, vocab_size: int) -> int:
        """How many rows of logits take as much memory as `whole` rows of all ids."""
        return whole if self.ids is None else whole * vocab_size // len(self.ids)


class LossVocabulary:
    """The vocabulary of a loss.

    Args:
        ranked: [K] ids in ascending order; None for all.
        vocab_size: of the target.
        sampled: others that each step draws.
    """

    def __init__(self, ranked: Tensor | None = None, vocab_size: int = 0, sampled: int = 0) -> None:
        self.ranked, self._size, self._sampled = ranked, vocab_size, sampled
        if ranked is not None:
            places = torch.full((vocab_size,), -1, device=ranked.device)
            self._places = places.index_copy(0, ranked, torch.arange(len(ranked), device=ranked.device))
            self._others = (self._places < 0).nonzero()[:, 0]

    @classmethod
    def chosen(cls, settings: VocabularySettings, facts: Facts, device: torch.device) -> "LossVocabulary":
        """The vocabulary that settings ask for.

        Args:
            settings: its size.
            facts: how often each id is supervised.
            device: of the target.

        Raises:
            InvalidRequest: more sampled ids than there are others.
        """
        size, keep = len(facts.counts), settings.vocabulary
        left = 0 if keep is None else max(0, size - keep)
        if settings.sampled > left:
            raise InvalidRequest(
                f"objective.sampled={settings.sampled}: beyond objective.vocabulary={keep} there are {left} ids; take "
                "fewer, or a smaller vocabulary"
            )
        if not left:
            return cls()
        assert keep is not None
        # A drafter that cannot draft the end loses the last round of every answer.
        ends = [number for number in facts.special if facts.counts[number]]
        return cls(rank_tokens(facts.counts.cpu(), keep, ends).to(device), size, settings.sampled)

    def of(self, ranked: Tensor) -> "LossVocabulary":
        """The same with other ids [K], ascending, instead of the ranked ones."""
        return LossVocabulary(ranked, self._size, self._sampled)

    def draw(self, seed: int) -> Compared:
        """What the loss of a step with this seed compares."""
        if self.ranked is None:
            return Compared()
        count = self._sampled
        generator = torch.Generator().manual_seed(seed)
        drawn = self._others[torch.randperm(len(self._others), generator=generator)[:count].to(self._others.device)]
        shift = torch.zeros(len(self.ranked) + count, device=self.ranked.device)
        if count:
            shift[len(self.ranked) :] = math.log(len(self._others) / count)
        return Compared(torch.cat((self.ranked, drawn)), shift, self._places)
