"""What EAGLE-3 and DART share: a drafter of one layer on target features.

The layer's queries, keys and values are made of two rows side by side, the embedding of a token and a feature of the
target, each normed by itself (EAGLE-3, arXiv 2503.01840, section 3.1).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.drafters.fields import SIZES, Fields, check_activation, flag
from outpace.drafters.layers import LayerConfig, Projections, Rotary, Size
from outpace.lib.errors import ModelError
from outpace.models.plain_decoder import PlainMLP, RMSNorm


def usual_taps(target_layers: int) -> tuple[int, int, int]:
    """Indices into `hidden_states` of the three features that EAGLE-3 reads where a file does not name others."""
    return 2, target_layers // 2, target_layers - 3


class FusionConfig(LayerConfig):
    """Sizes of a one-layer drafter on target features.

    Attributes:
        layers: 1; published drafters of this kind have one.
        taps: indices into transformers' `hidden_states`, in the order in which features are joined; None for the usual
            three, which depend on the target (`taps_of`).
        own_embedding: whether the file brings an embedding; otherwise it is the target's.
        own_head: whether the file brings a head; otherwise it is the target's.
    """

    layers: int = 1
    rms_eps: float = Field(gt=0)
    draft_vocab_size: Size
    taps: tuple[int, ...] | None = None
    bias: bool = False
    qk_norm: bool = False
    own_embedding: bool = False
    own_head: bool = True

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.layers != 1:
            yield f"layers={self.layers} is not supported; a drafter of this kind has one layer"
        if self.draft_vocab_size > self.vocab_size:
            yield f"draft_vocab_size={self.draft_vocab_size} exceeds vocab_size={self.vocab_size}"
        if self.taps is not None and (not self.taps or min(self.taps) < 0):
            yield f"taps={self.taps} must be one or more indices from 0 on"
        if not self.own_head and self.draft_vocab_size != self.vocab_size:
            yield (
                f"draft_vocab_size={self.draft_vocab_size} needs a head of its own: the target's has "
                f"vocab_size={self.vocab_size} rows"
            )
        if self.hidden_size != self.target_hidden_size and not (self.own_embedding and self.own_head):
            yield (
                f"hidden_size={self.hidden_size} differs from target_hidden_size={self.target_hidden_size}, so the "
                "target's embedding and head do not fit; the file must bring its own"
            )

    @property
    def tap_count(self) -> int:
        """Features that are joined."""
        return 3 if self.taps is None else len(self.taps)

    @property
    def joined_size(self) -> int:
        """Columns of the joined features."""
        return self.tap_count * self.target_hidden_size

    def taps_of(self, target_layers: int) -> tuple[int, ...]:
        """Indices into `hidden_states` of a target with this many layers. The last index is left out: transformers puts
        the output of the final norm there, not that of the last layer."""
        taps = self.taps or usual_taps(target_layers)
        if not all(0 <= tap < target_layers for tap in taps):
            raise ModelError(
                f"taps {taps} do not fit a target of {target_layers} layers: 0 to {target_layers - 1} exist"
            )
        return taps


class FusionLayer(nn.Module):
    """One decoder layer whose attention reads embedding and feature side by side."""

    def __init__(self, config: FusionConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn = Projections(
            2 * size,
            size,
            config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=eps if config.qk_norm else None,
            bias=config.bias,
        )
        self.mlp = PlainMLP(size, config.intermediate_size)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling, config.max_positions)

    def pair(self, embeddings: Tensor, normed: Tensor) -> Tensor:
        """Rows [T, 2H] of embeddings [T, H] and normed features [T, H], the embedding first."""
        return torch.cat((self.input_layernorm(embeddings), normed), dim=-1)

    def finish(self, rows: Tensor) -> Tensor:
        """Rows [T, H] after attention, with what the MLP adds."""
        out: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return out


class FusionNet(nn.Module):
    """Features fused into states, one layer, and a head over a reduced vocabulary."""

    def __init__(self, config: FusionConfig, layer: FusionLayer) -> None:
        super().__init__()
        self.config: Any = config
        size = config.hidden_size
        self.fc = nn.Linear(config.joined_size, size, bias=False)
        self.midlayer = layer
        self.norm = RMSNorm(size, config.rms_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False) if config.own_head else None
        self.d2t: Tensor | None
        reduced = config.draft_vocab_size < config.vocab_size
        self.register_buffer("d2t", torch.full((config.draft_vocab_size,), -1) if reduced else None)

    def fuse(self, features: Tensor) -> Tensor:
        """One state [T, H] per row of the target's joined features [T, taps * Ht], in the order of the taps."""
        fused: Tensor = self.fc(features)
        return fused

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, Vd] of hidden rows [N, H] by the drafter's own head."""
        if self.lm_head is None:
            raise ModelError("own_head=False: this drafter has no head; score its hidden rows with the target's")
        out: Tensor = self.lm_head(hidden)
        return out

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of draft ids, of the same shape."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


