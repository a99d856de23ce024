"""Blocks of masks behind many anchors at once: what DFlash and Domino compute in training and in evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from outpace.drafters.dflash.net import DFlashConfig, DFlashNet
from outpace.drafters.training.anchors import Anchors
from outpace.drafters.training.batch import Batch
from outpace.drafters.training.chains import ChainAttention
from outpace.drafters.training.losses import FEW_ROWS, depth_weights
from outpace.drafters.training.objective import Objective
from outpace.drafters.training.vocabulary import Compared
from outpace.models.frozen import FrozenTarget

Labels = Literal["tokens", "target-softmax"]
GAMMAS = ((7, 4.0), (8, 4.0), (10, 5.0), (16, 7.0))  # block sizes and their gammas (DFlash, training)


def default_gamma(block_size: int) -> float:
    """The decay of weights over a block: the authors' values, between them a straight line, beyond them in proportion.

    Args:
        block_size: B, the anchor included.
    """
    (first, low), (last, high) = GAMMAS[0], GAMMAS[-1]
    if block_size <= first:
        return low * block_size / first
    for (left, below), (right, above) in pairwise(GAMMAS):
        if block_size <= right:
            return below + (above - below) * (block_size - left) / (right - left)
    return high * block_size / last


def block_outputs(net: DFlashNet, target: FrozenTarget, batch: Batch, anchors: Anchors) -> Tensor:
    """Outputs [A, B, H] of the blocks [anchor, MASK, ...], each behind the context that a round there would have.

    Args:
        net: its master weights may be wider than the target's.
        target: embeds.
        batch: features of the net's taps.
        anchors: A > 0, those of a sequence side by side.
    """
    config, weight, device = net.config, net.norm.weight, batch.ids.device
    size = config.block_size
    tokens = torch.full((len(anchors), size), config.mask_token_id, device=device)
    tokens[:, 0] = batch.ids[anchors.rows, anchors.positions]
    positions = anchors.positions[:, None] + torch.arange(size, device=device)  # [A, B]
    contexts = _contexts(net, batch, anchors)
    visible = {layer: _visible(config, layer).to(device) for layer in range(config.layers)}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Norm and rotation leave queries and keys in float32 under autocast; values have what attention computes in.
        query, key, value = (rows.to(value.dtype).unflatten(0, (-1, size)) for rows in (query, key, value))
        return contexts[layer](query, key, value, visible[layer], config.window(layer)).flatten(0, 1)

    embeddings = target.embed(tokens.flatten()).to(weight.dtype)
    outputs: Tensor = net.block(embeddings, positions.flatten(), attend).unflatten(0, (-1, size))
    return outputs


def _contexts(net: DFlashNet, batch: Batch, anchors: Anchors) -> list[ChainAttention]:
    """What blocks see of their sequences in each layer: all positions strictly before their anchors."""
    rows, sequences = torch.unique(anchors.rows, return_inverse=True)  # [S], [A]
    length = int(anchors.positions.max())
    width = net.fc.in_features  # the labels' features may stand behind those that the net reads
    features = batch.features[rows, :length, :width].flatten(0, 1).to(net.norm.weight.dtype)  # [S * length, taps * H]
    positions = torch.arange(length, device=rows.device).repeat(len(rows))
    shape = (len(rows), length)
    return [
        ChainAttention(key.to(value.dtype).unflatten(0, shape), value.unflatten(0, shape), sequences, anchors.positions)
        for key, value in net.context(features, positions)
    ]


def _visible(config: DFlashConfig, layer: int) -> Tensor:
    """[B, B] bool: which rows of a block see which others of it."""
    places = torch.arange(config.block_size)
    visible = torch.ones(config.block_size, config.block_size, dtype=torch.bool)
    window = config.window(layer)
    if window is not None:
        visible &= places > places[:, None] - window
    return visible.tril() if config.is_causal(layer) else visible


@dataclass(frozen=True, eq=False)
class Rows:
    """The supervised positions of a batch's blocks, R of them.

    Attributes:
        own: [A, D] bool, which they are.
        told: ids [R] that came, as places among the compared ids; or features [R, H] that the target's distribution is
            made of.
        weights: [R].
        compared: the ids that the loss compares.
        target: whose head makes distributions of features.
    """

    own: Tensor
    told: Tensor
    weights: Tensor
    compared: Compared
    target: FrozenTarget

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's head on outputs [R, H], [R, K] in float32 at least."""
        logits = self.target.logits(hidden, self.compared.ids)
        return self.compared.shifted(logits.to(torch.promote_types(logits.dtype, torch.float32)))

    @torch.no_grad()
    def labels(self, told: Tensor) -> Tensor:
        """What a cross-entropy compares with, of a piece of `told`."""
        return self.logits(told).softmax(dim=-1) if told.is_floating_point() else told

    @property
    def at_once(self) -> int:
        """Rows to score at a time."""
        return self.compared.rows_at_once(FEW_ROWS, self.target.vocab_size)


def supervised(objective: Objective, batch: Batch, anchors: Anchors, depth: int, gamma: float, labels: Labels) -> Rows:
    """What blocks behind anchors are to foresee.

    Args:
        objective: whose target and vocabulary.
        batch: for distributions, its last features are what the target's head reads.
        anchors: of A blocks.
        depth: D, tokens that a block foresees.
        gamma: of the weights of depths.
        labels: the tokens that came, or the distributions they came from.
    """
    compared = objective.vocabulary.draw(batch.step_seed)
    ids, own = anchors.followed(batch, depth)  # [A, D]
    places, known = compared.labels(ids)
    own = own & known
    told = places[own]
    if labels == "target-softmax":
        before = anchors.positions[:, None] + torch.arange(depth, device=ids.device)  # of the token before each
        rows = anchors.rows[:, None].expand_as(own)
        told = batch.features[rows[own], before[own], -objective.target.hidden_size :]
    weights = depth_weights(depth, gamma, ids.device).expand(len(anchors), -1)[own]
    return Rows(own, told, weights, compared, objective.target)


def right_runs(ids: Tensor, own: Tensor, scores: Callable[[int, Tensor], Tensor]) -> Tensor:
    """How far greedy chains are right. A chain that was wrong once is followed no further, so few rows are scored.

    Args:
        ids: [A, depth], the true tokens.
        own: [A, depth] bool, where there are any.
        scores: gets a depth, counted from 1, and [R] chains, all right so far; returns [R, V].

    Returns:
        [A, depth] bool: true up to the first wrong draft, false from there on.
    """
    right = torch.zeros_like(own)
    chains = torch.arange(len(ids), device=ids.device)
    for depth in range(1, ids.shape[1] + 1):
        chains = chains[own[chains, depth - 1]]
        if not len(chains):
            break
        chains = chains[scores(depth, chains).argmax(dim=-1) == ids[chains, depth - 1]]
        right[chains, depth - 1] = True
    return right
