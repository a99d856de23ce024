"""The acceptance model's table."""

import numpy as np
import pytest

from outpace.budget.decisions import AcceptanceTable


def test_cells_are_running_means_with_a_prior() -> None:
    """Guards against a wrong mean, drafts of one cell that count once, and cells that affect each other."""
    table = AcceptanceTable([0.5, 0.2, 0.9], count=4.0)
    table.learn([0, 0, 2], [True, True, False])
    assert table.rates == pytest.approx([(0.5 * 4 + 2) / 6, 0.2, 0.9 * 4 / 5])
    assert table.estimate([0, 1], [0.1, 0.3], 4.0) == pytest.approx([(4 + 0.4) / 10, (0.8 + 1.2) / 8])


def test_older_drafts_fade() -> None:
    """Guards against rates that thousands of old drafts hold where they were."""
    table = AcceptanceTable(np.zeros(2), memory=500)
    for accepted, rounds in ((True, 5000), (False, 1000)):
        for _ in range(rounds):
            table.learn([1], [accepted])
    assert table.rates[1] == pytest.approx(np.exp(-2), abs=0.01)
    table.learn(np.ones(2000, dtype=np.int64), np.ones(2000))
    assert table.rates[1] == 1.0
