"""Our methods as vLLM's custom classes, on a random target: what is wired wrongly shows whatever models say."""

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import engine, speculative
from tests.vllm.tiny import Tiny

PROMPTS = [[5, 9, 14, 200, 31, 5, 9, 14], [7, 7, 300, 7, 7], [11, 12, 13, 11, 12], list(range(20, 60))]
CLASSES = {
    "Matrix": None,
    "Lookup": None,
    "Automaton": None,
    "Retrieval": None,
    "Graft": "eagle3",
    "DynaTree": "eagle3",
    "Union": "domino",
}


def custom(name: str, drafts: int = 4) -> dict[str, Any]:
    """The `speculative_config` of one of our classes."""
    return speculative("custom_class", f"outpace.vllm.proposer.{name}", drafts)


def settings(drafter: Path | None, **more: Any) -> dict[str, Any]:
    """The `additional_config` with some settings of ours."""
    named = {} if drafter is None else {"drafter": str(drafter)}
    return {"additional_config": {"outpace": {**named, **more}}}


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> list[list[int]]:
    """What plain decoding says."""
    with engine(tiny.target) as made:
        return made.generate(PROMPTS, 32)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_says_what_plain_decoding_says(name: str, tiny: Tiny, plain: list[list[int]]) -> None:
    """Guards against drafts that change an answer, alone or in a batch, and against a proposer that fails and hides
    behind plain decoding."""
    kind = CLASSES[name]
    options = settings(None if kind is None else getattr(tiny, kind), least_gain=0.0)
    with engine(tiny.target, custom(name), **options) as made:
        assert made.generate(PROMPTS, 32) == plain
        assert [made.generate([prompt], 32) for prompt in PROMPTS] == [[answer] for answer in plain]
        assert made.runner.drafter._rounds is not None
        assert made.counts()[0] > 0
