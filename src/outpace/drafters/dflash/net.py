"""DFlash: a drafter that fills a block of masks in one pass, reading the target's own hidden states as context.

A committed position is known to the drafter by features tapped from several target layers. Each drafter layer turns
them into keys and values once; the block of [last committed token, MASK, MASK, ...] attends to those and to itself,
and the target's LM head reads its outputs.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from outpace.drafters.layers import Attend, LayerConfig, Layers, Projections, Rotary, fill_with_nan
from outpace.lib.errors import ModelError
from outpace.models.plain_decoder import PlainMLP, RMSNorm

LayerType = Literal["full_attention", "sliding_attention"]


class DFlashConfig(LayerConfig):
    """Sizes and conventions of a DFlash drafter.

    Attributes:
        target_hidden_size: must be `hidden_size`: the target's embedding feeds the block, and its LM head reads it.
        target_layers: decoder layers of the target; None where a checkpoint leaves it out.
        mask_token_id: of the token that stands for positions to be drafted.
        target_layer_ids: target layers, counted from 0, whose OUTPUTS are tapped, in the order of fc's columns.
        layer_types: "full_attention" or "sliding_attention" for each layer; empty for full attention everywhere.
        sliding_window: positions that a row of a sliding layer sees, its own included.
        sliding_causal: whether sliding layers are causal inside the block; full layers never are.

    Raises:
        ValidationError: a value out of range, or two fields that contradict each other, both named.
    """

    layers: Layers
    rms_eps: float = Field(default=1e-6, gt=0)
    target_layers: int | None = Field(default=None, ge=1)
    block_size: int = Field(ge=2, le=1024)
    mask_token_id: int = Field(ge=0)
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    layer_types: tuple[LayerType, ...] = ()
    sliding_window: int | None = Field(default=None, ge=1)
    sliding_causal: bool = True
    attention_bias: bool = False

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.target_hidden_size != self.hidden_size:
            yield (
                f"target_hidden_size={self.target_hidden_size} is not hidden_size={self.hidden_size}, "
                "though the block is made of the target's embeddings and read by its LM head"
            )
        if self.mask_token_id >= self.vocab_size:
            yield f"mask_token_id={self.mask_token_id} is outside vocab_size={self.vocab_size}"
        ids, limit = self.target_layer_ids, self.target_layers
        if min(ids) < 0 or (limit is not None and max(ids) >= limit):
            yield f"target_layer_ids={list(ids)} reach outside target_layers={limit}, counted from 0"
        if len(set(ids)) < len(ids):
            yield f"target_layer_ids={list(ids)} names a layer twice"
        if self.layer_types and len(self.layer_types) != self.layers:
            yield f"layer_types has {len(self.layer_types)} entries for layers={self.layers}"
        if ("sliding_attention" in self.layer_types) != (self.sliding_window is not None):
            yield f"sliding_window={self.sliding_window} does not go with layer_types={list(self.layer_types)}"

    @property
    def taps(self) -> tuple[int, ...]:
        """Indices into Hugging Face's `hidden_states`, whose entry 0 is the embedding: a layer's output is id + 1."""
        return tuple(layer + 1 for layer in self.target_layer_ids)

    def is_causal(self, layer: int) -> bool:
        """Whether a row of the block sees only itself and earlier rows of the block in this layer."""
        return self.window(layer) is not None and self.sliding_causal

    def window(self, layer: int) -> int | None:
        """Positions that a row sees in this layer: keys beyond own position - window; None for all."""
        sliding = bool(self.layer_types) and self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None

    def draft_position(self, depth: int) -> int:
        """The block position whose output predicts the drafted token of a depth, counted from 1: that token's own. 0 is
        the anchor, the last committed token."""
        return depth

    def drafts_per_block(self) -> int:
        """Number of tokens that a block drafts: one for each position from the first draft's on."""
        return self.block_size - self.draft_position(1)

    def check_target(self, hidden_size: int, layers: int, vocab_size: int) -> None:
        """Refuse a target that this drafter was not made for.

        Raises:
            ModelError: naming the field and both values.
        """
        if hidden_size != self.target_hidden_size:
            raise ModelError(f"target_hidden_size={self.target_hidden_size}: the target's hidden size is {hidden_size}")
        if max(self.target_layer_ids) >= layers or self.target_layers not in (None, layers):
            ids = list(self.target_layer_ids)
            raise ModelError(
                f"target_layer_ids={ids}, target_layers={self.target_layers}: the target has {layers} layers"
            )
        if vocab_size != self.vocab_size:
            raise ModelError(f"vocab_size={self.vocab_size}: the target's vocabulary has {vocab_size} ids")


def default_target_layer_ids(target_layers: int, taps: int) -> tuple[int, ...]:
    """The authors' rule for which layers to tap: the middle one, or several evenly from 1 to target_layers - 3. `taps`:
    how many."""
    if taps == 1:
        return (target_layers // 2,)
    return tuple(round(1 + index * (target_layers - 4) / (taps - 1)) for index in range(taps))


class DFlashLayer(nn.Module):
    """One pre-norm decoder layer with query and key norms."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_eps
        self.input_layernorm = RMSNorm(size, eps)
        heads = (config.heads, config.kv_heads, config.head_dim)
        self.self_attn = Projections(size, size, *heads, eps, config.attention_bias)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = PlainMLP(size, config.intermediate_size)

    def forward(self, hidden: Tensor, positions: Tensor, rotary: Rotary, attend: Attend, layer: int) -> Tensor:
        """Rows [T, H] after the layer; `layer` is its number."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), positions, rotary, attend, layer)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class DFlashNet(nn.Module):
    """The drafter's layers. The target's embedding and LM head stay the target's. Parameters are NaN until they are
    filled."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(size, eps)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling, config.max_positions)
        fill_with_nan(self)

    def each_layer(self) -> Iterator[tuple[int, DFlashLayer]]:
        """Each layer with its number, from 0."""
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DFlashLayer)
            yield index, layer

    def fuse(self, features: Tensor) -> Tensor:
        """Committed positions as normed rows [T, H], which pass no `input_layernorm`: all layers project the same ones
        (DFlash, target context). `features`: [T, taps * target_hidden_size], the target's hidden states at
        `config.taps`, concatenated."""
        rows: Tensor = self.hidden_norm(self.fc(features))
        return rows

    def context(self, fused: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [T, kv_heads, D] of each layer for committed positions [T], the same for every later block.
        `fused`: as `fuse` makes them."""
        return [layer.self_attn.keys_values(fused, positions, self.rotary) for _, layer in self.each_layer()]

    def start(self, embeddings: Tensor, before: Tensor) -> Tensor:
        """The rows [A, B, H] that blocks start from: for DFlash the embeddings alone.

        Args:
            embeddings: [A, B, H], the target's, of anchors and masks.
            before: [A, H] the fused row of the position before each anchor; zeros where it is not known.
        """
        del before
        return embeddings

    def block(self, embeddings: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Outputs of block rows, for the target's LM head. Rows of several blocks may be packed.

        Args:
            embeddings: [T, H], from `start`.
            positions: [T], absolute, the anchor's first.
            attend: gets queries, keys and values of these rows and adds those of the context. A row sees all context
                before its anchor and all rows of its block, later ones too; `config.window` and `config.is_causal`
                describe layers that differ.

        Returns:
            [T, H], normed.
        """
        hidden = embeddings
        for index, layer in self.each_layer():
            hidden = layer(hidden, positions, self.rotary, attend, index)
        outputs: Tensor = self.norm(hidden)
        return outputs
