"""Measures the parts of a round: the target's passes, every part of three drafters, the verdict and the commit."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.cache.passes import PassCache, Tables
from outpace.cache.slots import Rows
from outpace.core.params import SamplingParams
from outpace.core.tree import DraftTree, Topology
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.domino.gpu.head import Rollout, TritonHead, gate_table
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.domino.source import block_source
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.net_slots import NetPass, NetSlots, Sight
from outpace.engine.engine import Engine
from outpace.gpu.capture import VARIABLE
from outpace.models.packed import PassPart
from outpace.models.target import PackedTarget
from outpace.sampling.verification import match
from outpace.testing import decode
from outpace.trees.proposer import StaticProposer
from outpace.trees.shapes.rank_paths import Chain
from scripts.gpu.clock import Clock, Work
from scripts.gpu.sizes import Sizes, random_drafters, random_target

PHASES = ("draft", "forward", "verify", "commit", "observe")
ACCEPTED = 5
"""Rows of features that a drafter turns into context after a round, per request."""


class Latency:
    """Times on random weights, whose passes cost what trained ones' do.

    Args:
        sizes: of everything.
        device, dtype: of everything.
        clock: takes the times.
        memory: bytes that keys and values of the target may take; larger cases are left out and named.
    """

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype, clock: Clock, memory: int) -> None:
        self._sizes, self._device, self._dtype, self._clock, self._memory = sizes, device, dtype, clock, memory
        self._model: PreTrainedModel = random_target(sizes, device, dtype)
        self._dflash, self._domino, self._eagle = random_drafters(sizes, device, dtype)

    @torch.inference_mode()
    def cases(self) -> Iterator[dict[str, Any]]:
        """Yield the measured cases: the smallest contexts, and the smallest and largest batch, come first, in case time
        runs out."""
        batches = self._sizes.batches
        order = [batches[0], batches[-1], *batches[1:-1]]
        for context in self._sizes.contexts:
            for batch in order:
                case: dict[str, Any] = {"context": context, "batch": batch}
                if self._clock.is_over:
                    yield case | {"left_out": "time was up"}
                elif self._kv_bytes(context, batch) > self._memory:
                    yield case | {"left_out": "keys and values exceed this GPU's memory"}
                else:
                    yield case | self._case(context, batch)

    def _kv_bytes(self, context: int, batch: int) -> int:
        sizes, spare = self._sizes, 512
        row = 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * self._dtype.itemsize
        return row * batch * (context + spare)

    def _case(self, context: int, batch: int) -> dict[str, Any]:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        target = PackedTarget(self._model, context + 64, batch, (), pack=False, tiled=True)
        for storage in (target.kv.keys, target.kv.values):
            storage.normal_()
        target.kv.lengths = [context] * batch
        found: dict[str, Any] = {"plain": self._clock.times(self._pass(target, 1))}
        found["verify"] = {str(rows): self._clock.times(self._pass(target, rows)) for rows in self._sizes.trees}
        found["engine"] = {str(rows): self._engine_pass(target, rows) for rows in (1, self._sizes.block)}
        found["verdict"] = self._verdict(target)
        found["commit"] = self._commit(target)
        found["dflash"] = self._block_parts(self._dflash, target)
        found["domino"] = self._block_parts(self._domino, target) | self._rollout(batch)
        found["eagle3"] = self._eagle_parts(self._eagle, target)
        return found

    def rounds(self, batch: int, new_tokens: int) -> dict[str, Any]:
        """Milliseconds of a round of Domino's chains in the engine by phase, launched one by one and as graphs; the
        rest is bookkeeping."""
        found: dict[str, Any] = {"batch": batch}
        for name, wish in (("eager", "off"), ("graphs", "on")):
            with captures(wish):
                found[name] = self._round(batch, new_tokens)
        return found

    def _round(self, batch: int, new_tokens: int) -> dict[str, float]:
        target = PackedTarget(self._model, 64 + new_tokens, batch, (), pack=False, tiled=True)
        source = block_source(self._domino, target, target.head)
        source.slots.tiled = True  # a CPU runs the same code as a GPU
        proposer = StaticProposer(source, Chain(), self._sizes.block - 1, self._device)
        prompts = torch.randint(self._sizes.vocab, (batch, 48)).tolist()
        for _ in range(2):  # the first run compiles kernels
            engine = Engine(target)
            wanted = [SamplingParams(max_new_tokens=new_tokens)] * batch
            metrics = decode(engine, prompts, wanted, [proposer] * batch)[0].metrics
        phases = {name: getattr(metrics, f"{name}_ms") for name in PHASES}
        phases["bookkeeping"] = metrics.decode_ms - sum(phases.values())
        return {name: round(spent / max(metrics.steps, 1), 4) for name, spent in phases.items()}

    def _engine_pass(self, target: PackedTarget, rows: int) -> dict[str, Any]:
        """The engine's pass over a tree of every request, tables and head included: launched one by one, and as graphs
        over static buffers."""
        trees = [
            DraftTree(torch.zeros(rows, dtype=torch.int64, device=self._device), Topology.chain(rows))
            for _ in target.kv.lengths
        ]
        return self._both_ways(target, lambda: target.run_pass((), range(len(trees)), trees)[1])

    def _both_ways(self, owner: PackedTarget | NetSlots, work: Work) -> dict[str, Any]:
        """Times of work, with the owner's capturing of graphs off and on."""
        found: dict[str, Any] = {}
        for name, owner.captures in (("eager", False), ("graphs", True)):
            times = self._clock.times(work, graph=False)
            found |= {f"{name}_ms" if key == "eager_ms" else f"{name}_{key}": value for key, value in times.items()}
        owner.captures = False
        return found

    def _pass(self, target: PackedTarget, rows: int) -> Any:
        """A function that makes a pass with head and best ids, over tables that are already made."""
        tokens = torch.zeros(rows, dtype=torch.int64)
        parts = [PassPart.of(slot, tokens) for slot in range(len(target.kv.lengths))]
        segments, positions = target._segments(parts)
        cache = PassCache(segments, Tables.of(segments, target.exact).on(self._device))
        ids = torch.zeros(rows * len(parts), dtype=torch.int64, device=self._device)
        where = positions.to(self._device)

        def work() -> Tensor:
            hidden, _ = target._run_modules(ids, where, cache, ())
            return target.head(hidden).top_ids

        return work

    def _verdict(self, target: PackedTarget) -> dict[str, Any]:
        """Times of walking a chain of every request on the host, to the middle of each, with one read of the best
        ids."""
        rows, batch = self._sizes.block, len(target.kv.lengths)
        best = torch.ones(batch * rows, dtype=torch.int64, device=self._device)
        shapes = [Topology.chain(rows)] * batch
        tokens = [[1] * (rows // 2) + [0] * (rows - rows // 2)] * batch

        def work() -> object:
            read = best.tolist()
            return match(shapes, tokens, lambda asked: [read[tree * rows + node] for tree, node in asked])

        return self._clock.times(work, graph=False)

    def _commit(self, target: PackedTarget) -> dict[str, Any]:
        """Times of moving a branching path of every request into place."""
        path = list(range(0, 2 * (self._sizes.block // 4), 2))
        lengths = list(target.kv.lengths)

        def work() -> None:
            target.commit(range(len(lengths)), [path] * len(lengths))
            target.kv.lengths = list(lengths)

        return self._clock.times(work, graph=False)

    def _block_parts(self, net: DFlashNet, target: PackedTarget) -> dict[str, Any]:
        """Times of writing features into the context, of the block, and of the target's head over all depths."""
        sizes, batch, context = self._sizes, len(target.kv.lengths), target.kv.lengths[0]
        slots = _net_slots(net, batch, context, sizes.block + ACCEPTED)
        parts = [Rows(slot, torch.arange(sizes.block)) for slot in range(batch)]
        sights = [Sight() for _ in range(net.config.layers)]
        attend, positions = slots.attention(parts, sights), slots.positions(parts).to(self._device)
        rows = torch.randn(batch * sizes.block, sizes.hidden, device=self._device).to(self._dtype)
        kept = torch.randn(batch * ACCEPTED, len(sizes.taps) * sizes.hidden, device=self._device).to(self._dtype)
        at = (torch.arange(ACCEPTED).repeat(batch) + context).to(self._device)
        outputs = net.block(rows, positions, attend)
        captured = NetPass(slots, lambda where, attend, *rows: (net.block(*rows, where, attend),), sights)
        return {
            "context": self._clock.times(lambda: list(net.context(net.fuse(kept), at))),
            "block": self._clock.times(lambda: net.block(rows, positions, attend)),
            "block_in_the_engine": self._both_ways(slots, lambda: captured(parts, rows)),
            "lm_head": self._clock.times(lambda: target.head.scores(outputs[batch:])),
        }

    def _rollout(self, batch: int) -> dict[str, Any]:
        """Times of Domino's head over all depths: for a chain, and for a chain with the table of gates."""
        sizes, config = self._sizes, self._domino.config
        assert isinstance(self._domino, DominoNet)
        weights = TritonHead.of(self._domino.head, None)
        depths = sizes.block - 1
        corrected = [config.corrects(depth) for depth in range(1, depths + 1)]
        embedding = self._model.get_input_embeddings()
        hidden = torch.randn(batch, depths, sizes.hidden, device=self._device).to(self._dtype)
        base = torch.randn(batch, depths, sizes.vocab, device=self._device)
        pending = torch.zeros(batch, dtype=torch.int64, device=self._device)
        inputs = hidden, base, pending
        chain = Rollout(weights, embedding, corrected)
        table = gate_table(weights.of_input, embedding, sizes.vocab)
        looked_up = Rollout(weights, embedding, corrected, table)
        return {
            "rollout_chain": self._clock.times(lambda: chain(*inputs)),
            "rollout_chain_with_table": self._clock.times(lambda: looked_up(*inputs)),
            "table_gb": round(table.numel() * table.element_size() / 1e9, 3),
        }

    def _eagle_parts(self, net: Eagle3Net, target: PackedTarget) -> dict[str, Any]:
        """Times of a level of the tree: the net over its rows, and its head with the best ids."""
        sizes, batch, context = self._sizes, len(target.kv.lengths), target.kv.lengths[0]
        breadth = sizes.eagle_breadth
        slots = _net_slots(net, batch, context, breadth)
        parts = [
            Rows(slot, torch.zeros(breadth, dtype=torch.int64), torch.eye(breadth, dtype=torch.bool))
            for slot in range(batch)
        ]
        attend, positions = slots.attention(parts), slots.positions(parts).to(self._device)
        embeddings, states = torch.randn(2, batch * breadth, sizes.hidden, device=self._device).to(self._dtype)
        assert net.lm_head is not None
        head = net.lm_head
        captured = NetPass(slots, lambda where, attend, *rows: net(*rows, where, attend))
        return {
            "level": self._clock.times(lambda: net(embeddings, states, positions, attend)),
            "level_in_the_engine": self._both_ways(slots, lambda: captured(parts, embeddings, states)),
            "level_head": self._clock.times(lambda: head(states).float().log_softmax(-1).topk(breadth)),
            "levels": sizes.eagle_depth,
        }


@contextmanager
def captures(wish: str) -> Iterator[None]:
    """Set whether models and drafters made in the block capture their passes: "on" or "off"."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = wish
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def _net_slots(net: DFlashNet | Eagle3Net, batch: int, context: int, spare: int) -> NetSlots:
    """Slots of a net that hold a context of random keys."""
    config, weight = net.config, net.norm.weight
    slots = NetSlots(
        config.layers,
        batch,
        config.kv_heads,
        capacity=context + spare,
        head_dim=config.head_dim,
        dtype=weight.dtype,
        device=weight.device,
    )
    slots.tiled = True
    slots.kv.keys.normal_()
    slots.kv.values.normal_()
    slots.kv.lengths = [context] * batch
    return slots
