"""vLLM's steps as rounds of a proposer: new tokens of each row are observed, then a chain is drafted.

A step has been verified when this is called: a round ends here and the next one begins. vLLM passes for each row its
ids and the new ones; the pass shows where its query began. A query that reaches beyond the ids known before had drafts,
of which all but the last new id were accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outpace.core.params import SamplingParams
from outpace.core.protocols import (
    NO_TOKEN,
    DraftRequest,
    NodeOutputs,
    Observation,
    PromptChunk,
    Proposer,
    SamplingContext,
    Verdict,
)
from outpace.vllm.capture import TargetPass
from outpace.vllm.tracked import Ids, RowRoster, Tracked

_NO_LOGITS = torch.empty(0)
_PARAMS = SamplingParams()  # vLLM passes no sampling parameters: the likeliest tokens are drafted for all


@dataclass(frozen=True, eq=False)
class BatchPlace:
    """One row of a step. `sampled`: the new ones of its `ids`; empty while its prompt is being written. `query`: the
    row's tokens in the pass; None if the pass was not captured."""

    ids: Ids
    sampled: Sequence[int]
    query: range | None = None
    position: int = 0
    drafts: int = 0
    best: range = range(0)

    @property
    def known(self) -> int:
        """Number of ids before the step."""
        return len(self.ids) - len(self.sampled)

    @property
    def end(self) -> int:
        """End of the row's positions that the pass computed and whose ids are final; 0 without a pass."""
        if self.query is None:
            return 0
        accepted = max(len(self.sampled) - 1, 0) if self.drafts else 0
        return min(self.position + len(self.query), self.known) + accepted


class Rounds:
    """Drives a proposer by the rows of vLLM's batches.

    Args:
        slots: number of texts to draft for at a time; other rows get no drafts.
        ending_ids: ids behind which nothing is drafted.
    """

    def __init__(
        self,
        proposer: Proposer,
        slots: int,
        max_length: int,
        most: int,
        ending_ids: tuple[int, ...] = (),
    ) -> None:
        self._proposer, self._max_length, self._most = proposer, max_length, most
        self._ending_ids = ending_ids
        self._sees_features = bool(proposer.needs.taps)
        self.roster, self._step = RowRoster(slots, max_length + 1), 0

    @torch.inference_mode()
    def step(
        self,
        sampled: Sequence[Sequence[int]],
        lengths: Any,
        token_ids: Any,
        seen: TargetPass | None,
        drafts: bool = True,
    ) -> list[list[int]]:
        """Observe the result of a step, and draft for the next one.

        Args:
            token_ids: [rows, max_length] ids.
            seen: the step's pass; None if nothing is known of it.
            drafts: whether to draft. If not, proposers get a budget of 0: they observe the next step as a round, and
                not as a prompt, which would have to be read again.

        Returns:
            The drafts of each row, possibly none.
        """
        self._step += 1
        rows = _rows(sampled, lengths, token_ids, seen)
        found = self.roster.claim([row.ids[: row.known] for row in rows], self._step)
        texts: list[tuple[BatchPlace, Tracked]] = []
        places: list[int] = []
        for place, row in enumerate(rows):
            text = found[place] or self._begin(row, place)
            if text is not None:
                texts.append((row, text))
                places.append(place)
        self._show(texts, seen)
        drafted: list[list[int]] = [[] for _ in rows]
        for index, tokens in self._draft(texts, self._proposer.budget if drafts else 0):
            drafted[places[index]] = tokens
        return drafted

    def _begin(self, row: BatchPlace, place: int) -> Tracked | None:
        """A new text for a row without one: a fork of a text with a common prefix, or empty. None without a free
        slot."""
        free = self.roster.room(self._step)
        if free is None:
            return None
        slot, gone = free
        other, shared = (None, 0)
        if self._sees_features and row.position and self._proposer.can_fork(True):
            other, shared = self.roster.nearest(row.ids[: row.known])
            if gone is not None and (own := gone.shared(row.ids[: row.known])) > shared:
                other, shared = gone, own
        # Drafters of pairs keep, with the features of an id, the token after it (`engine.admission`). So the last
        # common id is left out, unless vLLM had it in its cache: then its features are not in this pass.
        shared = min(max(shared - 1, row.position), shared)
        length = 0 if other is None else min(shared, other.written, row.known - 1)
        if other is not None and length >= row.position and length > other.offset:
            text = self.roster.add(
                slot, self._proposer.fork(other.state, slot, length - other.offset), self._step, place
            )
            text.offset, text.written, text.is_prompt = other.offset, length, False
        else:
            text = self.roster.add(slot, None, self._step, place)
            self._restart(text, row.position)
        if gone is not None:
            self._proposer.close(gone.state)
        text.extend(row.ids[: row.known])
        return text

    def _restart(self, text: Tracked, position: int) -> None:
        """Restart a text at `position`, whose earlier features were not captured: drafts then depend on less
        context."""
        text.state, text.written = self._proposer.open(text.slot), position
        text.offset = position if self._sees_features else 0
        text.tokens = text.ids[text.offset : text.length].tolist()
        text.tree, text.is_prompt = None, True

    def _show(self, texts: Sequence[tuple[BatchPlace, Tracked]], seen: TargetPass | None) -> None:
        """Show the proposer the new tokens of each text."""
        states, observations, filling, chunks = [], [], [], []
        for row, text in texts:
            if row.position > text.written:  # some positions were not captured
                if self._sees_features:
                    self._proposer.close(text.state)
                    self._restart(text, row.position)
                text.written = row.position
            observation = None if seen is None else _observation(row, text, seen, self._proposer.needs.top_k)
            chunk = None
            if observation is not None:
                states.append(text.state)
                observations.append(observation)
            else:
                if not text.is_prompt:
                    self._proposer.rewind(text.state, text.written - text.offset)
                chunk = self._chunk(row, text, seen)
            if chunk is not None:
                filling.append(text.state)
                chunks.append(chunk)
            text.extend(row.ids)
            unseen = text.length - 1 if row.sampled and not self._sees_features else 0
            text.written = max(row.end, text.written, unseen)
            text.tree, text.is_prompt = None, observation is None
        if observations:
            self._proposer.observe(states, observations)
        if chunks:
            self._proposer.prefill(filling, chunks)

    def _chunk(self, row: BatchPlace, text: Tracked, seen: TargetPass | None) -> PromptChunk | None:
        """The row's new positions with final ids, as a chunk of a prompt; None if there are none or they were not
        captured."""
        if seen is None or row.query is None or text.written >= row.end or text.written < row.position:
            return None
        first = row.query.start + text.written - row.position
        span = slice(first, first + row.end - text.written)
        # Without best ids: their product with the head at every position takes a fifth of the time to the first token,
        # and in our own engine methods that follow prices draft as much without (`engine.prompts`).
        return PromptChunk(
            torch.from_numpy(row.ids[text.written : row.end].astype("int64")),
            features=None if seen.features is None else seen.features[span],
            before=int(row.ids[text.written - 1]) if text.written else NO_TOKEN,
        )

    def _draft(self, texts: Sequence[tuple[BatchPlace, Tracked]], budget: int) -> list[tuple[int, list[int]]]:
        """Chains for the texts that are decoding, with all earlier features known, below the context's limit."""
        asked: list[tuple[int, Tracked]] = []
        requests = []
        for index, (row, text) in enumerate(texts):
            depth = min(self._most, self._max_length - text.length - 1)
            is_behind = self._sees_features and text.written < text.length - 1
            if not row.sampled or depth < 1 or is_behind:
                continue
            context = SamplingContext(_PARAMS, 0, 0, text.tokens, eos_token_ids=self._ending_ids)
            asked.append((index, text))
            requests.append(DraftRequest(context, budget, depth))
        trees = self._proposer.propose([text.state for _, text in asked], requests) if asked else []
        drafts = []
        for (index, text), tree in zip(asked, trees, strict=True):
            assert tree.topology.is_chain, "vLLM verifies chains only"
            text.tree, text.is_prompt = tree, False
            drafts.append((index, tree.tokens[1:].tolist()))
        return drafts


