"""DFlash's training: blocks after random anchors, all their masks filled in one pass.

An anchor's block is [its token, MASK x (B - 1)]. As in drafting it sees the target's features of all positions strictly
before the anchor, and itself. The loss is the cross-entropy of each position with the true token there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from outpace.drafters.dflash.net import DFlashConfig, DFlashNet, LayerType, default_target_layer_ids
from outpace.drafters.fields import build
from outpace.drafters.kind import Training
from outpace.drafters.training.attention import ChainAttention
from outpace.drafters.training.batch import Anchors, Batch, Facts, random_anchors
from outpace.drafters.training.losses import (
    FEW_ROWS,
    GPU_SCORES,
    Compared,
    LossVocabulary,
    VocabularySettings,
    depth_weights,
    paced_weights,
    row_losses,
    summed,
)
from outpace.drafters.training.objective import Objective, initialise, layer_sizes
from outpace.drafters.training.settings import Section
from outpace.lib.errors import InvalidRequest
from outpace.models.frozen import FrozenTarget

SCALINGS = ("linear", "llama3", "yarn")
GAMMAS = ((7, 4.0), (8, 4.0), (10, 5.0), (16, 7.0))  # block sizes and their gammas (DFlash, training)
Labels = Literal["tokens", "target-softmax"]
ChainScores = Callable[[int, Tensor], Tensor]
"""(depth from 1, [R] numbers of the chains without a wrong draft so far) -> scores [R, V] of the next tokens."""


class DFlashNetSettings(Section):
    """Sizes of a new DFlash drafter; the target's where None."""

    layers: int = Field(default=5, ge=1, description="Decoder layers of the drafter.")
    block_size: int = Field(default=16, ge=2, description="Tokens of a block, the anchor included.")
    intermediate_size: int | None = Field(default=None, ge=1, description="Of each layer's MLP.")
    heads: int | None = Field(default=None, ge=1, description="Of each layer's attention.")
    kv_heads: int | None = Field(default=None, ge=1, description="Of each layer's attention.")
    head_dim: int | None = Field(default=None, ge=2, description="Of each layer's attention.")
    target_layer_ids: tuple[int, ...] | None = Field(
        default=None,
        description="Target layers, from 0, whose outputs are read; None for the authors' rule: one per layer of the "
        "drafter, fewer where the target has too few layers.",
    )
    mask_token_id: int | None = Field(
        default=None, ge=0, description="Of masks; None for an id that the data never uses."
    )
    layer_types: tuple[LayerType, ...] = Field(default=(), description="Of each layer; full attention by default.")
    sliding_window: int | None = Field(default=None, ge=1, description="Of sliding attention.")
    sliding_causal: bool = Field(default=True, description="Whether sliding attention is causal inside a block.")
    rope_theta: float | None = Field(default=None, gt=0, description="Base of the rotation.")
    max_positions: int | None = Field(default=None, ge=1, description="Longest sequence.")
    rms_eps: float | None = Field(default=None, gt=0, description="Of the norms.")


class DFlashObjectiveSettings(VocabularySettings):
    """DFlash's loss."""

    anchors: int = Field(default=512, ge=1, description="Most blocks per sequence, drawn anew in every epoch.")
    gamma: float | None = Field(
        default=None,
        gt=0,
        description="Depth k weighs exp(-(k - 1) / gamma); None for the authors' value for the block size, "
        "interpolated for others.",
    )
    labels: Labels = Field(
        default="tokens", description="tokens, as the authors; or target-softmax, the distributions they came from."
    )
    depth_weights: Literal["decay", "d-pace"] = Field(
        default="decay",
        description="decay: as gamma says; d-pace: by the tokens that a round may still gain there (D-PACE).",
    )

    @model_validator(mode="after")
    def _check_gamma(self) -> Self:
        if self.depth_weights == "d-pace" and self.gamma is not None:
            raise ValueError(f"gamma={self.gamma}: does nothing with depth_weights=d-pace; leave it out")
        return self


