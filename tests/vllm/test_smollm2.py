"""The real model with the drafters that ship, as vLLM is given them."""

from pathlib import Path

import pytest

from outpace.vllm.speculation import PROPOSER
from tests.vllm.engines import engine, speculative
from tests.vllm.ours import assert_same_drafts, our_drafts

LENGTH, DRAFTS = 48, 7
LEAST = {
    "outpace": ("domino", 1.6),
    "graft": ("eagle3", 1.1),
    "eagle3:shape=dynatree": ("eagle3", 1.1),
    "outpace:draft=none": (None, 1.1),
}
"""By method, its drafter, and tokens per step that it reaches at least: a good part of what was measured."""


@pytest.fixture(scope="module")
def plain(smollm2: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Answers without speculation."""
    with engine(smollm2) as made:
        return made.generate(prompts, LENGTH)


@pytest.mark.thorough  # `make test-vllm` has it, its quick part has not
def test_domino_drafts_here_what_it_drafts_there(
    plain: list[list[int]], smollm2: Path, shipped: dict[str, Path], prompts: list[list[int]]
) -> None:
    """Guards against a drafter that ships and drafts something else in vLLM: its ranked vocabulary, its narrow W2 and
    its export from 8 bits included. Without its head fewer drafts must be accepted."""
    answers, ours = our_drafts(smollm2, "domino", shipped["domino"], prompts, LENGTH)
    with engine(smollm2, speculative("dflash", shipped["domino"], DRAFTS)) as made:
        head, before, recorded = made.drafter.head, made.counts(), made.record()
        assert made.generate(prompts, LENGTH) == plain == answers
        assert_same_drafts(ours, list(recorded), at_least=90)
        with_head = made.counts()
        head.config = head.config.model_copy(update={"pure_draft_prefix_len": head.config.block_size - 1})
        assert made.generate(prompts, LENGTH) == plain
        without = made.counts()
    pairs = ((before, with_head), (with_head, without))
    shares = [(now[1] - then[1]) / (now[0] - then[0]) for then, now in pairs]
    assert shares[0] > shares[1] > 0


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "drafts"), [("dflash", DRAFTS), ("eagle3", 3)])
def test_other_drafters_that_ship_load(
    plain: list[list[int]], smollm2: Path, shipped: dict[str, Path], prompts: list[list[int]], kind: str, drafts: int
) -> None:
    """Guards against exports that stock vLLM refuses, and a drafter that is never right."""
    with engine(smollm2, speculative(kind, shipped[kind], drafts)) as made:
        assert made.generate(prompts, LENGTH) == plain
        drafted, accepted = made.counts()
        assert accepted > 0.05 * drafted


@pytest.mark.parametrize("method", LEAST)
def test_answers_are_plain_decodings_in_fewer_steps(
    method: str, smollm2: Path, shipped: dict[str, Path], prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """Guards against a method that changes an answer of a real model, and against drafts that are never right."""
    kind, wanted = LEAST[method]
    ours = {"method": method, "least_gain": 0.3} | ({} if kind is None else {"drafter": str(shipped[kind])})
    speculation = speculative("custom_class", PROPOSER, DRAFTS)
    with engine(smollm2, speculation, additional_config={"outpace": ours}) as made:
        assert made.generate(prompts[:8], LENGTH) == plain[:8]
        _, accepted = made.counts()
    tokens = sum(len(answer) - 1 for answer in plain[:8])
    assert tokens / (tokens - accepted) > wanted
