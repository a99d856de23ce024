"""The random primitives of verification, bound to a batch of requests and their keyed noise."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import NodeOutputs, Stream
from outpace.sampling.noise import Purpose, gumbel, noise_key, uniform
from outpace.sampling.warp import warp


def draw_keyed(rows: Sequence[Tensor], streams: Sequence[Stream], positions: Sequence[int]) -> list[int]:
    """One token per row: argmax(log p + g) with the request's noise at that position.

    Args:
        rows: float32 logits [V] per row.
        streams: the stream of each row.
        positions: absolute position of the token to draw, per row.
    """
    drawn = [0] * len(rows)
    by_params: dict[SamplingParams, list[int]] = {}
    for row, stream in enumerate(streams):
        by_params.setdefault(stream.params, []).append(row)
    for params, members in by_params.items():
        log_probs = warp(torch.stack([rows[row] for row in members]), params)
        keys = [noise_key(streams[row].seed, streams[row].sample_index, positions[row]) for row in members]
        vocab = torch.arange(log_probs.shape[-1], device=log_probs.device)
        tokens = (log_probs + gumbel(keys, vocab)).argmax(dim=-1).tolist()
        for row, token in zip(members, tokens, strict=True):
            drawn[row] = token
    return drawn


class BatchDraw:
    """The `draw` of `verify.match` over a batch: greedy rows are read once, sampled rows are drawn when visited.

    Args:
        outputs: the target's answers, one per request.
        depths: depth of each node, per request.
        streams: the randomness of each request.
    """

    def __init__(
        self, outputs: Sequence[NodeOutputs], depths: Sequence[Sequence[int]], streams: Sequence[Stream]
    ) -> None:
        self._outputs, self._depths, self._streams = outputs, depths, streams
        greedy = [index for index, stream in enumerate(streams) if stream.params.is_greedy]
        self._best: dict[int, list[int]] = {}
        if greedy:
            best = torch.cat([outputs[index].top_ids[:, 0] for index in greedy]).tolist()  # one host read
            for index in greedy:
                count = len(depths[index])
                self._best[index], best = best[:count], best[count:]

    def __call__(self, queries: list[tuple[int, int]]) -> list[int]:
        sampled = [(index, node) for index, node in queries if index not in self._best]
        positions = [self._streams[index].first_position + self._depths[index][node] for index, node in sampled]
        rows = [self._outputs[index].scores(node) for index, node in sampled]
        drawn = iter(draw_keyed(rows, [self._streams[index] for index, _ in sampled], positions) if sampled else ())
        return [self._best[index][node] if index in self._best else next(drawn) for index, node in queries]


class RejectionDraw:
    """The primitives of `verify.rejection` for one request, on noise of their own."""

    def __init__(self, outputs: NodeOutputs, depths: Sequence[int], stream: Stream) -> None:
        self._outputs, self._depths, self._stream = outputs, depths, stream

    def target_probs(self, node: int) -> Tensor:
        """[V] the target's warped distribution after a node."""
        return warp(self._outputs.scores(node)[None], self._stream.params)[0].exp()

    def categorical(self, probs: Tensor, node: int) -> int:
        key = self._key(self._depths[node], Purpose.RESIDUAL)
        vocab = torch.arange(len(probs), device=probs.device)
        return int((probs.log() + gumbel([key], vocab)[0]).argmax())

    def bernoulli(self, probability: float, node: int) -> bool:
        # Keyed by the node too: siblings stand at one position and must not share their luck.
        key = self._key(self._depths[node] - 1, Purpose.ACCEPT)
        return float(uniform([key], torch.tensor([node]))[0, 0]) < probability

    def _key(self, depth: int, purpose: Purpose) -> tuple[int, int]:
        stream = self._stream
        return noise_key(stream.seed, stream.sample_index, stream.first_position + depth, purpose)