class DFlashObjective(Objective):
    """A DFlash drafter in training.

    Args:
        target: its embedding embeds the blocks, its LM head reads their outputs.
        vocabulary: ids that the loss compares; None for all.

    Attributes:
        net_class, config_class: of a new drafter.
        fixed: fields of its config that are no settings.
        parts: names of the losses that make up the loss and are logged too, if there are several.
    """

    net: DFlashNet
    net_class: ClassVar[type[DFlashNet]] = DFlashNet
    config_class: ClassVar[type[DFlashConfig]] = DFlashConfig
    fixed: ClassVar[Mapping[str, object]] = {}
    parts: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        net: DFlashNet,
        target: FrozenTarget,
        settings: DFlashObjectiveSettings,
        vocabulary: LossVocabulary | None = None,
    ) -> None:
        # For distributions the last tap is what the target's head reads.
        taps = (*net.config.taps, target.layers) if settings.labels == "target-softmax" else net.config.taps
        super().__init__(net, target, taps, net.config.drafts_per_block(), vocabulary)
        self.settings = settings

    @classmethod
    def new(
        cls, net: DFlashNetSettings, objective: DFlashObjectiveSettings, target: FrozenTarget, facts: Facts, seed: int
    ) -> Self:
        """A new drafter for a target, ready for training."""
        config = build(cls.config_class, {**block_fields(net, target, facts), **cls.fixed}, "net")
        made = initialise(cls.net_class(config), seed)
        cls._begin(made, target, seed)
        return cls(made.to(target.device), target, objective, LossVocabulary.chosen(objective, facts, target.device))

    @staticmethod
    def _begin(net: Any, target: FrozenTarget, seed: int) -> None:
        """Change the initial weights of a net so that its head learns from the first step."""

    def forward(self, batch: Batch, progress: float) -> Mapping[str, Tensor]:
        """As `Objective.forward`, with `parts` among what is logged."""
        anchors = random_anchors(batch, self.settings.anchors)
        if not len(anchors):
            return self._nothing("weight", *self.parts)
        rows = self._supervised(batch, anchors, self._trained)
        hidden = self._drafting(batch, anchors, self._trained)
        loss, *logged = self._sums(batch, anchors, rows, hidden, progress).unbind()
        return {"loss": loss} | {name: one.detach() for name, one in zip(("weight", *self.parts), logged, strict=True)}

    @property
    def _trained(self) -> int:
        """Number of positions of a block that are trained: all that predict a token."""
        return self.net.config.block_size - self.net.config.draft_position(1)

    def _sums(self, batch: Batch, anchors: Anchors, rows: "SupervisedRows", hidden: Tensor, progress: float) -> Tensor:
        """[2 + parts] the loss, its divisor and `parts`, of which only the loss is differentiable. `hidden`: block
        outputs [A, D, H] after anchors."""

        def losses(hidden: Tensor, truth: Tensor, cells: Tensor) -> Tensor:
            found, accepted = row_losses(rows.logits(hidden), rows.labels(truth))
            weights = rows.weigh(cells, accepted)
            return torch.stack([(found * weights).sum(), weights.sum()])

        return summed(losses, (hidden[rows.own], rows.truth, rows.cells), at_once=rows.at_once)

    @torch.no_grad()
    def hits(self, batch: Batch, anchors: Anchors) -> Tensor:
        """As `Objective.hits`; false after the first wrong draft, behind which a chain is not scored."""
        ids, own = anchors.followed(batch, self.depth)  # [A, D]
        scores, right = self._chain_scores(batch, anchors), torch.zeros_like(own)
        chains = torch.arange(len(ids), device=ids.device)
        for depth in range(self.depth):
            chains = chains[own[chains, depth]]
            if not len(chains):
                break
            chains = chains[scores(depth + 1, chains).argmax(dim=-1) == ids[chains, depth]]
            right[chains, depth] = True
        return right

    def _drafting(self, batch: Batch, anchors: Anchors, depth: int) -> Tensor:
        """Block outputs [A, depth, H] that predict the drafts after anchors."""
        first = self.net.config.draft_position(1)
        return block_outputs(self.net, self.target, batch, anchors)[:, first : first + depth]

    def _chain_scores(self, batch: Batch, anchors: Anchors) -> ChainScores:
        """The scores that `hits` reads. Heads read the true tokens."""
        hidden = self._drafting(batch, anchors, self.depth)
        return lambda depth, chains: self.scores(hidden[chains, depth - 1])

    def _supervised(self, batch: Batch, anchors: Anchors, depth: int) -> "SupervisedRows":
        """The positions of the blocks after anchors that the loss supervises. `batch`: with features; for distributions
        its last features are the inputs of the target's head."""
        compared = self.vocabulary.draw(batch.step_seed)
        ids, own = anchors.followed(batch, depth)  # [A, D]
        places, known = compared.labels(ids)
        own = own & known
        truth = places[own]
        if self.settings.labels == "target-softmax":
            before = anchors.positions[:, None] + torch.arange(depth, device=ids.device)  # of the token before each
            rows = anchors.rows[:, None].expand_as(own)
            truth = batch.features[rows[own], before[own], -self.target.hidden_size :]
        gamma = self.settings.gamma or default_gamma(self.net.config.block_size)
        decay = depth_weights(depth, gamma, ids.device) if self.settings.depth_weights == "decay" else None
        return SupervisedRows(own, truth, decay, compared, self.target)


