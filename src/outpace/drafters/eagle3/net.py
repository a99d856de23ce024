"""EAGLE-3: one decoder layer that extends the target's features token by token (arXiv 2503.01840).

The feature at position t is paired with the embedding of token t + 1; the pair (feature 0, token 1) has position 0.
For committed tokens the feature is `fuse` of the target's hidden states; for drafted tokens it is the drafter's own
previous output, without `fuse`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from outpace.drafters.fusion import FusionConfig, FusionLayer, FusionNet
from outpace.drafters.layers import Attend, fill_with_nan
from outpace.models.plain_decoder import RMSNorm

# Variants for which only the layout of speculators has fields.
OF_SPECULATORS = ("norm_before_residual", "norm_before_fc", "norm_output", "qk_norm")


class Eagle3Config(FusionConfig):
    """Sizes and variants of an EAGLE-3 drafter.

    Attributes:
        norm_before_residual: the residual is the normed feature, not the feature itself.
        norm_output: the state handed to the next step is the one after the final norm (vLLM's and SGLang's meaning;
            SpecForge uses the same word for the norm before the head, which every drafter here has).
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class Eagle3Net(FusionNet):
    """An EAGLE-3 drafter. Where it has no embedding or head of its own, the target's serve. Weights are NaN until they
    are filled."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, FusionLayer(config))
        size, taps, eps = config.target_hidden_size, config.tap_count, config.rms_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None
        self.input_norm = RMSNorm(config.joined_size, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(taps)) if config.fc_norm else None
        fill_with_nan(self)

    def embed(self, ids: Tensor, embedding: Callable[[Tensor], Tensor]) -> Tensor:
        """Embeddings [T, H] of target ids [T], by the drafter's own embedding if it has one, else by the target's."""
        return (self.embed_tokens or embedding)(ids)

    def fuse(self, features: Tensor) -> Tensor:
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            chunks = features.chunk(self.config.tap_count, dim=-1)  # taps x [T, Ht]
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return super().fuse(features)

    def forward(self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One pass over packed rows.

        Args:
            embeddings: of the tokens after the features, [T, H].
            states: features, [T, H]: from `fuse`, or what the previous pass returned.
            positions: of the pairs, [T].

        Returns:
            The states of the next step [T, H], and what `logits` takes [T, H].
        """
        layer = self.midlayer
        normed = layer.hidden_norm(states)
        residual = normed if self.config.norm_before_residual else states
        mixed = residual + layer.self_attn(layer.pair(embeddings, normed), positions, layer.rotary, attend)
        out = layer.finish(mixed)
        hidden = self.norm(out)
        return (hidden if self.config.norm_output else out), hidden
