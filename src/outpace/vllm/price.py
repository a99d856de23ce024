"""What a drafted token must bring here: measured from the clocks of passes, where one rank alone decides."""

import numpy as np

from outpace.trees.linear_form import LEAST_GAIN

_FIRST = 16  # passes before anything is believed
_NEW = 0.02  # share of the last pass in what is known: some fifty are remembered
_SPREAD = 0.25  # rows squared: where passes hardly differ in rows, a row seems cheap, and what it costs is tried out
_SLOWEST = 3.0  # times the average: a pass that something else cut into counts as no slower
_LOWEST, _HIGHEST = 0.05, 0.95


class RowPrice:
    """The time that a further row of a pass takes, and what decoding yields in that time.

    A row is worth its time if it is accepted more often than that (`core.prices`). The time is the slope of a line
    through the passes of late: near nothing where passes wait for memory, and much where a batch computes.
    """

    def __init__(self) -> None:
        self._passes = 0
        self._means = np.zeros(6)  # rows, ms, rows squared, rows times ms, tokens, ms with drafting

    def learn(self, rows: int, tokens: int, pass_ms: float, draft_ms: float) -> None:
        """Take in a step that wrote no prompt.

        Args:
            rows: of its pass.
            tokens: that its requests gained.
            pass_ms: from the pass's beginning until its tokens were known.
            draft_ms: that learning from it and drafting behind it took.
        """
        if self._passes:
            pass_ms = min(pass_ms, _SLOWEST * float(self._means[1]))
        self._passes += 1
        seen = np.array([rows, pass_ms, rows**2, rows * pass_ms, tokens, pass_ms + draft_ms])
        self._means += (seen - self._means) * max(_NEW, 1 / self._passes)

    @property
    def least_gain(self) -> float:
        """Probability of acceptance below which a further token costs more than it brings."""
        if self._passes < _FIRST:
            return LEAST_GAIN
        rows, ms, squared, product, tokens, all_ms = self._means.tolist()
        row_ms = (product - rows * ms) / (squared - rows**2 + _SPREAD)
        return min(max(row_ms * tokens / all_ms, _LOWEST), _HIGHEST)
