"""What a drafted token must bring, by the clocks of passes."""

import pytest

from outpace.budget.costs import LEAST_GAIN, RowPrice


def learned(base_ms: float, row_ms: float, tokens: int = 1) -> RowPrice:
    price = RowPrice()
    for step in range(200):
        rows = 1 + step % 4
        price.learn(rows, tokens, base_ms + row_ms * rows, 1.0)
    return price


def test_it_is_what_a_row_takes_of_the_time_of_a_token() -> None:
    """Guards against drafts in a batch that computes at its limit, where each row costs as much as it can bring."""
    assert learned(20.0, 5.0).least_gain == pytest.approx(5.0 / (20 + 12.5 + 1) / (1 + 0.25 / 1.25), rel=0.05)
    assert learned(20.0, 0.0).least_gain == 0.05
    assert learned(1.0, 30.0, tokens=3).least_gain == 0.95


def test_passes_that_do_not_differ_leave_rows_cheap() -> None:
    """Guards against a price that can never fall again: where nothing is drafted all passes are alike."""
    price = learned(20.0, 20.0)
    assert price.least_gain > 0.2
    for _ in range(400):
        price.learn(1, 1, 20.0, 1.0)
    assert price.least_gain == 0.05


def test_slow_passes_do_not_decide() -> None:
    """Guards against a price that follows a few passes, the first of which are slow, or a pause of the process."""
    price = RowPrice()
    for _ in range(10):
        price.learn(1, 1, 1000.0, 1.0)
    assert price.least_gain == LEAST_GAIN
    price = learned(20.0, 1.0)
    before = price.least_gain
    price.learn(4, 1, 60_000.0, 1.0)
    assert price.least_gain < before + 0.3
