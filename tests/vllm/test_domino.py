"""Domino in vLLM: drafts are our own engine's, answers plain decoding's, and nobody else's drafter is touched."""

from pathlib import Path

import pytest
import torch

from tests.vllm.engines import engine, speculative
from tests.vllm.ours import assert_same_drafts, our_drafts
from tests.vllm.tiny import BLOCK, VOCAB, Tiny, write_ranked

PROMPTS = [[5, 9, 14, 200, 31], [7, 7, 300], [44, 101, 6, 6, 80, 12, 90]]
LENGTH = 24


@pytest.fixture(scope="module")
def wanted(tiny: Tiny) -> list[list[int]]:
    """Plain vLLM's answers."""
    with engine(tiny.target) as plain:
        return plain.generate(PROMPTS, LENGTH)


@pytest.mark.parametrize("kind", ["domino", "shifted"])
def test_drafts_are_our_own_engines(tiny: Tiny, wanted: list[list[int]], kind: str) -> None:
    """Guards against a head that reads a position off, in either alignment."""
    folder = getattr(tiny, kind)
    answers, drafts = our_drafts(tiny.target, "domino", folder, PROMPTS, LENGTH)
    with engine(tiny.target, speculative("dflash", folder, BLOCK - 1)) as made:
        recorded = made.record()
        assert made.generate(PROMPTS, LENGTH) == wanted == answers
        assert_same_drafts(drafts, recorded, at_least=90)
        assert type(made.drafter).__name__ == "DominoForCausalLM"


def test_a_ranked_vocabulary_and_a_narrow_w2(tiny: Tiny, wanted: list[list[int]], tmp_path: Path) -> None:
    """Guards against drafts beyond the ids a drafter was trained for, and rows of W2 at other ids than their own."""
    folder, ranked = tmp_path / "ranked", torch.arange(0, VOCAB, 3)
    write_ranked(folder, tiny.domino, ranked, rows=torch.arange(0, VOCAB, 2))
    answers, drafts = our_drafts(tiny.target, "domino", folder, PROMPTS, LENGTH)
    with engine(tiny.target, speculative("dflash", folder, BLOCK - 1)) as made:
        recorded = made.record()
        assert made.generate(PROMPTS, LENGTH) == wanted == answers
        assert_same_drafts(drafts, recorded, at_least=90)
        drafted = {id_ for step in recorded for row in step.drafts for id_ in row}
        assert drafted <= set(ranked.tolist())


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_other_drafters_stay_vllms(tiny: Tiny, wanted: list[list[int]], kind: str) -> None:
    """Guards against a plugin that changes what is not its own."""
    folder, drafts = getattr(tiny, kind), BLOCK - 1 if kind == "dflash" else 3
    method = "dflash" if kind == "dflash" else "eagle3:shape=chain,budget=3"
    answers, ours = our_drafts(tiny.target, method, folder, PROMPTS, LENGTH)
    with engine(tiny.target, speculative(kind, folder, drafts)) as made:
        recorded = made.record()
        assert made.generate(PROMPTS, LENGTH) == wanted == answers
        assert_same_drafts(ours, recorded, at_least=90)
        assert type(made.drafter).__module__.startswith("vllm.")