def read_sizes(fields: Fields, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The sizes of a one-layer drafter, by our names, `head_dim` checked against the weights."""
    heads, width = fields.count("num_attention_heads"), fields.count("hidden_size")
    usual = {"num_key_value_heads": heads, "head_dim": width // heads}
    found: dict[str, Any] = {
        ours: fields.count(theirs, usual.get(theirs)) for ours, theirs in SIZES.items() if ours != "rms_eps"
    }
    rows, query = heads * found["head_dim"], tensors.get("midlayer.self_attn.q_proj.weight")
    if query is not None and query.dim() == 2 and query.shape[0] != rows:
        source = "hidden_size / num_attention_heads" if fields.get("head_dim") is None else "head_dim"
        raise ModelError(
            f"{fields.where}: {source} is {found['head_dim']}, so {heads} heads have {rows} rows, but q_proj has "
            f"{query.shape[0]}; if the weights are right, it should state head_dim={query.shape[0] // heads}"
        )
    check_activation(fields)
    if fields.get("mlp_bias"):
        raise ModelError(f"{fields.where}: mlp_bias=true is not supported")
    if fields.get("use_sliding_window") or set(fields.words("layer_types")) - {"full_attention"}:
        raise ModelError(f"{fields.where}: sliding windows are not supported: {fields.get('layer_types')}")
    return found | {"rms_eps": fields.need("rms_norm_eps"), "bias": bool(flag("attention_bias", fields))}


def check_features(taps: tuple[int, ...] | None, width: int, tensors: Mapping[str, Tensor], where: str) -> None:
    """Check the number of features against the columns of `fc`."""
    count, fc = 3 if taps is None else len(taps), tensors.get("fc.weight")
    if fc is not None and fc.dim() == 2 and fc.shape[1] != count * width:
        stated = "no layer ids are stated, which means 3 features" if taps is None else f"the layer ids are {taps}"
        raise ModelError(
            f"{where}: fc has {fc.shape[1]} columns, but {stated} of target_hidden_size={width}: {count * width}"
        )


def check_offsets(d2t: Tensor, t2d: Tensor | None, draft_size: int, size: int, name: str) -> None:
    """Check that offsets name different target ids, in ascending order, inside the vocabulary. `d2t`: offsets, int64
    [draft_size]. `t2d`: which target ids are in the draft vocabulary, bool [size]; None if the file has none."""
    if d2t.dtype != torch.int64 or d2t.shape != (draft_size,):
        raise ModelError(
            f"{name}: d2t is {d2t.dtype} {list(d2t.shape)}; draft_vocab_size={draft_size} asks for int64 [{draft_size}]"
        )
    ids = d2t + torch.arange(draft_size)  # [draft_size]
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise ModelError(f"{name}: d2t leads to target ids {low} to {high}, outside vocab_size={size}")
    wrong = torch.nonzero(ids[1:] <= ids[:-1]).flatten()
    if wrong.numel():
        at = int(wrong[0])
        raise ModelError(
            f"{name}: d2t must lead to ascending target ids, each once, but draft ids {at} and {at + 1} lead to "
            f"{int(ids[at])} and {int(ids[at + 1])}; is it a list of ids instead of offsets?"
        )
    if t2d is None:
        return
    if t2d.dtype != torch.bool or t2d.shape != (size,):
        raise ModelError(f"{name}: t2d is {t2d.dtype} {list(t2d.shape)}; vocab_size={size} asks for bool [{size}]")
    if not torch.equal(t2d, membership(d2t, size)):
        raise ModelError(f"{name}: t2d and d2t disagree on which target ids are in the draft vocabulary")


def membership(d2t: Tensor, size: int) -> Tensor:
    """t2d, bool [size]: which target ids are in the draft vocabulary, from offsets d2t [draft_size]."""
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    return torch.zeros(size, dtype=torch.bool, device=d2t.device).index_fill(0, ids, True)
