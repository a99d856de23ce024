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
    plain = [decode(engine, [prompt], [wanted], [EmptyDraft()]) for prompt, wanted in zip(prompts, params, strict=True)]
    sequences = [session.ids for sessions in plain for session in sessions]
    proposer = make_proposer(sequences)
    alone = [decode(engine, [prompt], [wanted], [proposer]) for prompt, wanted in zip(prompts, params, strict=True)]
    batched = decode(make_engine(), prompts, params, [proposer] * len(prompts))
    expected = [session for sessions in plain for session in sessions]
    _compare("alone", expected, [session for sessions in alone for session in sessions])
    _compare("in a batch", expected, batched)
    return batched


def _compare(run: str, expected: Sequence[Session], actual: Sequence[Session]) -> None:
    for index, (want, got) in enumerate(zip(expected, actual, strict=True)):
        pairs = zip(want.generated, got.generated)
        place = next((place for place, (left, right) in enumerate(pairs) if left != right), None)
        if place is not None:
            raise AssertionError(
                f"sequence {index} {run}: token {place} is {got.generated[place]}, plain decoding has "
                f"{want.generated[place]}"
            )
        if (want.generated, want.finish_reason, want.stop_reason) != (
            got.generated,
            got.finish_reason,
            got.stop_reason,
        ):
            raise AssertionError(
                f"sequence {index} {run}: {len(got.generated)} tokens, {got.finish_reason} {got.stop_reason}; plain "
                f"decoding has {len(want.generated)}, {want.finish_reason} {want.stop_reason}"
            )
