"""The one statistical verdict that tests use: how likely counts are under a distribution."""

from collections.abc import Sequence

from scipy.stats import chi2


def chi_square_p(counts: Sequence[int], distribution: Sequence[float]) -> float:
    """P-value of Pearson's chi-square test: the chance of counts at least this far from a true distribution.

    Args:
        counts: how often each outcome was seen.
        distribution: probability of each outcome; rare ones should have been pooled so that about 5 are expected of
            each.
    """
    total = sum(counts)
    if any(count and not probability for count, probability in zip(counts, distribution, strict=True)):
        return 0.0
    cells = [
        (count, total * probability) for count, probability in zip(counts, distribution, strict=True) if probability
    ]
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return float(chi2.sf(statistic, len(cells) - 1))
