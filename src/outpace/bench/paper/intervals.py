"""95 % bootstrap intervals over prompts, wide enough where these are few."""

from collections.abc import Sequence

import numpy as np

from outpace.bench.paper.metrics import Numbers

FEWEST = 6  # prompts that an interval needs
Units = tuple[str, int]
"""What tells prompts from others, and the number of them, or of groups decoded together, in one run."""


def decides(units: Sequence[Units]) -> bool:
    """Whether prompts suffice for an interval: a single one shows no spread. Those of several runs, or under several
    names, count once: by the most of them, as runs group them differently."""
    return sum(_most(units).values()) >= FEWEST and min(count for _, count in units) > 1


def interval(numbers: Numbers, units: Sequence[Units], is_mean: bool = True) -> Numbers:
    """[2] the 95 % interval of a number over all prompts, the first, from those over bootstrap samples, the rest.
    Samples without a value, such as with no drafts, are left out.

    Few prompts vary more than their samples do: the variance of samples of n is (n - 1) / n of what it estimates, and
    the estimate itself varies, hence Student's t in place of the normal distribution (its quantile by an expansion).

    Args:
        units: those of each run and set, of which `decides` holds.
        is_mean: a mean over runs, not a difference between them. Runs that put the same prompts into groups of other
            sizes draw samples apart, though all of them vary with these prompts.
    """
    freedom = sum(count - 1 for count in _most(units).values())
    student = 1 + 1.21 / freedom + 1.44 / freedom**2 + 1.30 / freedom**3  # times the normal quantile
    groupings = max(len({count for other, count in units if other == of}) for of, _ in units) if is_mean else 1
    wider = student * np.sqrt(groupings * np.mean([count / (count - 1) for _, count in units]))
    bounds = np.nanpercentile(numbers[1:], (2.5, 97.5))
    found: Numbers = numbers[0] + wider * (bounds - numbers[0])
    return found


def _most(units: Sequence[Units]) -> dict[str, int]:
    """By prompts, how many of them, or of their groups, the run has that has most."""
    most: dict[str, int] = {}
    for prompts, count in units:
        most[prompts] = max(count, most.get(prompts, 0))
    return most
