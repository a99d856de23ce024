"""Non-finite logits beside the path: speculation must not fail where plain decoding would not look."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.engine.engine import Engine
from outpace.testing import AdversaryDrafter, ToyTarget, decode
from outpace.trees.proposer import EmptyDraft

PROMPT = [1, 2, 3]


class SoundOnlyOn(ToyTarget):
    """Finite logits for the prefixes of one sequence, NaN after anything else."""

    def __init__(self, sequence: Sequence[int]) -> None:
        super().__init__(vocab_size=12, seed=4)
        self._sequence = list(sequence)

    def logits(self, ids: Sequence[int], position: int) -> Tensor:
        logits = super().logits(ids, position)
        is_known = self._sequence[: len(ids)] == list(ids)
        return logits if is_known else torch.full_like(logits, torch.nan)


@pytest.mark.parametrize(("temperature", "verification"), [(0.0, "match"), (0.9, "match"), (0.0, "rejection")])
def test_nan_in_a_branch_not_taken_changes_nothing(temperature: float, verification: str) -> None:
    """Guards against a request that fails only because a wrong draft was looked at: half precision overflows there."""
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=2, verification=verification)
    (plain,) = decode(Engine(ToyTarget(vocab_size=12, seed=4)), [PROMPT], [params], [EmptyDraft()])
    drafter = AdversaryDrafter(12, [plain.ids], budget=10, truth=0.6)
    (session,) = decode(Engine(SoundOnlyOn(plain.ids)), [PROMPT], [params], [drafter])
    assert session.error is None
    assert session.generated == plain.generated
    assert any(len(observation.tree) - 1 > observation.verdict.accepted_drafts for observation in drafter.observations)