def block_fields(net: DFlashNetSettings, target: FrozenTarget, facts: Facts) -> dict[str, object]:
    """Fields of a `DFlashConfig` from settings, and from the target where they are None."""
    # The authors' rule; in a target with few layers it can name a layer twice or one that does not exist.
    ruled = default_target_layer_ids(target.layers, net.layers)
    taps = tuple(sorted({min(max(layer, 0), target.layers - 1) for layer in ruled}))
    derived = {"target_layers": target.layers, "target_layer_ids": taps}
    values = layer_sizes(target, SCALINGS) | derived | net.model_dump(exclude_none=True)
    if net.mask_token_id is None:
        unused: list[int] = facts.unused.nonzero()[:, 0].tolist()
        if not unused:
            raise InvalidRequest("net.mask_token_id=None: the data uses every id; set net.mask_token_id to a rare one")
        values["mask_token_id"] = max(set(facts.special).intersection(unused) or unused)  # a special id, if one is free
    return values


def embedding_scale(target: FrozenTarget) -> float:
    """The factor that gives rows of a target's embedding a root mean square of 1."""
    embedded = target.embed(torch.arange(target.vocab_size, device=target.device)).float()  # [V, H]
    return 1 / float(embedded.square().mean().sqrt().clamp_min(1e-6))


def default_gamma(block_size: int) -> float:
    """The decay of weights over a block: the authors' values, linear between them and proportional beyond."""
    sizes, gammas = [size for size, _ in GAMMAS], [gamma for _, gamma in GAMMAS]
    nearest = min(max(block_size, sizes[0]), sizes[-1])
    return float(np.interp(nearest, sizes, gammas)) * block_size / nearest


def block_outputs(net: DFlashNet, target: FrozenTarget, batch: Batch, anchors: Anchors) -> Tensor:
    """Outputs [A, B, H] of the blocks [anchor, MASK, ...], each after the context that a round there would have.
    `anchors`: A > 0, each sequence's together."""
    config, weight, device = net.config, net.norm.weight, batch.ids.device
    size = config.block_size
    tokens = torch.full((len(anchors), size), config.mask_token_id, device=device)
    tokens[:, 0] = batch.ids[anchors.rows, anchors.positions]
    positions = anchors.positions[:, None] + torch.arange(size, device=device)  # [A, B]
    contexts, before = _contexts(net, batch, anchors)
    visible = {layer: _visible(config, layer).to(device) for layer in range(config.layers)}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Norm and rotation leave queries and keys in float32 under autocast; values have the dtype of attention.
        query, key, value = (rows.to(value.dtype).unflatten(0, (-1, size)) for rows in (query, key, value))
        return contexts[layer](query, key, value, visible[layer], config.window(layer)).flatten(0, 1)

    rows = net.start(target.embed(tokens).to(weight.dtype), before).flatten(0, 1)
    outputs: Tensor = net.block(rows, positions.flatten(), attend).unflatten(0, (-1, size))
    return outputs


