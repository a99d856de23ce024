"""Speedups that measured times imply with the papers' acceptance lengths, beside the papers' own."""

from typing import Any

CONCURRENCY = (1, 2, 4, 8, 16, 32)
PAPER: dict[str, dict[str, tuple[float, tuple[float, ...]]]] = {
    "gsm8k": {
        "eagle3": (5.01, (2.35, 2.15, 1.90, 1.77, 1.30, 0.97)),
        "dflash": (3.90, (2.68, 2.40, 2.30, 1.95, 1.49, 1.09)),
        "domino": (4.65, (3.01, 2.70, 2.61, 2.18, 1.68, 1.24)),
    },
    "humaneval": {
        "eagle3": (4.84, (2.27, 2.13, 2.00, 1.74, 1.27, 0.87)),
        "dflash": (3.78, (2.58, 2.43, 2.32, 2.05, 1.47, 1.00)),
        "domino": (4.35, (2.82, 2.64, 2.52, 2.23, 1.63, 1.12)),
    },
    "livecodebench": {
        "eagle3": (4.38, (1.99, 1.84, 1.81, 1.41, 1.30, 0.92)),
        "dflash": (3.66, (2.36, 2.15, 2.16, 1.56, 1.56, 1.10)),
        "domino": (4.24, (2.55, 2.33, 2.44, 1.75, 1.60, 1.17)),
    },
}
"""Table 3 of arXiv 2605.29707: Qwen3-8B, greedy, 16 drafts, SGLang on an A100, drafters trained on the same data.
Average acceptance length, and speedup at each concurrency."""


def implied_speedups(case: dict[str, Any], rows: int) -> dict[str, Any]:
    """Per method and data set tau * T_plain / T_round of one case, with the paper's at the nearest concurrency.

    Args:
        case: of `scripts.gpu.latency`.
        rows: verified per request; EAGLE-3's tree and the blocks have as many.
    """
    if "plain" not in case or str(rows) not in case["verify"]:
        return {}
    plain, verify = _best(case["plain"]), _best(case["verify"][str(rows)])
    around = (_best(case["verdict"]), _best(case["commit"]))
    drafts = {
        "dflash": [_best(case["dflash"][part]) for part in ("context", "block", "lm_head")],
        "domino": [_best(case["domino"][part]) for part in ("context", "block", "lm_head", "rollout_chain")],
        "eagle3": [
            None if (time := _best(case["eagle3"][part])) is None else time * case["eagle3"]["levels"]
            for part in ("level", "level_head")
        ],
    }
    concurrency = max((each for each in CONCURRENCY if each <= case["batch"]), default=1)
    found: dict[str, Any] = {}
    for method, parts in drafts.items():
        times = [plain, verify, *around, *parts]
        if any(time is None for time in times):
            continue
        together = sum(times[1:])
        found[method] = {"round_ms": round(together, 4), "plain_ms": plain, "round_over_plain": together / plain}
        for data, methods in PAPER.items():
            tau, speedups = methods[method]
            paper = speedups[CONCURRENCY.index(concurrency)]
            found[method][data] = {"tau": tau, "implied": round(tau * plain / together, 3), "paper": paper}
    return found


def _best(times: dict[str, Any]) -> float | None:
    """The graph's time where there is one."""
    found = times.get("graph_ms", times.get("eager_ms"))
    return None if found is None else float(found)
