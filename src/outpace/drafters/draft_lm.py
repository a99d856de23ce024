"""A draft language model as a source: a whole tree level for all requests in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.core.drafting import Candidates, Frontier
from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk
from outpace.models.draft import DraftModel, Growth
from outpace.sampling.scores import keyed_scores


@dataclass(eq=False)
class DraftState:
    """One request in the draft model. Its committed rows are a prefix of the request's ids; the rows of the tree
    that is growing lie behind them as scratch, level by level.

    Attributes:
        slot: of the draft model.
        told: prompt ids it has been shown, whether they have rows or not.
        request: the request of this round.
        parents: scratch row above each scratch row, -1 below the pending token.
        depths: depth of each scratch row.
        tokens: [n] tokens of each level's scratch rows.
        visible: [S, S] bool, the ancestors of each scratch row and itself.
        level: where this request's nodes begin in the last frontier, and where their rows begin in the scratch.
    """

    slot: int
    told: int = 0
    request: DraftRequest | None = None
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    visible: Tensor = field(default_factory=lambda: torch.ones(0, 0, dtype=torch.bool))
    level: tuple[int, int] = (0, 0)


class DraftLM:
    """Any causal LM with the target's tokenizer, or the target's own first layers.

    The first pass of a round writes the ids that are new since the last one, one to a few; each further level is one
    pass. An accepted path's rows are kept where they were computed, so no id is ever computed twice.

    Args:
        model: the draft model on its slots.
        vocab_size: of the target.
        noise: draft with the request's keyed noise at temperature > 0 rather than greedily.
    """

    def __init__(self, model: DraftModel, vocab_size: int, noise: bool = True) -> None:
        self.needs = Needs()
        self.model, self._vocab_size, self._noise = model, vocab_size, noise

    def open(self) -> DraftState:
        return DraftState(self.model.open_slot())

    def close(self, state: DraftState) -> None:
        self.model.close_slot(state.slot)

    def rewind(self, state: DraftState, length: int) -> None:
        self.model.rewind_slot(state.slot, length)
        state.told = length

    def reset(self) -> None:
        pass  # nothing outlives a request

    def prefill(self, states: Sequence[DraftState], chunks: Sequence[PromptChunk]) -> None:
        fits = []
        for state, chunk in zip(states, chunks, strict=True):
            # After a rewind a row or two may be missing; then the next round's first pass writes the prompt too.
            is_next = self.model.length(state.slot) == state.told
            state.told += len(chunk.tokens)
            if is_next and state.told <= self.model.max_length:
                fits.append((state.slot, chunk.tokens))
        if fits:
            self.model.fill([slot for slot, _ in fits], [ids for _, ids in fits])

    def begin(self, states: Sequence[DraftState], requests: Sequence[DraftRequest]) -> list[int]:
        """Start a round. Beyond the draft model's own context nothing is drafted."""
        for state, request in zip(states, requests, strict=True):
            state.request = request
            state.parents, state.depths, state.tokens = [], [], []
            state.visible = torch.ones(0, 0, dtype=torch.bool)
        return [min(request.max_depth, self.model.max_length - len(request.ids)) for request in requests]

    def expand(self, states: Sequence[DraftState], frontier: Frontier, width: int) -> Candidates:
        """Candidates of every frontier node from one pass: the `width` best by keyed score."""
        groups = frontier.groups()
        growths = []
        for owner, nodes in groups.items():
            state, tokens = states[owner], frontier.tokens[nodes.start : nodes.stop]
            parents = frontier.parents[nodes.start : nodes.stop]
            growths.append(self._catch_up(state) if parents[0] < 0 else self._extend(state, tokens, parents))
            state.level = (nodes.start, len(state.parents) - len(nodes))
        logits = self.model.grow(growths)[:, : self._vocab_size]
        if logits.shape[1] < self._vocab_size:
            logits = torch.nn.functional.pad(logits, (0, self._vocab_size - logits.shape[1]), value=-torch.inf)
        streams, depths, paths = [], [], []
        for (owner, nodes), growth in zip(groups.items(), growths, strict=True):
            state = states[owner]
            assert state.request is not None, "begin() comes before expand()"
            if not state.parents:
                self.model.commit(state.slot, range(len(growth.tokens)))
            streams += [state.request.stream] * len(nodes)
            depths += [state.depths[-1] if state.depths else 0] * len(nodes)
            paths += _paths(state, len(nodes))
        scores = keyed_scores(logits, streams, depths, self._noise, paths)
        log_probs, tokens = scores.topk(min(width, self._vocab_size), dim=-1)
        return Candidates(tokens, log_probs, passes=1)

    def observe(self, states: Sequence[DraftState], observations: Sequence[Observation]) -> None:
        """Keep the scratch rows of the accepted path. Its last node may have none: it was a leaf, and is caught up."""
        for state, observation in zip(states, observations, strict=True):
            if not state.parents:
                continue
            drafted = torch.cat(state.tokens).tolist()
            rows: list[int] = []
            accepted = observation.tree.tokens.tolist()
            for node in observation.verdict.path[1:]:
                above = rows[-1] if rows else -1
                row = next(
                    (
                        row
                        for row, (parent, token) in enumerate(zip(state.parents, drafted, strict=True))
                        if parent == above and token == accepted[node]
                    ),
                    None,
                )
                if row is None:
                    break
                rows.append(row)
            self.model.commit(state.slot, rows)

    def _catch_up(self, state: DraftState) -> Growth:
        """The ids without rows, the pending token last."""
        assert state.request is not None, "begin() comes before expand()"
        tokens = torch.tensor(state.request.ids[self.model.length(state.slot) :])
        count = len(tokens)
        visible = torch.ones(count, count, dtype=torch.bool).tril()
        return Growth(state.slot, tokens, torch.arange(count), visible, scratch=0, wanted=1)

    def _extend(self, state: DraftState, tokens: Tensor, above: Sequence[int]) -> Growth:
        """A level of nodes behind the levels above it."""
        scratch, count = len(state.parents), len(tokens)
        is_first = not state.parents
        start, first_row = state.level
        parents = [-1 if is_first else parent - start + first_row for parent in above]
        depth = 1 if is_first else state.depths[-1] + 1
        visible = torch.zeros(scratch + count, scratch + count, dtype=torch.bool)
        visible[:scratch, :scratch] = state.visible
        if not is_first:
            visible[scratch:, :scratch] = state.visible[parents]
        visible[scratch:, scratch:] = torch.eye(count, dtype=torch.bool)
        state.parents += parents
        state.depths += [depth] * count
        state.tokens.append(tokens)
        state.visible = visible
        # The pending token is committed, so depth 1 stands right behind the committed rows.
        offsets = torch.tensor(state.depths) - 1
        return Growth(state.slot, tokens, offsets, visible[scratch:], scratch, wanted=count)


def _paths(state: DraftState, count: int) -> list[list[int]]:
    """Drafted tokens down to each of the last `count` nodes, worked out only for requests that look at them."""
    assert state.request is not None, "begin() comes before expand()"
    if not state.request.stream.params.has_processors or not state.parents:
        return [[]] * count
    tokens = torch.cat(state.tokens).tolist()
    paths: list[list[int]] = []
    for row in range(len(state.parents)):
        above = state.parents[row]
        paths.append([*(paths[above] if above >= 0 else ()), tokens[row]])
    return paths[-count:]