def _contexts(net: DFlashNet, batch: Batch, anchors: Anchors) -> tuple[list[ChainAttention], Tensor]:
    """Attention of each layer over the positions strictly before the anchors, and the fused row [A, H] of the position
    before each, which only a sequence's first token does not have."""
    rows, sequences = torch.unique(anchors.rows, return_inverse=True)  # [S], [A]
    length = int(anchors.positions.max())
    width = net.fc.in_features  # features of the labels may follow those that the net reads
    features = batch.features[rows, :length, :width].flatten(0, 1).to(net.norm.weight.dtype)  # [S * length, taps * H]
    positions = torch.arange(length, device=rows.device).repeat(len(rows))
    shape, fused = (len(rows), length), net.fuse(features)
    contexts = [
        ChainAttention(key.to(value.dtype).unflatten(0, shape), value.unflatten(0, shape), sequences, anchors.positions)
        for key, value in net.context(fused, positions)
    ]
    if not length:
        return contexts, fused.new_zeros(len(anchors), fused.shape[1])
    return contexts, fused[(sequences * length + anchors.positions - 1).clamp(min=0)]


def _visible(config: DFlashConfig, layer: int) -> Tensor:
    """[B, B] bool: which rows of a block see which others."""
    places = torch.arange(config.block_size)
    visible = torch.ones(config.block_size, config.block_size, dtype=torch.bool)
    window = config.window(layer)
    if window is not None:
        visible &= places > places[:, None] - window
    return visible.tril() if config.is_causal(layer) else visible


@dataclass(frozen=True, eq=False)
class SupervisedRows:
    """The R supervised positions of a batch's blocks.

    Attributes:
        own: [A, D] bool, which positions.
        truth: true ids [R], as indices of the compared ids; or features [R, H] of the target's distributions.
        decay: [D] weights of depths; None for D-PACE's.
    """

    own: Tensor
    truth: Tensor
    decay: Tensor | None
    compared: Compared
    target: FrozenTarget

    @property
    def cells(self) -> Tensor:
        """[R] int64, where each row stands in `own`, counted block by block."""
        return self.own.flatten().nonzero()[:, 0]

    def weigh(self, cells: Tensor, accepted: Tensor) -> Tensor:
        """Weights [R] of whole blocks. `cells`, `accepted`: as of `paced_weights`."""
        depth = self.own.shape[1]
        return paced_weights(cells, accepted, depth) if self.decay is None else self.decay[cells % depth]

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's head on outputs [R, H]: [R, K] in float32 at least."""
        logits = self.target.logits(hidden, self.compared.ids)
        return self.compared.shifted(logits.to(torch.promote_types(logits.dtype, torch.float32)))

    @torch.no_grad()
    def labels(self, truth: Tensor) -> Tensor:
        """Labels of the cross-entropy for a piece of `truth`."""
        return self.logits(truth).softmax(dim=-1) if truth.is_floating_point() else truth

    @property
    def at_once(self) -> list[int]:
        """How many rows to score at a time: whole blocks, of about `FEW_ROWS` rows, or `GPU_SCORES` scores on a GPU."""
        ids = self.target.vocab_size if self.compared.ids is None else len(self.compared.ids)
        most = FEW_ROWS if self.own.device.type == "cpu" else GPU_SCORES // ids
        return [int(blocks.sum()) for blocks in self.own.split(max(1, most // self.own.shape[1]))]


TRAINING = Training(DFlashNetSettings, DFlashObjectiveSettings, DFlashObjective.new)
