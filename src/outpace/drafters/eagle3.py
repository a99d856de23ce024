"""EAGLE-3 as a source: the target's features extended token by token, a tree level per pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.core.drafting import Candidates, Frontier
from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk, Stream
from outpace.drafters.depthwise import in_target_ids
from outpace.drafters.frequency import both
from outpace.drafters.scratch import Scratch
from outpace.models.head import SubsetHead
from outpace.models.net_slots import NetSlots, Rows
from outpace.nets.eagle3 import Eagle3Net
from outpace.sampling.scores import keyed_scores


@dataclass(eq=False)
class EagleState:
    """One request in an EAGLE-3 drafter.

    Row i of its slot is the pair (feature of position i, token i + 1), so the last known feature waits for its token.

    Attributes:
        slot: of the net.
        tokens: prompt ids that the waiting features' pairs need, first the one after the last committed row.
        features: [m, taps * H] the target's features that have no row yet.
        request: the request of this round.
        scratch: the growing tree.
        outputs: [n, H] what the net made of the last level's rows, features of the next.
        is_behind: rows are missing that only the next round can write.
        is_beyond: the context has outgrown the net; nothing is drafted any more.
    """

    slot: int
    features: Tensor
    tokens: list[int] = field(default_factory=list)
    request: DraftRequest | None = None
    scratch: Scratch = field(default_factory=Scratch)
    outputs: Tensor = field(default_factory=lambda: torch.empty(0))
    is_behind: bool = False
    is_beyond: bool = False


class EagleSource:
    """An EAGLE-3 net on slots of its own.

    Accepted positions are written from the target's own features; rows of a tree, which stand on the net's own
    outputs, are scratch and go when the round ends.

    Args:
        net: the drafter.
        table: the target's embedding [V, H].
        head: the target's LM head [V, H], for nets without one of their own.
        taps: the hidden states the net reads, as `net.config.taps_of(layers)` says.
        max_length, max_slots, vocab_size: of the target.
        noise: draft with the request's keyed noise at temperature > 0.
        vocabulary: [K] the only ids to draft; None for all that the net has.
    """

    def __init__(
        self,
        net: Eagle3Net,
        table: Tensor,
        head: Tensor | None,
        taps: tuple[int, ...],
        max_length: int,
        max_slots: int,
        vocab_size: int,
        noise: bool = True,
        vocabulary: Tensor | None = None,
    ) -> None:
        self.net, self._table, self._head, self._noise, self._vocab_size = net, table, head, noise, vocab_size
        self.needs = Needs(taps=taps)
        config, weight = net.config, net.fc.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._limit = min(max_length, config.max_positions)
        capacity = self._limit + SCRATCH_ROWS
        self.slots = NetSlots(1, max_slots, config.kv_heads, capacity, config.head_dim, self._dtype, self._device)
        self._target_ids = net.target_ids(torch.arange(config.draft_vocab_size, device=self._device))
        self._subset: SubsetHead | None = None
        if vocabulary is not None:
            rows = head if net.lm_head is None else net.lm_head.weight
            assert rows is not None, "a net without a head uses the target's"
            self._subset = SubsetHead(rows, *both(self._target_ids, vocabulary), vocab_size)

    def open(self) -> EagleState:
        return EagleState(self.slots.kv.open(), self._no_features())

    def close(self, state: EagleState) -> None:
        self.slots.kv.close(state.slot)

    def rewind(self, state: EagleState, length: int) -> None:
        """Keep what the first `length` ids and the one behind them determine: a row reads one token ahead."""
        self.slots.kv.truncate(state.slot, length)
        waiting = length - self.slots.kv.lengths[state.slot]
        state.features, state.tokens = state.features[:waiting], []
        # The tokens of waiting features are not shown again; the next round, which sees all ids, writes these rows.
        state.is_behind = waiting > 0
        state.is_beyond = len(state.features) < waiting

    def reset(self) -> None:
        pass  # nothing outlives a request

    def prefill(self, states: Sequence[EagleState], chunks: Sequence[PromptChunk]) -> None:
        for state, chunk in zip(states, chunks, strict=True):
            # Without a waiting feature the first id is in a row already, or the first of all, which has none.
            state.tokens += chunk.tokens.tolist()[0 if len(state.features) else 1 :]
            self._keep(state, chunk.features)
        ready = [state for state in states if state.tokens and not (state.is_behind or state.is_beyond)]
        if ready:
            self._write(ready, [state.tokens for state in ready])

    def observe(self, states: Sequence[EagleState], observations: Sequence[Observation]) -> None:
        for state, observation in zip(states, observations, strict=True):
            features = observation.outputs.features
            assert features is not None, "needs.taps asks for features at every node"
            self._keep(state, features[torch.tensor(observation.verdict.path)])

    def begin(self, states: Sequence[EagleState], requests: Sequence[DraftRequest]) -> list[int]:
        for state, request in zip(states, requests, strict=True):
            state.request = request
        return [0 if state.is_beyond else request.max_depth for state, request in zip(states, requests, strict=True)]

    def expand(self, states: Sequence[EagleState], frontier: Frontier, width: int) -> Candidates:
        groups = frontier.groups()
        if frontier.parents[0] < 0:
            members = [states[owner] for owner in groups]
            for state, nodes in zip(members, groups.values(), strict=True):
                state.scratch.plant(nodes.start)
            ids = [_request(state).ids[self.slots.kv.lengths[state.slot] + 1 :] for state in members]
            hidden = self._write(members, ids)  # [R, H]
        else:
            hidden = self._grow([(states[owner], nodes) for owner, nodes in groups.items()], frontier)
        streams: list[Stream] = []
        depths: list[int] = []
        paths: list[list[int]] = []
        for owner, nodes in groups.items():
            state, stream = states[owner], _request(states[owner]).stream
            streams += [stream] * len(nodes)
            depths += [state.scratch.depth] * len(nodes)
            paths += state.scratch.paths(len(nodes)) if stream.params.has_processors else [[]] * len(nodes)
        scores = keyed_scores(self._logits(hidden), streams, depths, self._noise, paths)
        log_probs, tokens = scores.topk(min(width, self._vocab_size), dim=-1)
        return Candidates(tokens, log_probs, passes=1)

    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> Tensor:
        """[F, V] float32 logits in the target's ids; ids that the drafter does not have are -inf."""
        if self._subset is not None:
            return self._subset.scores(hidden)
        return in_target_ids(self.net.logits(hidden, self._head), self._target_ids, self._vocab_size)

    @torch.inference_mode()
    def _write(self, states: Sequence[EagleState], ids: Sequence[Sequence[int]]) -> Tensor:
        """Write and commit the pairs of waiting features with the ids after them; outputs of the last rows [R, H]."""
        counts = [min(len(state.features), len(after)) for state, after in zip(states, ids, strict=True)]
        parts = [
            Rows(state.slot, count, torch.arange(count), torch.ones(count, count, dtype=torch.bool).tril())
            for state, count in zip(states, counts, strict=True)
        ]
        tokens = torch.tensor([token for after, count in zip(ids, counts, strict=True) for token in after[:count]])
        features = torch.cat([state.features[:count] for state, count in zip(states, counts, strict=True)])
        outputs, hidden = self._run(tokens, self.net.fuse(features), parts)
        last = torch.tensor(counts).cumsum(0) - 1
        for state, count, row in zip(states, counts, last.tolist(), strict=True):
            self.slots.kv.commit(state.slot, range(count))
            state.features, state.tokens, state.is_behind = state.features[count:], [], False
            state.outputs = outputs[row : row + 1]
        return hidden[last]

    @torch.inference_mode()
    def _grow(self, members: Sequence[tuple[EagleState, range]], frontier: Frontier) -> Tensor:
        """Write a level as scratch; outputs [F, H] for the LM head."""
        parts, features = [], []
        for state, nodes in members:
            above = frontier.parents[nodes.start : nodes.stop]
            features.append(state.outputs[state.scratch.rows_above(above)])
            before = len(state.scratch)
            visible = state.scratch.extend(frontier.tokens[nodes.start : nodes.stop], above, nodes.start)
            offsets = torch.tensor(state.scratch.depths) - 1
            parts.append(Rows(state.slot, len(nodes), offsets, visible, before))
        outputs, hidden = self._run(frontier.tokens, torch.cat(features), parts)
        for (state, _), rows in zip(members, outputs.split([part.count for part in parts]), strict=True):
            state.outputs = rows
        return hidden

    def _run(self, tokens: Tensor, features: Tensor, parts: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        embeddings = self.net.embed(tokens.to(self._device), self._table)
        positions = self.slots.positions(parts).to(self._device)
        outputs: tuple[Tensor, Tensor] = self.net(embeddings, features, positions, self.slots.attention(parts))
        return outputs

    def _keep(self, state: EagleState, features: Tensor | None) -> None:
        assert features is not None, "needs.taps asks for features at every position"
        state.features = torch.cat([state.features, features.to(state.features)])
        known = self.slots.kv.lengths[state.slot] + len(state.features)
        if known > self._limit:
            state.is_beyond, state.features, state.tokens = True, self._no_features(), []

    def _no_features(self) -> Tensor:
        return torch.empty(0, self.net.fc.in_features, dtype=self._dtype, device=self._device)


SCRATCH_ROWS = 512
"""Room for one tree behind the committed rows."""


def _request(state: EagleState) -> DraftRequest:
    assert state.request is not None, "begin() comes before expand()"
    return state.request
