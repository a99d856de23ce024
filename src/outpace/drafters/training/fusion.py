"""What EAGLE-3 and DART share in training: sizes, the draft vocabulary, and chains of pairs."""

from abc import abstractmethod
from collections.abc import Collection
from typing import Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from outpace.drafters.fusion import FusionNet
from outpace.drafters.layers import Size
from outpace.drafters.training.attention import ChainAttention
from outpace.drafters.training.batch import Anchors, Batch, Facts
from outpace.drafters.training.objective import Objective, initialise, layer_sizes
from outpace.drafters.training.settings import Section
from outpace.models.frozen import FrozenTarget

P = TypeVar("P", bound=FusionNet)


class FusionNetSettings(Section):
    """Sizes of a new drafter with one layer, as wide as the target, whose embedding it reads."""

    intermediate_size: Size | None = Field(default=None, description="Of the MLP; None for the target's.")
    heads: Size | None = Field(default=None, description="Of the attention; None for the target's.")
    kv_heads: Size | None = Field(default=None, description="Of the attention; None for the target's.")
    head_dim: Size | None = Field(default=None, description="Of the attention; None for the target's.")
    draft_vocab_size: Size | None = Field(
        default=32000, description="Ids of the drafter's own head, those supervised most often; None for all."
    )


def sizes_for(net: FusionNetSettings, target: FrozenTarget, scalings: Collection[str]) -> dict[str, Any]:
    """Fields of a `FusionConfig`; the target's sizes where the settings name none. `scalings` as in `layer_sizes`."""
    asked = net.model_dump(include=set(FusionNetSettings.model_fields), exclude_none=True)
    size = min(net.draft_vocab_size or target.vocab_size, target.vocab_size)
    return layer_sizes(target, scalings) | asked | {"draft_vocab_size": size}


def begin(net: P, target: FrozenTarget, facts: Facts, seed: int) -> P:
    """Fill a new net: random layers, the ids supervised most often, and their rows of the target's head. Returns the
    net in float32, on the target's device."""
    initialise(net, seed)
    if net.lm_head is None:
        return net.to(target.device)
    ids = torch.arange(net.config.draft_vocab_size)
    if net.d2t is not None:
        # Among ids of equal frequency the lower ones: tokenizers learned them earlier.
        ids = facts.counts.cpu().argsort(descending=True, stable=True)[: len(ids)].sort().values
        net.d2t.copy_(ids - torch.arange(len(ids)))
    with torch.no_grad():
        net.lm_head.weight.copy_(target.head[ids.to(target.head.device)])
    return net.to(target.device)


class PairObjective(Objective):
    """A drafter of pairs: row r combines the feature of position r and the embedding of token r + 1. A draft after an
    anchor is a chain of rows. The first is the anchor's own pair, row anchor - 1; later ones stand at the following
    positions. A chain sees the pairs before its first row, and itself."""

    net: FusionNet

    @abstractmethod
    def _embed(self, ids: Tensor) -> Tensor:
        """Embeddings [R, H] of ids [R], as the engine gives them to the drafter."""

    def _begin_chains(self, batch: Batch, anchors: Anchors) -> tuple[Tensor, Tensor, ChainAttention]:
        """Each anchor's first row, and the keys that chains see. `anchors`: at least one, each sequence's together. For
        an anchor at position 0, which has no pair, the result is meaningless (`_is_drafted`). Returns positions [A] and
        states [A, H] of the first rows, and attention over the pairs before them."""
        net, layer = self.net, self.net.midlayer
        rows, sequences = torch.unique(anchors.rows, return_inverse=True)  # [S], [A]
        first = (anchors.positions - 1).clamp(min=0)  # [A]
        length = int(first.max()) + 1
        features = batch.features[rows, :length, : net.config.joined_size]
        embeddings = self._embed(batch.ids[rows, 1 : length + 1].flatten())
        # Captured features may be narrower than the weights, also without autocast.
        states = net.fuse(features.flatten(0, 1).to(net.fc.weight.dtype))  # [S * length, H]
        positions = torch.arange(length, device=first.device).repeat(len(rows))
        pairs = layer.pair(embeddings, layer.hidden_norm(states))
        shape = (len(rows), length)
        key, value = (
            made.unflatten(0, shape) for made in layer.self_attn.keys_values(pairs, positions, layer.rotary)
        )  # [S, length, kv_heads, D]
        return first, states.unflatten(0, shape)[sequences, first], ChainAttention(key, value, sequences, first)

    def _is_drafted(self, anchors: Anchors) -> Tensor:
        """[A] whether an anchor has a pair: a drafter of pairs drafts nothing after a single token."""
        return anchors.positions > 0

    def _vocabulary(self) -> tuple[Tensor, Tensor]:
        """The target's id of each draft id, [Vd], and the draft id of each of the target's, [V], or -1."""
        size, net = self.net.config.draft_vocab_size, self.net
        drafts = torch.arange(size, device=net.fc.weight.device)
        ids = net.target_ids(drafts)
        return ids, drafts.new_full((net.config.vocab_size,), -1).index_copy(0, ids, drafts)
