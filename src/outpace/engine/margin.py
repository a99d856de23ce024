"""How close a decision between two tokens was: the evidence that distinguishes a rounding tie from a bug."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outpace.core.params import Constraint, SamplingParams
from outpace.core.protocols import Chunk, Target
from outpace.engine.engine import Engine
from outpace.lib.errors import InvalidRequest
from outpace.sampling.noise import gumbel, noise_key
from outpace.sampling.warp import History, cutoff_distance, process, warp

_CHUNK = 256  # rows of a pass


@dataclass(frozen=True)
class Margin:
    """How far apart two candidate tokens were.

    Attributes:
        between: difference of the two tokens' deciding scores: logits when greedy, log p + g when sampling, penalties
            and biases applied. None if one of them could not be drawn at all.
        to_cutoff: distance in nats of the nearer of them to a top-k, top-p or min-p cut-off; None without one.
        top2: difference between the best two scores at the position, whichever tokens they are.
    """

    between: float | None
    to_cutoff: float | None
    top2: float

    @property
    def smallest(self) -> float:
        """The smallest rounding error that could have changed the decision between the two tokens."""
        known = [value for value in (self.between, self.to_cutoff) if value is not None]
        return min(known) if known else float("inf")


def margin_of(
    engine: Engine, ids: Sequence[int], params: SamplingParams, tokens: tuple[int, int], prompt_length: int
) -> Margin:
    """`decision_margin` between the steps of an engine, in a free slot."""

    def compare(slot: int) -> Margin:
        limits = engine.constraint(params)
        return decision_margin(engine.target, ids, params, tokens, prompt_length, slot=slot, constraint=limits)

    return engine.with_spare_slot(compare)


@torch.inference_mode()
def decision_margin(
    target: Target,
    ids: Sequence[int],
    params: SamplingParams,
    tokens: tuple[int, int],
    prompt_length: int,
    slot: int,
    constraint: Constraint | None = None,
) -> Margin:
    """Score the two tokens that two runs chose after the same ids.

    Raises:
        InvalidRequest: sampling parameters without a seed, or under rejection.
    """
    if params.is_rejection:
        raise InvalidRequest(
            "verification='rejection': its result also depends on the drafted tokens, so no margin explains a "
            "difference between two runs; compare runs with verification='match'"
        )
    if params.seed is None and not params.is_greedy:
        raise InvalidRequest("seed=None: noise decided between sampled tokens; give the seed that the answer reports")
    target.rewind_slot(slot, 0)
    chunks = torch.tensor(ids).split(_CHUNK)
    for number, chunk in enumerate(chunks, start=1):
        (output,), _ = target.run_pass([Chunk(slot, chunk, want_top=False, is_last=number == len(chunks))], (), ())
    last = output.last
    assert last is not None, "ids holds the prompt, so there is a last position"
    eos = target.eos_token_ids if params.eos_token_ids is None else params.eos_token_ids
    history = History(ids[:prompt_length], ids[prompt_length:], eos)
    logits, cutoff = last.scores(0), float("inf")
    allowed = None if constraint is None else constraint.mask(ids[prompt_length:], len(logits))
    if allowed is not None:
        logits = logits.masked_fill(~allowed.to(logits.device), -torch.inf)
    if params.is_greedy:
        scores = process(logits[None], params, [history])[0]
    else:
        assert params.seed is not None, "checked above"
        noise = gumbel([noise_key(params.seed, 0, len(ids))], torch.arange(len(logits), device=logits.device))
        scores = warp(logits[None], params, [history])[0] + noise[0]
        cutoff = min(cutoff_distance(logits, params, token, history) for token in tokens)
    best = scores.topk(2).values
    first, second = float(scores[tokens[0]]), float(scores[tokens[1]])
    between = abs(first - second) if torch.isfinite(scores[list(tokens)]).all() else None
    return Margin(between, None if cutoff == float("inf") else cutoff, float(best[0] - best[1]))
