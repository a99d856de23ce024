"""Domino inside vLLM's `method="dflash"`: a model class, and nothing else of vLLM's is changed.

vLLM's proposer runs one pass over [anchor, MASK x K] for each request, hands the outputs of the K masks to
`compute_logits` and drafts the best ids. This class corrects the logits on the way, token by token. The paged cache,
batches, tensor and data parallelism and compilation are vLLM's.
"""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.platforms import current_platform

from outpace.core.errors import InvalidRequest, ModelError
from outpace.nets.checkpoint import Checkpoint
from outpace.nets.domino import DominoConfig, DominoHead
from outpace.nets.layouts.domino import DOMINO_ARCHITECTURE, HEAD, PROJECTOR, read_domino, read_domino_config
from outpace.nets.layouts.ranked_rows import IDS
from outpace.sources.frequency import FILE_NAME, load_vocabulary
from outpace.vllm.corrections import corrected_chain


class DominoForCausalLM(DFlashQwen3ForCausalLM):  # type: ignore[misc]
    """vLLM's DFlash drafter with Domino's head; of any other checkpoint, an instance of vLLM's own class.

    Args:
        vllm_config: vLLM's, its draft model a Domino drafter.
        prefix: of parameter names.

    Raises:
        ModelError: a checkpoint that does not fit its config, or a drafter for another target.
        InvalidRequest: more drafts than the drafter has, or a number that varies.
    """

    def __new__(cls, *, vllm_config: Any, prefix: str = "") -> Any:
        if not is_domino(vllm_config.speculative_config.draft_model_config.hf_config):
            return DFlashQwen3ForCausalLM(vllm_config=vllm_config, prefix=prefix)
        return super().__new__(cls)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        drafter = vllm_config.speculative_config.draft_model_config
        config, fields = _read_config(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.domino, self.fields, self.source = config, fields, str(drafter.model)
        self.drafts = int(vllm_config.speculative_config.num_speculative_tokens)
        ids = _read_vocabulary(self.source, drafter.revision, config.vocab_size)
        self.register_buffer("ids", ids.to(self.model.norm.weight.device) if ids is not None else None, False)
        self.head = DominoHead(config)
        if ids is not None:  # no other id is drafted, so no other needs a correction
            self.head.embed_proj[2] = nn.Linear(config.emb_dim, len(ids), bias=False)
        if current_platform.is_cpu():
            self.model._normalize_context_k = partial(_normed_by_layer, self.model)
        self._anchors: Tensor | None = None
        self._rows: Tensor | None = None

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """Outputs [T, H] of the blocks; row k of a block is where vLLM looks for its k-th draft."""
        self._anchors = input_ids
        hidden: Tensor = super().forward(input_ids, positions, inputs_embeds)
        # With shifted labels the row before predicts it.
        return hidden.roll(1, dims=0) if self.domino.shift_label else hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Corrected logits [B * K, V] of the drafts whose outputs are [B * K, H]; ids never drafted have -inf."""
        assert self._anchors is not None
        count = hidden_states.shape[0] // self.drafts
        hidden = hidden_states.view(count, self.drafts, -1)  # [B, K, H]
        anchors = self._anchors[: count * (1 + self.drafts) : 1 + self.drafts]  # [B]
        base = self._base_logits(hidden_states).view(count, self.drafts, -1)
        embed = self.model.embed_tokens
        logits = corrected_chain(self.domino, self.head, base, hidden, anchors, embed, self.ids).flatten(0, 1)
        if self.ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self.domino.vocab_size), -torch.inf)
        whole[:, self.ids] = logits
        return whole

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """The best ids [B * K]; vLLM's own short cut to them would pass the head by."""
        return self.compute_logits(hidden_states).argmax(dim=-1)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take a checkpoint's tensors.

        Raises:
            ModelError: one is missing, left over, of another shape or no number; all of them are named.
        """
        tensors = dict(weights)
        head = read_domino(Checkpoint(self.source, self.fields, tensors)).head.state_dict()
        if self.ids is not None:
            head["embed_proj.2.weight"] = head["embed_proj.2.weight"][self.ids.cpu()]
        self.head.load_state_dict(head)
        super().load_weights((name, one) for name, one in tensors.items() if name != IDS and not _of_head(name))

    def _base_logits(self, hidden: Tensor) -> Tensor:
        """[N, Vd] by the target's LM head of [N, H], for `ids` alone if there are any."""
        if self.ids is None:
            whole: Tensor = self.logits_processor(self.lm_head, hidden)
            return whole
        if self._rows is None and self._has_plain_head():
            self._rows = _rows_of(self.lm_head, self.ids)
        if self._rows is None:
            part: Tensor = self.logits_processor(self.lm_head, hidden)[:, self.ids]
            return part
        return nn.functional.linear(hidden, self._rows)

    def _has_plain_head(self) -> bool:
        """Whether scores are products with rows of a weight and nothing else."""
        head, processor = self.lm_head, self.logits_processor
        is_plain = isinstance(head.quant_method, UnquantizedEmbeddingMethod) and getattr(head, "bias", None) is None
        return (
            is_plain
            and processor.scale == 1.0
            and processor.soft_cap is None
            and processor.head_dtype
            in (
                None,
                head.weight.dtype,
            )
        )


def is_domino(hf_config: Any) -> bool:
    """Whether vLLM's config of a draft model is that of a Domino drafter."""
    inner = getattr(hf_config, "dflash_config", None) or {}
    projector = inner.get("projector_type") or getattr(hf_config, "projector_type", None)
    named = getattr(hf_config, "architectures", None) or []
    return projector == PROJECTOR or any(name.endswith(DOMINO_ARCHITECTURE) for name in named)


def _normed_by_layer(model: Any, keys: Tensor) -> Tensor:
    """Keys [L, T, heads, D] of the context by the norm of their own layer.

    vLLM asks one kernel for all layers, and the one for CPUs takes the first layer's weight for each.
    """
    normed = nn.functional.rms_norm(keys, keys.shape[-1:], eps=model._rms_norm_eps)
    weights: Tensor = model._k_norm_weights  # [L, D]
    return normed * weights[:, None, None]


def _of_head(name: str) -> bool:
    return any(part in name for part in HEAD)


def _read_config(vllm_config: Any) -> tuple[DominoConfig, dict[str, Any]]:
    """The drafter's config, and config.json, checked against the target and what was asked for."""
    speculation, target = vllm_config.speculative_config, vllm_config.model_config
    name = str(speculation.draft_model_config.model)
    path = _file(name, speculation.draft_model_config.revision, "config.json")
    if path is None:
        raise ModelError(f"{name}: no config.json there; give the folder or hub id of a drafter")
    fields = json.loads(path.read_text(encoding="utf-8"))
    config = read_domino_config(fields, name)
    config.check_target(target.get_hidden_size(), target.get_total_num_hidden_layers(), target.get_vocab_size())
    most, asked = config.drafts_per_block(), speculation.num_speculative_tokens
    if asked > most:
        raise InvalidRequest(f"num_speculative_tokens={asked}: {name} drafts at most {most}; ask for no more")
    if speculation.num_speculative_tokens_per_batch_size is not None:
        raise InvalidRequest(
            "num_speculative_tokens_per_batch_size: Domino drafts the same number for every batch; leave it out"
        )
    return config, fields


def _read_vocabulary(name: str, revision: str | None, vocab_size: int) -> Tensor | None:
    """The ids that the drafter was trained to draft, [K], if its folder says."""
    path = _file(name, revision, FILE_NAME)
    return None if path is None else load_vocabulary(path, vocab_size)


def _file(name: str, revision: str | None, file: str) -> Path | None:
    """A file of a folder or of a repository on the hub; None where there is none."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except (EntryNotFoundError, LocalEntryNotFoundError):
        return None


def _rows_of(head: Any, ids: Tensor) -> Tensor:
    """Rows [K, H] of an LM head whose rows are spread over workers, on each of them."""
    shard = head.shard_indices
    own = (ids >= shard.org_vocab_start_index) & (ids < shard.org_vocab_end_index)  # [K]
    local = (ids - shard.org_vocab_start_index).clamp(0, head.weight.shape[0] - 1)
    rows = head.weight[local] * own[:, None]
    summed: Tensor = tensor_model_parallel_all_reduce(rows)
    return summed
