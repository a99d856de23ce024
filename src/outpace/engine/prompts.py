"""Writes prompts in chunks: alone, or in the passes of requests that are being decoded."""

from collections.abc import Sequence

import torch

from outpace.core.protocols import NO_TOKEN, Chunk, ChunkOutput, NodeOutputs, PromptChunk, Verdict
from outpace.core.tree import Topology
from outpace.engine.session import Change, Session
from outpace.engine.validity import logprobs, valid_verdicts
from outpace.lib.places import places_of
from outpace.sampling.verification import BatchDraw

_OLDEST = 4  # the prompt that has waited longest gets one row in this many


def shares(missing: Sequence[int], rows: int) -> list[int]:
    """How many rows of a pass each prompt gets, possibly none.

    The prompt that has waited longest gets a fourth, so that it always advances; then prompts with the fewest missing
    rows come first, so that short ones do not wait for long ones.

    Args:
        missing: rows of each prompt that are not written, in order of arrival.
        rows: rows of the pass.
    """
    given = [0] * len(missing)
    by_size = sorted(range(len(missing)), key=missing.__getitem__)
    for index, most in [(0, -(-rows // _OLDEST)), *((index, rows) for index in by_size)]:
        more = min(missing[index] - given[index], most, rows)
        given[index], rows = given[index] + more, rows - more
    return given


class Prompts:
    """The next chunks of prompts, which one pass writes.

    Args:
        changes: those of the requests whose prompts are being written, in order of arrival.
        rows: rows of all chunks together, one or more.
        most: rows of one chunk at most.
    """

    def __init__(self, changes: Sequence[Change], rows: int, most: int) -> None:
        self._changes, self.chunks = list[Change](), list[Chunk]()
        missing = [min(len(change.session.prompt_ids) - change.session.prefilled, most) for change in changes]
        for change, count in zip(changes, shares(missing, rows), strict=True):
            if not count:
                continue
            session, needs = change.session, change.session.proposer.needs
            assert session.slot is not None
            change.prefilled = session.prefilled + count
            tokens = torch.tensor(session.prompt_ids[session.prefilled : change.prefilled])
            is_last = change.prefilled == len(session.prompt_ids)
            # A product with the whole vocabulary at every position delays the first token by a fifth. Methods that
            # follow prices draft as much without it: other texts and rounds teach their transitions enough.
            wants_top = needs.top_k > 0 and not session.is_priced
            self._changes.append(change)
            self.chunks.append(Chunk(session.slot, tokens, wants_top, is_last, needs.taps))

    @property
    def rows(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def context(self) -> int:
        """Average number of tokens written before the chunks."""
        return written_of([change.session for change in self._changes])

    def take(self, outputs: Sequence[ChunkOutput]) -> None:
        """Show proposers the chunks that were written. A completed prompt yields the first token of its answer."""
        sessions = [change.session for change in self._changes]
        for proposer, members in places_of(session.proposer for session in sessions).items():
            states = [sessions[index].state for index in members]
            seen = []
            for index in members:
                session, output = sessions[index], outputs[index]
                before = session.prompt_ids[session.prefilled - 1] if session.prefilled else NO_TOKEN
                seen.append(PromptChunk(self.chunks[index].tokens, output.top_ids, output.features, before))
            proposer.prefill(states, seen)
        pairs = zip(self._changes, outputs, strict=True)
        if ready := [(change, output.last) for change, output in pairs if output.last is not None]:
            _draw_first([change for change, _ in ready], [output for _, output in ready])


def written_of(sessions: Sequence[Session]) -> int:
    """Average number of prompt tokens that are written."""
    return sum(session.prefilled for session in sessions) // len(sessions)


def _draw_first(changes: Sequence[Change], outputs: Sequence[NodeOutputs]) -> None:
    pending = [[change.session.prompt_ids[-1]] for change in changes]
    contexts = [change.session.sampling for change in changes]
    draw = BatchDraw(outputs, [Topology.chain(1)] * len(changes), pending, contexts)
    drawn = draw([(index, 0) for index in range(len(changes))])
    verdicts = valid_verdicts(changes, outputs, [Verdict((0,), token) for token in drawn], pending)
    for index, verdict in verdicts.items():
        token = verdict.next_token
        changes[index].emit([token], logprobs(changes[index].session, outputs[index], (0,), [token]))
