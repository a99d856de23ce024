"""Computes the speedups that measured times imply with the papers' acceptance lengths, next to the papers' speedups."""

from typing import Any

from outpace.bench.paper.exhibit import read_exhibits

CONCURRENCY = (1, 2, 4, 8, 16, 32)
ROWS = {"eagle3": "EAGLE-3", "dflash": "DFlash", "domino": "Domino"}
(TABLE,) = (one for one in read_exhibits("domino") if one.name == "table 3")
PAPER = {(value.row, value.metric, value.run): value.sets for value in TABLE.values}


def implied_speedups(case: dict[str, Any], rows: int) -> dict[str, Any]:
    """Per method and data set tau * T_plain / T_round of one case, with the paper's at the nearest concurrency.

    Args:
        case: a case of `scripts.gpu.latency`.
        rows: verified rows per request, which EAGLE-3's tree and the blocks have.
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
        for data, tau in PAPER[ROWS[method], "tokens_per_step", ""].items():
            paper = PAPER[ROWS[method], "speedup", f"{concurrency} in flight"][data]
            found[method][data] = {"tau": tau, "implied": round(tau * plain / together, 3), "paper": paper}
    return found


def _best(times: dict[str, Any]) -> float | None:
    """The graph's time if there is one, else the eager time."""
    found = times.get("graph_ms", times.get("eager_ms"))
    return None if found is None else float(found)
