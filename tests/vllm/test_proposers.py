"""Our methods as vLLM's custom classes, on the real model with the drafters that ship."""

from pathlib import Path

import pytest

from tests.vllm.engines import engine, speculative

LENGTH, DRAFTS = 48, 7
LEAST = {"Union": ("domino", 1.6), "Graft": ("eagle3", 1.1), "DynaTree": ("eagle3", 1.1), "Retrieval": (None, 1.1)}
"""Drafter, and tokens per step that it reaches at least: a good part of what was measured."""


@pytest.fixture(scope="module")
def plain(smollm2: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What plain decoding says."""
    with engine(smollm2) as made:
        return made.generate(prompts[:8], LENGTH)


@pytest.mark.parametrize("name", LEAST)
def test_answers_are_plain_decodings_in_fewer_steps(
    name: str, smollm2: Path, shipped: dict[str, Path], prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """Guards against a method that changes an answer of a real model, and against drafts that are never right."""
    kind, wanted = LEAST[name]
    ours = {"least_gain": 0.3} | ({} if kind is None else {"drafter": str(shipped[kind])})
    speculation = speculative("custom_class", f"outpace.vllm.proposer.{name}", DRAFTS)
    with engine(smollm2, speculation, additional_config={"outpace": ours}) as made:
        assert made.generate(prompts[:8], LENGTH) == plain
        _, accepted = made.counts()
    tokens = sum(len(answer) - 1 for answer in plain)
    assert tokens / (tokens - accepted) > wanted
