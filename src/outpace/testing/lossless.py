"""The assertion that a method changes the speed and never the output."""

from collections.abc import Callable, Sequence

from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.trees.proposer import EmptyDraft


def decode(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], proposers: Sequence[Proposer]
) -> list[Session]:
    """Decode prompts together, each with its own parameters and proposer; sessions in order, all ended."""
    sessions = []
    for prompt, wanted, proposer in zip(prompts, params, proposers, strict=True):
        sessions += engine.add(prompt, wanted, proposer)
    while not engine.is_idle:
        engine.step()
    return sessions


def assert_lossless(
    make_engine: Callable[[], Engine],
    make_proposer: Callable[[list[list[int]]], Proposer],
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
) -> list[Session]:
    """Assert that a method emits what plain decoding emits, alone and in a batch.

    Args:
        make_engine: a fresh engine; it must need no tokenizer.
        make_proposer: the method, given the full sequences (prompt and answer) that plain decoding produced, which
            an oracle may use.
    """
    if len(prompts) != len(params):
        raise ValueError(f"{len(prompts)} prompts and {len(params)} params: give one SamplingParams per prompt")
    engine = make_engine()
    pairs = list(zip(prompts, params, strict=True))
    plain = [one for prompt, wanted in pairs for one in decode(engine, [prompt], [wanted], [EmptyDraft()])]
    proposer = make_proposer([session.ids for session in plain])
    alone = [one for prompt, wanted in pairs for one in decode(engine, [prompt], [wanted], [proposer])]
    batched = decode(make_engine(), prompts, params, [proposer] * len(prompts))
    _compare("alone", plain, alone)
    _compare("in a batch", plain, batched)
    return batched


def _compare(run: str, expected: Sequence[Session], actual: Sequence[Session]) -> None:
    for index, sessions in enumerate(zip(expected, actual, strict=True)):
        want, got = ([*one.generated, one.finish_reason, one.stop_reason] for one in sessions)
        if want != got:
            place = next(place for place, (left, right) in enumerate(zip(want, got)) if left != right)
            raise AssertionError(
                f"sequence {index} {run}: from token {place} on {got[place:]}, plain decoding has {want[place:]}"
            )
