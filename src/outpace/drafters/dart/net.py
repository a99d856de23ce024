"""DART: logits of all depths from one pass over a row of mask vectors (arXiv 2601.19278).

The layer is EAGLE-3's. Behind the last pair of (token, feature) come `draft_length` mask rows at the positions that
follow, each causal; the last real row predicts the first drafted token, mask row j the token after it. What the paper
leaves open is taken from the authors' decoder: a mask row skips both norms, its residual is the first half of the mask
vector, and the final norm is applied twice before the head.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.drafters.fusion import FusionConfig, FusionLayer, FusionNet
from outpace.drafters.layers import Attend, fill_with_nan


class DartConfig(FusionConfig):
    """Sizes of a DART drafter. `draft_length`: mask rows after the last token; one more token than that is drafted."""

    draft_length: int = Field(ge=1, le=1024)


class DartLayer(FusionLayer):
    """EAGLE-3's layer with the mask vector [2H] among its weights."""

    def __init__(self, config: DartConfig) -> None:
        super().__init__(config)
        self.mask_rep = nn.Parameter(torch.empty(2 * config.hidden_size))


class DartNet(FusionNet):
    """A DART drafter without the target's embedding, which is handed in. Weights are NaN until they are filled."""

    config: DartConfig
    midlayer: DartLayer
    lm_head: nn.Linear

    def __init__(self, config: DartConfig) -> None:
        super().__init__(config, DartLayer(config))
        fill_with_nan(self)

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        positions: Tensor,
        mask_positions: Tensor,
        wanted: Tensor,
        attend: Attend,
    ) -> Tensor:
        """One pass over packed rows: the T real ones, then M mask rows.

        Args:
            embeddings: of the tokens after the features, [T, H].
            states: features from `fuse`, [T, H].
            positions: of the real rows, [T].
            mask_positions: of the mask rows, [M]; those of one request follow its last real row.
            wanted: which of the T + M rows are read, [N]: the last real row of each request and its mask rows.
            attend: attention over the T + M rows and whatever came before them; mask rows are causal too. Keys and
                values of mask rows are to be forgotten.

        Returns:
            What `logits` takes, [N, H].
        """
        layer, masks = self.midlayer, len(mask_positions)
        pairs = layer.pair(embeddings, layer.hidden_norm(states))
        pairs = torch.cat((pairs, layer.mask_rep.expand(masks, -1)))  # [T + M, 2H]
        mask = layer.mask_rep[: self.config.hidden_size]
        residual = torch.cat((states, mask.expand(masks, -1)))  # [T + M, H]
        mixed = residual + layer.self_attn(pairs, torch.cat((positions, mask_positions)), layer.rotary, attend)
        hidden: Tensor = self.norm(self.norm(layer.finish(mixed[wanted])))
        return hidden
