"""A target with a few tokens and probabilities in closed form, and requests for its drafters."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import TOP_CANDIDATES, Chunk, ChunkOutput, DraftRequest, NodeOutputs, SamplingContext
from outpace.core.tree import DraftTree
from outpace.drafters.build_context import BuildContext
from outpace.sampling.noise import noise_key, uniform


class ToyMemory:
    """The memory of a toy's slots: a row for each id that was committed to a slot since it was last trimmed."""

    def __init__(self, committed: dict[int, list[int]], budget: int | None) -> None:
        self.budget, self._committed, self._held = budget, committed, dict.fromkeys(committed, 0)

    def held(self, slot: int) -> int:
        self._held[slot] = max(self._held[slot], len(self._committed[slot]))
        return self._held[slot]

    def trim(self, slot: int) -> None:
        self._held[slot] = len(self._committed[slot])


class ToyTarget:
    """A target whose next-token distribution depends on the last two tokens and on the position, like a model with
    RoPE.

    It implements the engine's `Target` protocol, remembers committed ids per slot, and evaluates every node on its own
    path: a drafter, shape or verifier that confuses positions or paths changes the output.

    Args:
        sharpness: scale of the logits; larger is more predictable.
        memory: rows that all slots together may hold; None without a limit.
    """

    def __init__(
        self,
        vocab_size: int = 8,
        seed: int = 0,
        sharpness: float = 3.0,
        max_length: int = 256,
        max_slots: int = 4,
        eos_token_ids: tuple[int, ...] = (),
        memory: int | None = None,
    ) -> None:
        self.vocab_size, self.max_length, self.max_slots = vocab_size, max_length, max_slots
        self.eos_token_ids = eos_token_ids
        self.committed: dict[int, list[int]] = {slot: [] for slot in range(max_slots)}
        self.memory = ToyMemory(self.committed, memory)
        self._passes: dict[int, DraftTree] = {}
        self._seed, self._sharpness = seed, sharpness
        self._rows: dict[tuple[int, int], Tensor] = {}  # [V] by context and position: thousands of samples ask the same

    def logits(self, ids: Sequence[int], position: int) -> Tensor:
        """[V] float32 logits of the token at `position`, given the ids before it."""
        context = 0
        for token in list(ids)[-2:]:
            context = context * (self.vocab_size + 1) + token + 1
        if (context, position) not in self._rows:
            key = noise_key(self._seed, context, position)
            self._rows[context, position] = uniform([key], torch.arange(self.vocab_size))[0] * self._sharpness
        return self._rows[context, position].clone()

    def probs(self, ids: Sequence[int]) -> Tensor:
        """[V] the exact next-token distribution after a sequence, at temperature 1."""
        return torch.softmax(self.logits(ids, len(ids)).double(), dim=-1)

    def rewind_slot(self, slot: int, length: int) -> None:
        del self.committed[slot][length:]

    def copy_slot(self, source: int, goal: int, length: int) -> None:
        assert len(self.committed[source]) >= length
        self.committed[goal] = self.committed[source][:length]

    def run_pass(
        self,
        chunks: Sequence[Chunk],
        slots: Sequence[int],
        trees: Sequence[DraftTree],
        taps: Sequence[tuple[int, ...]] = (),
    ) -> tuple[list[ChunkOutput], list[NodeOutputs]]:
        assert not any(taps), "a toy has no hidden states"
        return self._write(chunks), self._verified(slots, trees)

    def _write(self, chunks: Sequence[Chunk]) -> list[ChunkOutput]:
        outputs = []
        for chunk in chunks:
            ids = self.committed[chunk.slot]
            rows = []
            for token in chunk.tokens.tolist():
                ids.append(token)
                rows.append(self.logits(ids, len(ids)))
            seen = _outputs(torch.stack(rows))
            last = NodeOutputs(seen.logits[-1:], seen.top_ids[-1:], seen.top_logits[-1:]) if chunk.is_last else None
            outputs.append(ChunkOutput(seen.top_ids if chunk.want_top else None, last))
        return outputs

    def _verified(self, slots: Sequence[int], trees: Sequence[DraftTree]) -> list[NodeOutputs]:
        outputs = []
        for slot, tree in zip(slots, trees, strict=True):
            self._passes[slot] = tree
            rows = [self.node_logits(slot, tree, node) for node in range(len(tree))]
            outputs.append(_outputs(torch.stack(rows)))
        return outputs

    def node_logits(self, slot: int, tree: DraftTree, node: int) -> Tensor:
        """[V] logits after one node; the successor of node i has position committed length + depth + 1."""
        path = tree.topology.path(node)
        ids = self.committed[slot] + tree.tokens[list(path)].tolist()
        return self.logits(ids, len(self.committed[slot]) + tree.topology.depths[node] + 1)

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        for slot, path in zip(slots, paths, strict=True):
            self.committed[slot] += self._passes[slot].tokens[list(path)].tolist()


def _outputs(logits: Tensor) -> NodeOutputs:
    top_logits, top_ids = logits.topk(min(TOP_CANDIDATES, logits.shape[-1]), dim=-1)
    return NodeOutputs(logits, top_ids, top_logits)


def draft_request(ids: Sequence[int], budget: int, max_depth: int, seed: int = 0, **params: Any) -> DraftRequest:
    """A request for a tree."""
    return DraftRequest(SamplingContext(SamplingParams(**params), seed, 0, ids, len(ids)), budget, max_depth)


def toy_context(vocab_size: int) -> BuildContext:
    """The build context of a method without a model."""
    return BuildContext(vocab_size, torch.device("cpu"), no_draft_model)


def no_draft_model() -> NoReturn:
    """Replaces the loader of a draft model; fails if it is called."""
    raise AssertionError("this method needs no draft model")
