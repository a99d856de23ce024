"""The same drafters in our own engine: what they draft at every context of an answer."""

from collections.abc import Sequence
from pathlib import Path

import outpace
from outpace.core.params import SamplingParams
from tests.vllm.engines import Proposed

Drafts = dict[tuple[int, ...], list[int]]


def our_drafts(
    model: Path, method: str, drafter: Path, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[list[list[int]], Drafts]:
    """Answers, and the chain drafted behind each context, prompt and pending token included."""
    loaded = outpace.load(str(model), method, drafter=str(drafter), dtype="float32", device="cpu", max_model_len=512)
    params = SamplingParams(max_new_tokens=max_tokens, ignore_eos=True, trace=True)
    answers, drafts = [], {}
    for prompt in prompts:
        said: list[int] = []
        for event in loaded.stream(list(prompt), params=params):
            known = len(said)
            for round_ in event.rounds:
                context = (*prompt, *said[:known])
                assert context[-1] == round_.tokens[0]
                assert list(round_.parents) == list(range(-1, len(round_.tokens) - 1)), "a chain"
                drafts[context] = list(round_.tokens[1:])
            said += event.tokens
        answers.append(said)
    return answers, drafts


def assert_same_drafts(ours: Drafts, recorded: Sequence[Proposed], at_least: int) -> None:
    """Compare drafts at the contexts that both engines came by. `at_least`: contexts that must have been compared, as a
    share of ours in percent."""
    theirs = {
        tuple(context): drafts for step in recorded for context, drafts in zip(step.context, step.drafts, strict=True)
    }
    both = [context for context in ours if context in theirs and ours[context]]
    assert len(both) * 100 >= at_least * len(ours), (len(both), len(ours))
    different = [context for context in both if theirs[context][: len(ours[context])] != ours[context]]
    assert not different, [(len(one), ours[one], theirs[one]) for one in different[:3]]
