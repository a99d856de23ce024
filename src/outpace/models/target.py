"""The target: an unmodified model that runs packed draft trees over slots of keys and values."""

import itertools
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING
from weakref import proxy

import torch
from torch import Tensor

from outpace.cache.slots import AttentionSettings, Segment, SlotKV
from outpace.core.protocols import Chunk, ChunkOutput, NodeOutputs
from outpace.core.tree import DraftTree, Topology
from outpace.gpu.capture import HEAD_ROWS, Captured
from outpace.kernels.attention import KV_CACHE_DTYPES, attend, has_kernels
from outpace.kernels.build import loaded_kernels
from outpace.models.head import EXACT_ROWS
from outpace.models.layers.prepare import prepare
from outpace.models.packed import PackedModel, PassPart

# Tokens of context, rows that read them, and layers at most, where attention is timed: it takes memory of its own.
_CONTEXT, _ATTENDING, _LAYERS_ATTENDING = 2048, (1, 8), 8
_REPEATS = 3

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedTarget(PackedModel):
    """Runs trees and prompt chunks of many requests in one packed pass [1, T].

    Args:
        model: a causal LM of transformers, accepted by `models.families`, whose attention implementation is
            `models.attention.ATTENTION_NAME`, or a `PlainLM`. A CPU's packed layers replace its own.
        max_length: tokens of one request, prompt and answer together.
        max_slots: requests at a time.
        eos_token_ids: ids that end a request by default.
        pack: false keeps the model's layers.
        rounded_to: the dtype that the weights were rounded to before they were widened; None for the model's.
        quantize: "none", "int8", or "file" and "int4" for layers over blocks of a GGUF file's formats.
        kv_cache_dtype: as of `loading.precision.check_kv_cache_dtype`; auto is what the weights were rounded to where
            compiled kernels read it.
        memory, tiled, exact: as in `PackedModel`; on a CPU `exact` changes only what `models.exactness` requires.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        max_length: int,
        max_slots: int,
        eos_token_ids: tuple[int, ...],
        pack: bool = True,
        rounded_to: torch.dtype | None = None,
        quantize: str = "none",
        tiled: bool | None = None,
        exact: bool = False,
        memory: int | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.eos_token_ids, self.rounded_to, self.quantize = eos_token_ids, rounded_to or model.dtype, quantize
        self.wants_exact = exact
        device, dtype = model.device, model.dtype  # of its parameters, which layers of kernels replace
        decoder, head = prepare(model, pack, rounded_to, quantize)
        on_cpu = device.type == "cpu" and not tiled
        compiled = on_cpu and loaded_kernels() is not None and dtype in (torch.float32, torch.bfloat16)
        if compiled:
            kept = torch.bfloat16 if self.rounded_to == torch.bfloat16 else dtype
            keys = values = KV_CACHE_DTYPES.get(kv_cache_dtype, kept)
        elif on_cpu:  # attention sums in float64; storing float64 saves a conversion per pass
            keys, values = torch.promote_types(dtype, torch.float32), torch.float64
        else:
            keys = values = dtype
        super().__init__(
            decoder,
            head,
            model.config.get_text_config(),
            max_length,
            max_slots,
            key_dtype=keys,
            value_dtype=values,
            tiled=tiled,
            exact=exact and not on_cpu,
            memory=memory,
        )
        buckets = (EXACT_ROWS,) if self.exact else HEAD_ROWS
        # By a weak reference: a cycle would keep the weights until the garbage collector comes.
        self._captured_head = Captured(partial(PackedTarget._head_outputs, proxy(self)), buckets, self.device)

    @property
    def kv_cache_dtype(self) -> str:
        """The format of stored keys."""
        return str(self.kv.keys.dtype).removeprefix("torch.")

    def copy_slot(self, source: int, goal: int, length: int) -> None:
        """Replace a slot's content by the first `length` committed tokens of another, or of itself."""
        assert self.kv.lengths[source] >= length, f"slot {source} has fewer than {length} committed tokens"
        super().copy_slot(source, goal, length)

    @torch.inference_mode()
    def context_times(self) -> tuple[float, float]:
        """Estimated milliseconds that a token of context adds to a pass: for each request, and for each of its rows.
        Zeros if no compiled kernel attends. Sliding windows are not considered: rounds correct the times.
        """
        if not has_kernels(self.kv):
            return 0.0, 0.0
        context = min(_CONTEXT, self.max_length)
        capacity, dtype = context + max(_ATTENDING), self.kv.keys.dtype
        layers = min(len(self.kv.keys), _LAYERS_ATTENDING)
        kv = self._slots(slots=1, capacity=capacity, key_dtype=dtype, value_dtype=dtype, layers=layers)
        for storage in kv.storages:
            storage.fill_(1)  # memory is mapped when it is written
        times = dict[tuple[int, int], float]()
        for _, rows, length in itertools.product(range(_REPEATS), _ATTENDING, (0, context)):
            kv.lengths[0] = length
            took = self._attention_ms(kv, rows)
            times[rows, length] = min(took, times.get((rows, length), took))
        share = len(self.kv.keys) / layers / context
        one, more = (max(times[rows, context] - times[rows, 0], 0.0) * share for rows in _ATTENDING)
        row = max(more - one, 0.0) / (_ATTENDING[1] - _ATTENDING[0])
        return max(one - row * _ATTENDING[0], 0.0), row

    def _attention_ms(self, kv: SlotKV, rows: int) -> float:
        """Milliseconds of attention in the layers of `kv`, for a chain after the contents of the first slot."""
        chain, width = Topology.chain(rows), kv.keys.shape[-1]
        segment = Segment(kv, 0, 0, chain.depth_tensor + kv.lengths[0], chain.ancestor_mask)
        query = torch.ones(self.config.num_attention_heads, rows, width)
        started = perf_counter()
        for layer in range(len(kv.keys)):
            attend(query, [segment], AttentionSettings(layer, width**-0.5, None, None))
        return (perf_counter() - started) * 1e3

    def run_pass(
        self,
        chunks: Sequence[Chunk],
        slots: Sequence[int],
        trees: Sequence[DraftTree],
        taps: Sequence[tuple[int, ...]] = (),
    ) -> tuple[list[ChunkOutput], list[NodeOutputs]]:
        """Append prompt chunks to their slots, and compute every node of the trees, in one pass.

        Args:
            chunks: at most one per slot, of slots without a tree.
            slots: one per tree.
            trees: at most MAX_TREE_NODES nodes each. Nothing of them is committed.
            taps: per tree, the hidden states to return as features; empty for none.

        Returns:
            Per chunk the top ids of all positions if wanted, and the last position's outputs for a prompt's last chunk;
            and the outputs at every node of every tree.
        """
        parts = [PassPart.of(chunk.slot, chunk.tokens) for chunk in chunks]
        parts += [PassPart.of(slot, tree.tokens, tree.topology) for slot, tree in zip(slots, trees, strict=True)]
        wanted = [chunk.taps for chunk in chunks] + list(taps or [()] * len(trees))
        hidden, tapped = self.run_tapped(parts, [tap for own in wanted for tap in own], captured=not chunks)
        sizes = [*(len(chunk.tokens) for chunk in chunks), *map(len, trees)]
        ends = list(itertools.accumulate(sizes))
        rows = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        features = [_concatenated(tapped, own, each) for own, each in zip(wanted, rows, strict=True)]
        lasts = [end - 1 for chunk, end in zip(chunks, ends, strict=False) if chunk.is_last]
        count = len(chunks)
        outputs = self._outputs(hidden, lasts, sum(sizes[:count]), sizes[count:], features[count:])
        self.kv.commit([chunk.slot for chunk in chunks], [range(len(chunk.tokens)) for chunk in chunks])
        results, of_lasts = [], iter(outputs)
        for chunk, each, own in zip(chunks, rows, features, strict=False):
            top_ids = self.head.top_ids(hidden[each]) if chunk.want_top else None
            results.append(ChunkOutput(top_ids, next(of_lasts) if chunk.is_last else None, own))
        return results, outputs[len(lasts) :]

    def _outputs(
        self,
        hidden: Tensor,
        lasts: Sequence[int],
        written: int,
        sizes: Sequence[int],
        features: Sequence[Tensor | None],
    ) -> list[NodeOutputs]:
        """Outputs at some rows of a pass, and then at those of each tree, which follow `written` rows of prompts."""
        if written:
            hidden = torch.cat([hidden[lasts], hidden[written:]])
        if not len(hidden):
            return []
        packed = NodeOutputs(*self._captured_head(hidden)) if self.captures and not written else self.head(hidden)
        parts = [each.split([*[1] * len(lasts), *sizes]) for each in (packed.logits, packed.top_ids, packed.top_logits)]
        return list(map(NodeOutputs, *parts, [*[None] * len(lasts), *features]))

    def _head_outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = self.head(hidden)
        return outputs.logits, outputs.top_ids, outputs.top_logits


def _concatenated(tapped: dict[int, Tensor], taps: Sequence[int], rows: slice) -> Tensor | None:
    return torch.cat([tapped[tap][rows] for tap in taps], dim=-1) if taps else None
