"""Claims that are counted rather than measured."""

from collections import Counter
from collections.abc import Callable, Mapping

from outpace.trees.shapes.rank_paths import grafted_paths

# Nodes per depth of Graft's templates by released slots (its table 7): drafting ended at d5, d1, d0, and all.
GRAFT_TEMPLATES = {
    20: (4, 3, 3, 2, 2, 2, 2, 1, 1),
    36: (6, 7, 5, 4, 4, 3, 3, 2, 2),
    52: (8, 10, 8, 6, 5, 4, 4, 4, 3),
    80: (8, 16, 14, 11, 8, 7, 6, 5, 5),
}


def graft_templates() -> tuple[bool, str]:
    """Whether the templates have the paper's nodes at every depth."""
    differing = []
    for slots, wanted in GRAFT_TEMPLATES.items():
        counts = Counter(len(path) for path in grafted_paths()[:slots])
        found = tuple(counts[depth] for depth in range(1, len(wanted) + 1))
        if found != wanted:
            differing.append(f"{slots} slots: {found}, not {wanted}")
    return not differing, "; ".join(differing) or f"{sum(GRAFT_TEMPLATES)} nodes of four templates as printed"


CHECKS: Mapping[str, Callable[[], tuple[bool, str]]] = {"graft_templates": graft_templates}
