"""Presets: what `NAME:as=paper` stands for. Defaults are chosen for speed on the machine at hand; these are the papers'
constants, for rows that are compared with a paper's.

A row names what a method's own defaults, or those on a CPU, have otherwise; all other constants of a paper are defaults
already. What holds for all rows:

- The budget is stated, so that nothing but the tree decides: without one it follows prices in batches.
- `vocabulary=all`: drafters that ship bring a ranked vocabulary, which is FR-Spec's idea.
- `noise=false`: at temperature > 0 the authors' trees are made of the likeliest tokens. At 0 both do the same.
- EAGLE's names of a tree are translated as in `BeamConfig`.
- Warm files are none of the constants: where a paper warms up, add `warm=FILE` to the preset.
"""

from collections.abc import Mapping
from typing import Any

from outpace.drafters.options import plain
from outpace.lib.errors import InvalidRequest

OPTION = "as"
_LIKELIEST: dict[str, Any] = {"vocabulary": "all", "noise": False}

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "paper": {
        # Prompt lookup: a chain of 10 after the last 3, 2 or 1 tokens.
        "lookup": {"budget": 10},
        # Token Recycling (arXiv 2408.08696): a static tree of 80 nodes; the matrix starts empty, as by default.
        "recycle": {"budget": 80},
        # Lookahead (arXiv 2402.02057): LEVEL 5, WINDOW 7, GUESS 7, which are 55 nodes.
        "lookahead": {"budget": 55},
        # SAM-Decoding (arXiv 2411.10666): a tree of 61 nodes with its root, else a chain of at most 40.
        "samd": {"budget": 60},
        # DynaTree, section 4.2: K = 8 on WikiText-2; K = 5 on PG-19 is budget=5. Graft states no K for "Sps". Noise is
        # left as it is: under rejection it draws from the drafter's distribution, as classic speculative sampling does.
        "linear": {"budget": 8, "vocabulary": "all"},
        # DynaTree, appendix A and C.1: N_max = 256, D = 8, B = 3, tau = 0.1. N_max counts the tree's root, a draft.
        "fixed": {"budget": 256, "vocabulary": "all"},
        # DynaTree, appendix A: N_max = 256, on WikiText-2; D_max = 9 on PG-19 is depth=9. The paper leaves open B_mid,
        # rho_stop, rho_deep, tau, W, a* and the step sizes (section 3.3 refers to an appendix B without them): these
        # are defaults after the authors' code, but for the steps. Algorithm 1 roots the tree in the draft's first
        # token; here the pending token branches too, which no option changes.
        "dynatree": {"budget": 256, **_LIKELIEST},
        # SVIP (arXiv 2411.18462): h = 0.3 and at most 40 tokens. Its chains are drawn, hence the default noise.
        "svip": {"budget": 40, "vocabulary": "all"},
        # EAGLE's (60, 7, 10), which is Domino's "EAGLE-3 (60)" (table 1); its "(16)" is budget=15. Graft's C.3 gives
        # EAGLE-3 "depth 8, top-k = 10, and total candidate budget 60", and leaves open whether the root counts: for
        # its rows add budget=60,depth=9, so that EAGLE-3, ECHO and Graft have one tree.
        "eagle3": {"budget": 59, "depth": 8, **_LIKELIEST},
        # FR-Spec (arXiv 2502.14856): EAGLE-2's tree of 60 and 6 drafting steps, which is ambiguous: 6 levels are taken,
        # the first step's included. Domino (table 3) has 32K of 152K ids: the vocabulary is the drafter's, or named.
        "fr-spec": {"budget": 59, "depth": 6, "noise": False},
        # DDD (arXiv 2409.00142): EAGLE-2's beam, at most 11 levels, judged at 5, 7 and 9; its threshold is not public.
        "ddd": {"budget": 59, "depth": 11, **_LIKELIEST},
        # Graft, C.3, as for "eagle3". ECHO's own gates are not public: their depths are Graft's.
        "echo": {"budget": 60, "depth": 9, **_LIKELIEST},
        # Graft, 3.2, A.1 and C.3: 60 candidates, of which 8, 24 or 40 are drafted where checkpoint d0, d1 or d5 ends
        # the draft. "Depth 8" (C.3) and templates of 9 levels (table 7) agree in EAGLE's count only: depth=9. Gates are
        # not stated here, for the paper's are calibrated by a warm-up: warm=FILE. Without one they are table 11's for
        # Qwen3-8B, by default.
        "graft": {"budget": 60, "depth": 9, **_LIKELIEST},
        # DART (arXiv 2601.19278): 60 nodes of its search; name ngrams=FILE for its n-grams.
        "dart": {"budget": 60, **_LIKELIEST},
        # Medusa: the tree of 63 nodes. Its typical acceptance changes the output, and is left out.
        "medusa": {"budget": 63, **_LIKELIEST},
        # DFlash: the block, of 16 in Domino's and Graft's tables, is the drafter's, so that no budget is stated here.
        "dflash": {**_LIKELIEST},
        # Domino, 4.1: all ids are corrected, and the block [x_t, MASK, ...] drafts B - 1 tokens; the authors' code
        # drafts B with shifted labels, which is every_position=true. How it drafts at T = 1 the paper leaves open; the
        # runtime of section 4.3 takes the most likely after the first token.
        "domino": {"every_position": False, "pool": 0, **_LIKELIEST},
        # Graft, appendix F: a chain cut where it is uncertain, retrieval at its tail, no more rows than the block.
        # It gives no number for the cut: min_prob is the default, which is ours.
        "graft-dflash": {"shape": "cut", "place": "tail", **_LIKELIEST},
    },
}
"""By preset and method. Nothing here is Graft on Domino's or the union's: no paper has them."""


def presets_of(method: str) -> dict[str, Mapping[str, Any]]:
    """The presets of a method, each with its options."""
    return {preset: rows[method] for preset, rows in PRESETS.items() if method in rows}


def preset_options(what: str, method: str, preset: Any) -> Mapping[str, Any]:
    """The options that a preset of a method stands for.

    Raises:
        InvalidRequest: the method has no such preset.
    """
    known = presets_of(method)
    if not isinstance(preset, str) or preset not in known:
        remedy = (
            f"choose {' or '.join(f'{OPTION}={one}' for one in known)}" if known else f"{method} has none, leave it out"
        )
        raise InvalidRequest(f"method={plain(what)}: {OPTION}={plain(preset)}: unknown preset; {remedy}")
    return known[preset]
