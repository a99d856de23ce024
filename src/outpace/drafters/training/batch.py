"""Batches of sequences: what an objective is given."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.drafters.training.samples import TrainingSample


@dataclass(frozen=True, eq=False)
class Batch:
    """N sequences, padded at the end to T.

    Attributes:
        ids: [N, T] int64; 0 at padding.
        mask: [N, T] bool, true where the token is the target's own; every sequence has one stretch, up to its end.
        lengths: N.
        seeds: N, different for every sequence and epoch: whatever is random about a sequence is drawn from its seed, so
            that it depends neither on its neighbours nor on how many processes share the work.
        features: [N, T, taps * H], the target's hidden states that the objective reads.
        step_seed: of what all sequences of a step have in common, however they are dealt to passes and processes.
    """

    ids: Tensor
    mask: Tensor
    lengths: tuple[int, ...]
    seeds: tuple[int, ...]
    features: Tensor
    step_seed: int = 0

    def to(self, device: torch.device) -> "Batch":
        ids, mask, features = (tensor.to(device) for tensor in (self.ids, self.mask, self.features))
        return replace(self, ids=ids, mask=mask, features=features)

    def with_features(self, features: Tensor) -> "Batch":
        return replace(self, features=features)


def collate(samples: Sequence[TrainingSample], seeds: Sequence[int], features: Sequence[Tensor] = ()) -> Batch:
    """Pad sequences at the end.

    Args:
        samples: at least one.
        seeds: one per sample.
        features: [T, taps * H] per sample; empty if they are yet to be captured.
    """
    lengths = tuple(len(sample.ids) for sample in samples)
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([sample.ids for sample in samples], batch_first=True)
    mask = pad([sample.mask for sample in samples], batch_first=True)
    rows = pad(list(features), batch_first=True) if features else torch.empty(*ids.shape, 0)
    return Batch(ids, mask, lengths, tuple(seeds), rows)


def sample_seed(seed: int, epoch: int, name: str) -> int:
    """The seed of a sequence in an epoch."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{epoch}/{name}".encode(), digest_size=7).digest(), "little")