def _rows(sampled: Sequence[Sequence[int]], lengths: Any, token_ids: Any, seen: TargetPass | None) -> list[BatchPlace]:
    """The rows of a step."""
    rows, best = [], 0
    matches = seen is not None and len(seen.positions) == len(sampled)
    for place, new in enumerate(sampled):
        ids = token_ids[place, : int(lengths[place])]
        if seen is None or not matches:
            rows.append(BatchPlace(ids, new))
            continue
        query = range(seen.starts[place], seen.starts[place + 1])
        drafts = max(seen.positions[place] + len(query) - (len(ids) - len(new)), 0)
        rows.append(BatchPlace(ids, new, query, seen.positions[place], drafts, range(best, best + drafts + 1)))
        best += drafts + 1
    return rows


def _observation(row: BatchPlace, text: Tracked, seen: TargetPass, top_k: int) -> Observation | None:
    """The verified chain that was proposed for a text; None if this step did not verify it, or was not captured well
    enough."""
    if text.tree is None or row.query is None or not row.sampled:
        return None
    drafted = seen.tokens[row.query.start + 1 : row.query.stop]
    is_round = row.position == text.written == row.known - 1 and len(row.query) == row.drafts + 1
    if not is_round or len(row.sampled) > row.drafts + 1 or text.tree.tokens[1 : row.drafts + 1].tolist() != drafted:
        return None
    top_ids = torch.empty(len(row.query), 0, dtype=torch.int64)
    if top_k:
        if seen.top_ids is None or row.best.stop > len(seen.top_ids):
            return None
        top_ids = seen.top_ids[row.best.start : row.best.stop]
    features = None if seen.features is None else seen.features[row.query.start : row.query.stop]
    verdict = Verdict(tuple(range(len(row.sampled))), row.sampled[-1])
    outputs = NodeOutputs(_NO_LOGITS, top_ids, _NO_LOGITS, features)
    before = text.tokens[-2] if len(text.tokens) > 1 else NO_TOKEN
    return Observation(text.tree.keeping(list(range(row.drafts + 1))), verdict, outputs, before)
