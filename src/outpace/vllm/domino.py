"""Domino inside vLLM's `method="dflash"`: one model class, and no other change to vLLM.

vLLM's proposer runs one pass over [anchor, MASK x K] for each request, hands the outputs of the K masks to
`compute_logits` and drafts the best ids. This class corrects the logits on the way, token by token. The paged cache,
batches, tensor and data parallelism and compilation are vLLM's.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.platforms import current_platform

from outpace.drafters.domino.files import HEAD, IDS, read_domino
from outpace.drafters.domino.net import DominoHead
from outpace.lib.checkpoint import Checkpoint
from outpace.vllm.corrections import corrected_chain
from outpace.vllm.drafter import check_use, is_domino, read_drafter


class DominoForCausalLM(DFlashQwen3ForCausalLM):  # type: ignore[misc]
    """vLLM's DFlash drafter with Domino's head; for any other checkpoint an instance of vLLM's own class.

    Raises:
        ModelError: a checkpoint that does not fit its config, or a drafter for another target.
        InvalidRequest: more drafts than the drafter has, or a variable number of drafts.
    """

    def __new__(cls, *, vllm_config: Any, prefix: str = "") -> Any:
        if not is_domino(vllm_config.speculative_config.draft_model_config.hf_config):
            return DFlashQwen3ForCausalLM(vllm_config=vllm_config, prefix=prefix)
        return super().__new__(cls)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        speculation = vllm_config.speculative_config
        drafter = read_drafter(str(speculation.draft_model_config.model), speculation.draft_model_config.revision)
        check_use(drafter, vllm_config.model_config, speculation)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.drafter, self.drafts = drafter, int(speculation.num_speculative_tokens)
        ids, rank = drafter.ids, drafter.config.emb_dim
        self.register_buffer("ids", ids.to(self.model.norm.weight.device) if ids is not None else None, False)
        self.head = DominoHead(drafter.config)
        if ids is not None:  # only these ids are drafted and corrected
            self.head.embed_proj[2] = nn.Linear(rank, len(ids), bias=False)
        if current_platform.is_cpu():
            self.model._normalize_context_k = partial(_normed_by_layer, self.model)
        self._anchors: Tensor | None = None
        self._rows: Tensor | None = None

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """Outputs [T, H] of the blocks; vLLM reads its k-th draft from row k of a block."""
        self._anchors = input_ids
        if self.ids is not None and self._rows is None and self._has_plain_head():
            self._rows = _rows_of(self.lm_head, self.ids)  # in the first pass, which is not recorded in a graph
        hidden: Tensor = super().forward(input_ids, positions, inputs_embeds)
        # With shifted labels the row before predicts a draft.
        return hidden.roll(1, dims=0) if self.drafter.config.shift_label else hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Corrected logits [B * K, V] of drafts with outputs [B * K, H]; -inf for ids that are never drafted."""
        assert self._anchors is not None
        count = hidden_states.shape[0] // self.drafts
        hidden = hidden_states.view(count, self.drafts, -1)  # [B, K, H]
        anchors = self._anchors[: count * (1 + self.drafts) : 1 + self.drafts]  # [B]
        base = self._base_logits(hidden_states).view(count, self.drafts, -1)
        embed = self.model.embed_tokens
        logits = corrected_chain(self.head, base, hidden, anchors, embed, self.ids).flatten(0, 1)
        if self.ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self.drafter.config.vocab_size), -torch.inf)
        whole[:, self.ids] = logits
        return whole

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """The best ids [B * K]; vLLM's shortcut would bypass the head."""
        return self.compute_logits(hidden_states).argmax(dim=-1)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take a checkpoint's tensors."""
        tensors = dict(weights)
        head = read_domino(Checkpoint(self.drafter.name, self.drafter.values, tensors)).head.state_dict()
        if self.ids is not None:
            head["embed_proj.2.weight"] = head["embed_proj.2.weight"][self.ids.cpu()]
        self.head.load_state_dict(head)
        super().load_weights((name, one) for name, one in tensors.items() if name != IDS and not _of_head(name))

    def _base_logits(self, hidden: Tensor) -> Tensor:
        """[N, Vd] logits of the target's LM head for [N, H], only for `ids` if there are any."""
        if self.ids is None:
            whole: Tensor = self.logits_processor(self.lm_head, hidden)
            return whole
        if self._rows is not None:
            return nn.functional.linear(hidden, self._rows)
        part: Tensor = self.logits_processor(self.lm_head, hidden)[:, self.ids]
        return part

    def _has_plain_head(self) -> bool:
        """Whether scores are products with rows of a weight and nothing else."""
        head, processor = self.lm_head, self.logits_processor
        if not isinstance(head.quant_method, UnquantizedEmbeddingMethod) or getattr(head, "bias", None) is not None:
            return False
        is_scaled = processor.scale != 1.0 or processor.soft_cap is not None
        return not is_scaled and processor.head_dtype in (None, head.weight.dtype)


def _normed_by_layer(model: Any, keys: Tensor) -> Tensor:
    """Keys [L, T, heads, D] of the context, each layer's normalised by its own norm.

    vLLM calls one kernel for all layers; the CPU's applies the first layer's weight to each.
    """
    normed = nn.functional.rms_norm(keys, keys.shape[-1:], eps=model._rms_norm_eps)
    weights: Tensor = model._k_norm_weights  # [L, D]
    return normed * weights[:, None, None]


def _of_head(name: str) -> bool:
    return any(part in name for part in HEAD)


def _rows_of(head: Any, ids: Tensor) -> Tensor:
    """Rows [K, H] of an LM head that is sharded over workers, complete on each of them."""
    shard = head.shard_indices
    own = (ids >= shard.org_vocab_start_index) & (ids < shard.org_vocab_end_index)  # [K]
    local = (ids - shard.org_vocab_start_index).clamp(0, head.weight.shape[0] - 1)
    rows = head.weight[local] * own[:, None]
    summed: Tensor = tensor_model_parallel_all_reduce(rows)
    return summed
