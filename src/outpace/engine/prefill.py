"""Prompts, written chunk by chunk, and the first token drawn from their last position."""

from collections.abc import Sequence

import torch

from outpace.core.protocols import NO_TOKEN, Chunk, PromptChunk, Target, Verdict
from outpace.core.tree import Topology
from outpace.engine.gain import Gain
from outpace.engine.round import FAST_DRAW, by_proposer, keep_sound, logprobs
from outpace.sampling.draw import BatchDraw


def run_prefill(target: Target, gains: Sequence[Gain], size: int, is_crowded: bool = False) -> None:
    """Write the next chunk of every prompt; a prompt that is written whole gains its first token.

    Args:
        target: the model; each session has a slot in it.
        gains: of requests whose prompts are not written yet.
        size: tokens of a chunk at most.
        is_crowded: drafting does not pay among so many requests. Methods that follow prices then learn nothing from the
            target's best ids in a prompt, which are a product with the whole vocabulary at every position.
    """
    sessions, chunks = [gain.session for gain in gains], []
    for gain in gains:
        session, needs = gain.session, gain.session.proposer.needs
        assert session.slot is not None
        gain.prefilled = min(session.prefilled + size, len(session.prompt_ids))
        tokens = torch.tensor(session.prompt_ids[session.prefilled : gain.prefilled])
        is_last = gain.prefilled == len(session.prompt_ids)
        is_spared = is_crowded and (session.is_priced or session.is_sized)
        chunks.append(Chunk(session.slot, tokens, needs.top_k > 0 and not is_spared, is_last, needs.taps))
    outputs = target.prefill(chunks)
    for proposer, members in by_proposer(sessions).items():
        states = [sessions[index].state for index in members]
        seen = []
        for index in members:
            session, output = sessions[index], outputs[index]
            before = session.prompt_ids[session.prefilled - 1] if session.prefilled else NO_TOKEN
            seen.append(PromptChunk(chunks[index].tokens, output.top_ids, output.features, before))
        proposer.prefill(states, seen)
    ready = [(gain, output.last) for gain, output in zip(gains, outputs, strict=True) if output.last is not None]
    if not ready:
        return
    first, last = [gain for gain, _ in ready], [output for _, output in ready]
    pending = [[gain.session.prompt_ids[-1]] for gain in first]
    draw = BatchDraw(
        last, [Topology.chain(1)] * len(first), pending, [gain.session.stream for gain in first], FAST_DRAW
    )
    drawn = draw([(index, 0) for index in range(len(first))])
    verdicts = keep_sound(first, last, [Verdict((0,), token) for token in drawn], pending)
    for index, verdict in verdicts.items():
        token = verdict.next_token
        first[index].emit([token], logprobs(first[index].session, last[index], (0,), [token]))
