"""What EAGLE-3 and DART share in training: sizes taken from the target, the draft vocabulary, and the rows they see."""

from abc import abstractmethod
from collections.abc import Collection
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from outpace.drafters.dart.net import DartNet
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.layers import Size
from outpace.drafters.training.anchors import Anchors
from outpace.drafters.training.batch import Batch
from outpace.drafters.training.chains import ChainAttention
from outpace.drafters.training.facts import Facts
from outpace.drafters.training.initial import initialise
from outpace.drafters.training.objective import Objective
from outpace.drafters.training.sizes import layer_sizes
from outpace.models.frozen import FrozenTarget

N = TypeVar("N", Eagle3Net, DartNet)


class FusionNetSettings(BaseModel):
    """Sizes of a new drafter with one layer; it is as wide as the target, whose embedding it reads.

    Attributes:
        intermediate_size: of the MLP; None for the target's.
        heads, kv_heads, head_dim: of the attention; None for the target's.
        draft_vocab_size: of the drafter's own head, whose ids are those supervised most often; None for all ids, as is
            any size that the target's vocabulary does not exceed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    intermediate_size: Size | None = None
    heads: Size | None = None
    kv_heads: Size | None = None
    head_dim: Size | None = None
    draft_vocab_size: Size | None = 32000


def sizes_for(net: FusionNetSettings, target: FrozenTarget, scalings: Collection[str]) -> dict[str, Any]:
    """Fields of a `FusionConfig`.

    Args:
        net: what was asked for.
        target: gives what was not.
        scalings: kinds of `rope_scaling` that the drafter can have. Of other targets it takes the base alone: its
            positions are its own, and need not turn as the target's do.
    """
    asked = net.model_dump(include=set(FusionNetSettings.model_fields), exclude_none=True)
    size = min(net.draft_vocab_size or target.vocab_size, target.vocab_size)
    return layer_sizes(target, scalings) | asked | {"draft_vocab_size": size}


def begin(net: N, target: FrozenTarget, facts: Facts, seed: int) -> N:
    """Fill a new net: random layers, the ids supervised most often as its vocabulary, their rows of the target's
    head.

    Returns:
        The net in float32, on the target's device.
    """
    initialise(net, seed)
    if net.lm_head is None:
        return net.to(target.device)
    ids = torch.arange(net.config.draft_vocab_size)
    if net.d2t is not None:
        # Of ids that occur as often, the lower one, which tokenizers learned earlier.
        ids = facts.counts.cpu().argsort(descending=True, stable=True)[: len(ids)].sort().values
        net.d2t.copy_(ids - torch.arange(len(ids)))
    with torch.no_grad():
        net.lm_head.weight.copy_(target.head[ids.to(target.head.device)])
    return net.to(target.device)


class PairObjective(Objective):
    """A drafter of pairs: row r holds the feature of position r and the embedding of token r + 1.

    What is drafted behind an anchor comes from a chain of rows. The first is the anchor's own pair, row r = anchor - 1;
    later ones stand at the positions after it. A chain sees the pairs before its first row, and itself.
    """

    net: Eagle3Net | DartNet

    @abstractmethod
    def _embed(self, ids: Tensor) -> Tensor:
        """Embeddings [R, H] of ids [R], as the engine gives them to the drafter."""

    def _begin_chains(self, batch: Batch, anchors: Anchors) -> tuple[Tensor, Tensor, ChainAttention]:
        """Each anchor's first row, and what chains see.

        Args:
            batch: with features.
            anchors: at least one, those of a sequence side by side. For an anchor at position 0, which no pair comes
                before, the result is meaningless (`_is_drafted`).

        Returns:
            Positions [A] and states [A, H] of the first rows, and the attention of the chains over the pairs before.
        """
        net, layer = self.net, self.net.midlayer
        rows, sequences = torch.unique(anchors.rows, return_inverse=True)  # [S], [A]
        first = (anchors.positions - 1).clamp(min=0)  # [A]
        length = int(first.max()) + 1
        features = batch.features[rows, :length, : net.config.joined_size]
        embeddings = self._embed(batch.ids[rows, 1 : length + 1].flatten())
        # Captured features may be narrower than the weights, also where nothing is cast for us.
        states = net.fuse(features.flatten(0, 1).to(net.fc.weight.dtype))  # [S * length, H]
        positions = torch.arange(length, device=first.device).repeat(len(rows))
        pairs = layer.pair(embeddings, layer.hidden_norm(states))
        shape = (len(rows), length)
        key, value = (
            made.unflatten(0, shape) for made in layer.self_attn.keys_values(pairs, positions, layer.rotary)
        )  # [S, length, kv_heads, D]
        return first, states.unflatten(0, shape)[sequences, first], ChainAttention(key, value, sequences, first)

    def _is_drafted(self, anchors: Anchors) -> Tensor:
        """[A] whether an anchor has a pair before it: a drafter of pairs says nothing after a single token."""
        return anchors.positions > 0

    def _vocabulary(self) -> tuple[Tensor, Tensor]:
        """The target's id of each draft id, [Vd], and the draft id of each of the target's, [V], or -1."""
        size, net = self.net.config.draft_vocab_size, self.net
        drafts = torch.arange(size, device=net.fc.weight.device)
        ids = net.target_ids(drafts)
        return ids, drafts.new_full((net.config.vocab_size,), -1).index_copy(0, ids, drafts)
