"""Whole lives of an engine (`fuzz.py`), some for every change; campaigns of thousands are in docs/promises.md."""

import pytest

from outpace.engine.engine import Steps
from tests.sessions.fuzz import campaign


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 34), marks=pytest.mark.slow)], ids=["few", "many"])
def test_every_answer_is_plain_decodings_whatever_happens(seeds: range) -> None:
    """Guards against answers that depend on what others ask, cancel, drop, keep, break or interrupt beside them, and
    against slots that are not free in the end."""
    total = campaign(seeds)
    assert total["answers"] > 20 * len(seeds)
    for happening in ("cancels", "drops", "exceptions", "refused", "resets", "reads", "faults of methods"):
        assert total[happening], f"{happening} must happen"
    assert total["lost"] < total["answers"] / 20, "a request that cannot be restored is rare"


def test_lives_find_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against lives in which nothing can go wrong: where steps are not rolled back, they notice."""
    monkeypatch.setattr(Steps, "_roll_back", lambda self, session: None)
    with pytest.raises((AssertionError, RuntimeError)):
        campaign(range(10))
