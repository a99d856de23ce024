"""Summaries of paired speed ratios: medians over prompts, geometric means over sets of prompts, copied text apart."""

from collections.abc import Collection, Iterable, Sequence
from statistics import geometric_mean
from typing import Any

import numpy as np
from scipy.stats import bootstrap

# Sets whose texts a small model continues by repeating them. Drafting from the text gains several times there what it
# gains elsewhere, so that one such set would carry a summary of many.
COPIED = frozenset({"wikitext2"})


def kept_apart(sets: Iterable[str], copied: Collection[str] = COPIED) -> list[str]:
    """Those of a run's sets that are summarised apart: copied text, unless the run has nothing else."""
    names = list(dict.fromkeys(sets))
    apart = [name for name in names if name in copied]
    return apart if len(apart) < len(names) else []


def over_sets(ratios: Sequence[tuple[str, float]], sets: Iterable[str], apart: Collection[str]) -> dict[str, Any]:
    """Summaries of one method's ratios.

    `speedup` is the median over prompts with a 95 % bootstrap interval, `sets` the medians by set, `speedup_over_sets`
    their geometric mean, None for fewer than two sets or where one of them has no ratio. All of them leave out the sets
    that are kept apart, whose medians are in `copied`.

    Args:
        ratios: set and ratio of each prompt, or of each group of prompts.
        sets: those of the run, whether or not this method has ratios of them.
        apart: those of them that are kept apart.
    """
    medians = {name: median([ratio for own, ratio in ratios if own == name]) for name in dict.fromkeys(sets)}
    ordinary = {name: value for name, value in medians.items() if name not in apart}
    known = [value for value in ordinary.values() if value is not None]
    counted = [ratio for own, ratio in ratios if own not in apart]
    return {
        "speedup": median(counted),
        "speedup_interval": median_interval(counted),
        "sets": ordinary,
        "speedup_over_sets": geometric_mean(known) if 1 < len(known) == len(ordinary) else None,
        "copied": {name: medians[name] for name in apart},
    }


def median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % bootstrap interval of the median; None for fewer than three values, or where all are one."""
    if len(values) < 3 or len(set(values)) == 1:
        return None
    rng = np.random.default_rng(0)
    result = bootstrap((np.array(values),), np.median, confidence_level=0.95, method="percentile", rng=rng)
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
