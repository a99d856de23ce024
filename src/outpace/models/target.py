"""The target: an unmodified transformers model, run on packed trees over slot KV."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.cache.slots import PassCache, Segment, SlotKV
from outpace.core.protocols import Chunk, ChunkOutput, NodeOutputs
from outpace.core.tree import DraftTree, Topology
from outpace.models.experts import pack_experts
from outpace.models.families import logit_softcap
from outpace.models.head import LmHead
from outpace.models.linear import can_pack, pack_linears
from outpace.models.norm import fuse_norms

MAX_TREE_NODES = 512


class TransformersTarget:
    """Runs trees and prompt chunks of many requests in one packed pass [1, T].

    Args:
        model: a causal LM whose attention implementation is `models.attention.ATTENTION_NAME`, checked by
            `models.families`. Its linear layers are replaced by packed ones where the CPU has them.
        max_length: tokens of one request, prompt and answer together.
        max_slots: requests at a time.
        eos_token_ids: ids that end a request by default.
    """

    def __init__(self, model: PreTrainedModel, max_length: int, max_slots: int, eos_token_ids: tuple[int, ...]) -> None:
        config = model.config.get_text_config()
        self.max_length, self.max_slots, self.eos_token_ids = max_length, max_slots, eos_token_ids
        self.device, self.dtype = model.device, model.dtype
        self._decoder = model.get_decoder()
        self._head = LmHead(model.get_output_embeddings(), logit_softcap(model.config))
        self.vocab_size = self._head.vocab_size
        if can_pack(self.dtype, self.device):
            pack_experts(self._decoder)
            pack_linears(self._decoder)
            fuse_norms(self._decoder)
        elif self.dtype == torch.float64:
            model.set_experts_implementation("eager")  # the default's grouped products do not exist in float64
        heads = config.num_attention_heads
        on_cpu = self.device.type == "cpu"
        self.kv = SlotKV(
            layers=config.num_hidden_layers,
            slots=max_slots,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            capacity=max_length + MAX_TREE_NODES,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            # Attention on a CPU sums in float64: storing what it reads saves a conversion per layer and pass.
            key_dtype=torch.promote_types(self.dtype, torch.float32) if on_cpu else self.dtype,
            value_dtype=torch.float64 if on_cpu else self.dtype,
            device=self.device,
        )

    def open_slot(self) -> int:
        return self.kv.open()

    def close_slot(self, slot: int) -> None:
        self.kv.close(slot)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        self.kv.commit(slot, path)

    def prefill(self, chunks: Sequence[Chunk]) -> list[ChunkOutput]:
        """Write prompt chunks behind what their slots hold.

        Args:
            chunks: at most one per slot.

        Returns:
            Top ids of all positions where wanted, the last position's outputs where it is the last chunk.
        """
        shapes = [Topology.chain(len(chunk.tokens)) for chunk in chunks]
        tokens = [chunk.tokens for chunk in chunks]
        hidden = self._run([chunk.slot for chunk in chunks], tokens, shapes, is_prompt=True)
        outputs = []
        for chunk, rows in zip(chunks, hidden.split([len(shape) for shape in shapes]), strict=True):
            self.kv.commit(chunk.slot, range(len(chunk.tokens)))
            top_ids = self._head.top_ids(rows) if chunk.want_top else None
            outputs.append(ChunkOutput(top_ids, self._head(rows[-1:]) if chunk.is_last else None))
        return outputs

    def forward(self, slots: Sequence[int], trees: Sequence[DraftTree]) -> list[NodeOutputs]:
        """Outputs at every node of every tree, in one pass. Nothing is committed.

        Args:
            slots: one slot per tree.
            trees: at most MAX_TREE_NODES nodes each.
        """
        shapes = [tree.topology for tree in trees]
        packed = self._head(self._run(slots, [tree.tokens for tree in trees], shapes))
        outputs, start = [], 0
        for shape in shapes:
            rows = slice(start, start + len(shape))
            outputs.append(NodeOutputs(packed.logits[rows], packed.top_ids[rows], packed.top_logits[rows]))
            start += len(shape)
        return outputs

    @torch.inference_mode()
    def _run(
        self, slots: Sequence[int], tokens: Sequence[Tensor], shapes: Sequence[Topology], is_prompt: bool = False
    ) -> Tensor:
        """[T, H] final hidden states of packed segments."""
        segments, positions, start = [], [], 0
        for slot, shape in zip(slots, shapes, strict=True):
            # The position of a node is its prefix length plus its depth, never its index in the tree.
            positions.append(shape.depth_tensor + self.kv.lengths[slot])
            segments.append(Segment(self.kv, slot, start, positions[-1], shape.ancestor_mask, is_prompt))
            start += len(shape)
        cache = PassCache(segments)
        output = self._decoder(
            input_ids=torch.cat([part.to(self.device) for part in tokens])[None],
            # A tree may reach beyond the last token a request can have, where a table of learned positions ends.
            # Nothing there is ever emitted or seen by a node that is.
            position_ids=torch.cat(positions).clamp(max=self.max_length - 1).to(self.device)[None],
            past_key_values=cache,
            use_cache=True,
            slots=cache,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden
