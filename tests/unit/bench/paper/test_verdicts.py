"""Verdicts about claims, from numbers whose answer is known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outpace.bench.paper import verdicts
from outpace.bench.paper.cells import CellComparison, draws
from outpace.bench.paper.exhibit import Claim, ExhibitRun
from outpace.bench.paper.intervals import interval
from outpace.bench.paper.metrics import Measured, measured
from outpace.bench.paper.verdicts import TOO_FEW, ClaimFinding, judge
from outpace.lib.errors import InvalidRequest

RUNS = [ExhibitRun(label=label, sets=("a", "b")) for label in ("cold", "warm", "hot")]


def cell(steps: list[float]) -> Measured:
    """A row that took so many steps for each prompt, at the speed of plain decoding."""
    ones = np.ones(len(steps))
    own = {"requests": ones, "steps": np.array(steps), "decoded": 60 * ones, "decode_ms": 600 * ones, "equal": ones}
    return Measured(own, own, len(steps), len(steps), 0, {"files": {}, "drafter": None})


def verdict(claim: dict[str, Any], **rows: list[list[float]]) -> ClaimFinding:
    """The verdict on steps of rows by set, in the run "cold" or in as many as are given; row names have no run."""
    cells: dict[tuple[str, str, str], Measured] = {}
    for name, sets in rows.items():
        row, _, run = name.partition("_")
        cells |= {(run or "cold", row, of): cell(steps) for of, steps in zip("ab", sets)}
    full = {"id": "X", "text": "x", "metric": "tokens_per_step"} | claim
    return judge(Claim.model_validate(full), RUNS, CellComparison(cells), {}, {})


FAST, SLOW = [20.0, 21, 22, 20, 21], [30.0, 31, 29, 30, 32]
FASTER_BY_RUN = {"cold": [SLOW] * 2, "warm": [[25.0] * 5] * 2, "hot": [FAST] * 2}
ROWS = {"fast": [FAST] * 2, "twin": [FAST] * 2, "slow": [SLOW] * 2, "few": [FAST[:2]]}
ROWS["unknown"] = [[float("nan")] * 5] * 2
ROWS |= {f"{row}_{run}": steps for row in ("row", "base") for run, steps in FASTER_BY_RUN.items()}


@pytest.mark.parametrize(
    ("claim", "wanted"),
    [
        pytest.param({"order": ("fast", "slow")}, "holds", id="order"),
        pytest.param({"order": ("slow", "fast")}, "does not hold", id="swapped"),
        pytest.param({"order": ("fast", "twin")}, "undecided", id="equal"),
        pytest.param({"order": ("fast", "slow"), "metric": "steps"}, "holds", id="times are better when smaller"),
        pytest.param({"rises": ("row",)}, "holds", id="rise"),
        pytest.param({"falls": ("row",)}, "does not hold", id="no fall"),
        pytest.param({"rises": ("row",), "over": "base"}, "undecided", id="both rows rise and their ratio does not"),
    ],
)
def test_orders_and_trends(claim: dict[str, Any], wanted: str) -> None:
    """Guards against two rows that are swapped, an order of times that is read as one of speeds, levels in the order of
    their names, a rise that is read as a fall, and `over` that a trend ignores."""
    assert verdict(claim, **ROWS).verdict == wanted


@pytest.mark.parametrize(
    ("claim", "wanted"),
    [
        pytest.param({"over": "slow", "at_least": 1.2}, "holds", id="at least"),
        pytest.param({"over": "slow", "at_most": 1.2}, "does not hold", id="at most"),
        pytest.param({"over": "twin", "at_most": 1.0}, "holds", id="a bound that is met"),
        pytest.param({"metric": "equal", "at_least": 101.0}, "does not hold", id="counted"),
        pytest.param({"metric": "equal", "at_least": 100.0, "rows": ("few",)}, "holds", id="counted of few"),
        pytest.param({"over": "unknown", "at_least": 1.0}, "not testable here", id="a server that counts no steps"),
    ],
)
def test_bounds(claim: dict[str, Any], wanted: str) -> None:
    """Guards against a bound on the metric where its ratio to another row is meant, one that stays undecided where it
    is met, an exactness that stays undecided though all outputs are equal, and a traceback for want of steps."""
    assert verdict({"rows": ("fast",)} | claim, **ROWS).verdict == wanted


@pytest.mark.parametrize("claim", [{"order": ("fast", "slow")}, {"rows": ("fast",), "over": "slow", "at_least": 1.2}])
def test_a_comparison_prints_its_ratio(claim: dict[str, Any]) -> None:
    """Guards against differences in the metric's unit, where the rows' names and their ratio are expected."""
    found = verdict(claim, **ROWS)
    assert found.numbers.startswith(f"fast / slow: {sum(SLOW) / sum(FAST):.2f} (")
    assert found.prompts == 10


@pytest.mark.parametrize(
    ("claim", "runs"),
    [
        ({"order": ("row", "slow")}, "(cold: 1.00, warm: 1.22, hot: 1.46)"),
        ({"rows": ("row",), "over": "slow", "at_least": 1.0}, "(cold: 1.00, warm: 1.22, hot: 1.46)"),
        ({"rows": ("row",), "metric": "steps", "at_most": 40.0}, "(cold: 30.4, warm: 25.0, hot: 20.8)"),
        ({"rows": ("row",), "metric": "equal", "at_least": 100.0}, "at least 100%"),
    ],
)
def test_a_comparison_in_several_runs_prints_each(claim: dict[str, Any], runs: str) -> None:
    """Guards against a mean over levels of which none has that number."""
    rows = {f"slow_{run}": [SLOW] * 2 for run in FASTER_BY_RUN}
    rows |= {f"row_{run}": steps for run, steps in FASTER_BY_RUN.items()}
    assert verdict(claim, **rows).numbers.partition("claimed ")[2].partition(", not on")[0].endswith(runs)


@pytest.mark.parametrize(("apart", "wanted"), [(0.05, "holds"), (0.03, "does not hold")])
def test_thresholds_of_sets_are_compared(apart: float, wanted: str) -> None:
    """Guards against thresholds that nothing compares, and a difference as large as the bound that is beyond it."""
    cells = {
        ("cold", "row", of): replace(cell(FAST), own={**cell(FAST).own, "gate_1": np.full(5, gate)})
        for of, gate in (("a", 0.10), ("b", 0.15))
    }
    claim = Claim(id="X", text="x", metric="gate_1", rows=("row",), apart=apart)
    found = judge(claim, RUNS, CellComparison(cells), {}, {})
    assert found.verdict == wanted
    assert found.numbers.startswith("row, largest difference between sets: 0.05")


def test_a_count_is_told_from_its_bound() -> None:
    """Guards against 99.6 % of equal outputs that are printed as 100 %, and do not hold."""
    assert verdict({"metric": "equal", "rows": ("fast",), "at_least": 99.6}, **ROWS).numbers.startswith("fast: 100.0%")
    assert verdict({"metric": "equal", "rows": ("fast",), "at_least": 100.0}, **ROWS).numbers.startswith("fast: 100%,")


def test_one_set_against_the_claim_is_an_average() -> None:
    """Guards against a claim about every set that its mean decides."""
    found = verdict({"order": ("fast", "slow")}, fast=[[10.0] * 5, [31.0] * 5], slow=[SLOW, [30.0] * 5])
    assert (found.verdict, found.why) == ("holds on average", verdicts.USUAL["holds on average"])
    assert found.numbers.endswith(", claimed above 1.00, not on b (cold)")
    of_average = verdict(
        {"order": ("fast", "slow"), "of_average": True}, fast=[[10.0] * 5, [31.0] * 5], slow=[SLOW, [30.0] * 5]
    )
    assert of_average.verdict == "holds"


def test_noise_decides_nothing() -> None:
    """Guards against a verdict from an interval that holds equality."""
    found = verdict({"order": ("one", "other")}, one=[[20.0, 40, 20, 41, 30]] * 2, other=[[40.0, 21, 40, 20, 30]] * 2)
    assert found.verdict == "undecided"


@pytest.mark.parametrize("steps", [[FAST[:2]], [FAST[:1]] * 2])
def test_few_prompts_decide_nothing(steps: list[list[float]]) -> None:
    """Guards against an interval of no width, which one prompt of a set has."""
    slow = [[30.0] * len(own) for own in steps]
    found = verdict({"order": ("fast", "slow")}, fast=steps, slow=slow)
    assert (found.verdict, found.why) == ("undecided", TOO_FEW)


def test_few_prompts_of_equal_rows_seldom_decide() -> None:
    """Guards against intervals that are too narrow for few prompts: of two rows that differ by chance alone, one was
    better in every fifth comparison of three prompts of two sets."""
    chance = np.random.default_rng(0)
    drawn = [chance.normal(30, 3, (2, 2, 3)).tolist() for _ in range(100)]
    found = [verdict({"order": ("one", "other")}, one=one, other=other).verdict for one, other in drawn]
    assert found.count("undecided") >= 90


def test_the_same_prompts_in_other_groups_are_no_more_evidence() -> None:
    """Guards against a mean over levels whose interval is that of as many prompts at each level as at all of them."""
    numbers = np.concatenate([[0.0], np.random.default_rng(0).normal(size=2000)])
    alike, other = [("a", 8), ("a", 8)], [("a", 8), ("a", 9)]
    assert np.ptp(interval(numbers, other)) > 1.3 * np.ptp(interval(numbers, alike))
    assert np.ptp(interval(numbers, other, is_mean=False)) < np.ptp(interval(numbers, alike)), "a difference"


def test_a_rank_correlation_is_at_most_one() -> None:
    """Guards against an interval that is widened beyond what a rank correlation can be."""
    steps = [20.0, 30, 22, 31, 21, 29]
    found = verdict({"falls": ("row",)}, row_cold=[steps], row_warm=[steps[::-1]], row_hot=[[40.0] * 6])
    bounds = found.numbers.rpartition(" (")[2].partition(")")[0].split(" to ")
    assert all(-1 <= float(bound) <= 1 for bound in bounds)


def test_runs_of_the_same_prompts_are_no_more_prompts() -> None:
    """Guards against four prompts that decide a claim because they are counted for each run."""
    fast, slow = [FAST[:4]], [SLOW[:4]]
    found = verdict({"order": ("fast", "slow")}, fast_cold=fast, slow_cold=slow, fast_warm=fast, slow_warm=slow)
    assert (found.verdict, found.why, found.prompts) == ("undecided", TOO_FEW, 8)


def test_a_run_of_large_groups_leaves_the_others_their_prompts() -> None:
    """Guards against verdicts that wait for more prompts, whatever is measured, because the last run has few groups."""
    rows = {f"{row}_{run}": [steps[:count]] for row, steps in (("fast", FAST * 2), ("slow", SLOW * 2))
            for run, count in (("cold", 8), ("warm", 2))}  # fmt: skip
    assert verdict({"order": ("fast", "slow")}, **rows).verdict == "holds"
    trend = verdict({"falls": ("fast",)}, fast_cold=[FAST * 2], fast_warm=[SLOW[:2]])
    assert (trend.verdict, trend.prompts) == ("holds", 12)


def test_sets_draw_their_own_prompts() -> None:
    """Guards against sets of one size that all draw the same places, whose intervals are then too wide or narrow."""
    assert not np.array_equal(draws("a", 4), draws("b", 4))
    assert np.array_equal(draws("a", 4), draws("a", 4))


def test_two_names_of_the_same_prompts_are_no_more_evidence() -> None:
    """Guards against intervals that shrink with the number of sets where one file stands for all of them."""
    same = replace(cell([20.0, 31, 22, 40, 21, 35]), ids="p0 p1 p2 p3 p4 p5")
    comparison = CellComparison({("cold", "row", of): same for of in "ab"})
    one, two = (comparison.estimate("tokens_per_step", "cold", "row", sets) for sets in (["a"], ["a", "b"]))
    assert one is not None
    assert two is not None
    assert (one.low, one.high) == pytest.approx((two.low, two.high))
    few = replace(cell([20.0, 31, 22]), ids="p0 p1 p2")
    named_twice = CellComparison({("cold", "row", of): few for of in "ab"}).estimate("tokens_per_step", "cold", "row")
    assert named_twice is not None
    assert named_twice.low is None, "three prompts"


def test_a_row_that_is_absent_is_named() -> None:
    """Guards against a verdict about rows that were never measured, and against "not testable here" for those that only
    nobody measured yet, or that a quick run leaves out."""
    claim = Claim(id="X", text="x", metric="tokens_per_step", order=("fast", "gone"))
    cells = {("cold", "fast", "a"): cell(FAST)}
    found = judge(claim, RUNS, CellComparison(cells), {}, {"gone": "no drafter"})
    assert (found.verdict, found.why) == ("not testable here", "gone: no drafter")
    unmeasured = judge(claim, RUNS, CellComparison(cells), {}, {})
    assert (unmeasured.verdict, unmeasured.why.partition(" in ")[0]) == ("undecided", "no records of gone")


def test_what_is_due_and_not_measured_leaves_a_claim_open() -> None:
    """Guards against a claim about every row, run and set that holds on the few that a stopped or quick run has."""
    claim = Claim(id="X", text="x", metric="tokens_per_step", rows=("slow", "other"), over="fast", at_most=1.0)
    cells = {("cold", row, of): cell(steps * 2) for row, steps in (("fast", FAST), ("slow", SLOW)) for of in "ab"}
    del cells["cold", "slow", "b"]
    planned = [(run, row, of) for run in ("cold", "warm") for row in ("fast", "slow", "other") for of in "ab"]

    def found(due: list[tuple[str, str, str]]) -> ClaimFinding:
        return judge(claim, RUNS, CellComparison(cells), {}, {}, planned, due)

    assert found(list(cells)).verdict == "holds"
    assert found(list(cells)).numbers.endswith("; without slow on b (cold) and other and warm")
    marked = claim.model_copy(update={"contradiction": "its table differs"})
    contradicted = judge(marked, RUNS, CellComparison(cells), {}, {}, planned, list(cells))
    assert contradicted.numbers == found(list(cells)).numbers
    lacking = verdicts._lacking(claim, [("", "fast", "a"), ("", "fast", "b")], {("", "fast", "a"): cell(FAST)})
    assert lacking == ["fast on b"], "the only run needs no label"
    assert (found(planned).verdict, found(planned).why) == ("undecided", "Not all of it is measured yet.")
    against = judge(claim.model_copy(update={"at_most": 0.1}), RUNS, CellComparison(cells), {}, {}, planned, planned)
    assert against.verdict == "does not hold"
    of_sets = Claim(id="X", text="x", metric="tokens_per_step", rows=("fast",), larger_on=(("a",), ("c",)))
    half = judge(of_sets, RUNS, CellComparison(cells), {}, {}, due=[("cold", "fast", of) for of in "ac"])
    assert (half.verdict, half.why) == ("undecided", "Not all of it is measured yet.")


def test_rows_of_unlike_many_prompts_are_not_compared() -> None:
    """Guards against prompts that are paired with others, where a run was stopped in the second of two rows."""
    found = verdict({"order": ("fast", "slow")}, fast=[FAST, FAST], slow=[SLOW, SLOW[:2]])
    assert (found.verdict, found.prompts) == ("undecided", 5)
    found = verdict({"rows": ("fast",), "over": "slow", "at_least": 1.2}, fast=[FAST], slow=[SLOW[:3]])
    assert found.verdict == "not testable here"
    assert found.why == "no tokens per step in these records, or not of the same prompts for all rows"
    alone = verdict({"rises": ("fast",)}, fast=[FAST], slow=[SLOW])
    assert (alone.verdict, alone.why) == ("undecided", "too few runs to compare; a full run has them")


def test_the_prompts_needed_are_those_of_the_comparison_that_needs_most() -> None:
    """Guards against a number of prompts that decides the first of two comparisons alone."""
    rows = {"a": [[30.0, 31, 29, 30, 31]] * 2, "b": [SLOW] * 2, "c": [[20.0, 44, 22, 43, 30]] * 2}
    first, second = (verdict({"order": pair}, **rows).more_prompts for pair in (("a", "b"), ("b", "c")))
    assert first is not None
    assert second is not None
    assert first < second == verdict({"order": ("a", "b", "c")}, **rows).more_prompts


def test_prompts_are_needed_only_for_what_they_would_decide() -> None:
    """Guards against a number of prompts after a verdict, one that no user would measure, and none where an interval
    reaches farther on the side that decides nothing."""
    rows = {"a": [SLOW] * 2, "b": [FAST] * 2, "c": [[20.0, 44, 10, 43, 9]] * 2}
    decided = verdict({"order": ("a", "b", "c")}, **rows)
    assert (decided.verdict, decided.more_prompts) == ("does not hold", None)
    level = verdict({"order": ("a", "b")}, a=[[20.0, 30, 20, 30, 20.001]] * 2, b=[[30.0, 20, 30, 20, 20]] * 2)
    assert (level.verdict, level.more_prompts) == ("undecided", None)
    skewed = verdict({"order": ("one", "base")}, one=[[22.0] * 7 + [40.0]], base=[[30.0] * 8])
    assert (skewed.verdict, skewed.more_prompts) == ("undecided", 9), "half of the interval is less than the difference"


def test_a_bound_is_printed_with_the_places_that_it_has() -> None:
    """Guards against 1.005 that is printed as 1.00, next to a ratio of 1.00 that is above that."""
    bounds = (1.005, 1.2)
    printed = [verdict({"rows": ("fast",), "over": "slow", "at_most": bound}, **ROWS).numbers for bound in bounds]
    assert [text.partition("at most ")[2] for text in printed] == ["1.005", "1.20"]


def test_an_interval_is_printed_with_the_places_that_decide_it() -> None:
    """Guards against verdicts that their numbers deny: "0.95 (0.90 to 1.00), claimed above 1.00: does not hold"."""
    rows = {"one": [[30.0, 32, 30, 32, 30, 32]], "other": [[30.06, 31.94, 30.06, 31.94, 30.06, 31.94]]}
    for claim in ({"order": ("one", "other")}, {"rows": ("one",), "over": "other", "at_least": 1.0}):
        assert " (0.998 to 1.002), claimed" in verdict(claim, **rows).numbers
    same = verdict({"order": ("one", "twin")}, one=rows["one"], twin=rows["one"])
    assert " (1.00 to 1.00), claimed" in same.numbers
    trend = verdicts._Side("", lambda value, more: f"{value:+.{2 + more}f}", limits=(0.0,))
    assert trend._apart(-0.004) == "-0.004"


def test_the_interval_that_is_printed_decides() -> None:
    """Guards against "0.82 (0.66 to 0.99), claimed above 1.00: undecided", where the interval of the difference, which
    nobody sees, was widened beyond equality."""
    rows = {"one": [[54.0, 49, 52, 54, 54, 41]], "other": [[56.0, 23, 32, 54, 24, 22]]}
    found = verdict({"order": ("one", "other")}, **rows)
    assert (found.verdict, " (0.41 to 0.97), claimed above 1.00" in found.numbers) == ("does not hold", True)


def test_the_first_tokens_of_an_answer() -> None:
    """Guards against rounds after the last token that counts, and one that counts whole where it ends within."""
    rounds = [[3, 4, 10.0], [1, 0, 18.0], [4, 4, 30.0], [2, 4, 40.0]]
    record: dict[str, Any] = {"method": "x", "options": {"files": {}, "drafter": None}, "rounds": [rounds]}
    record |= {"finding": {"kind": "equal"}, "equal": True, "memory_mb": 1.0, "ttft_ms": 5.0, "group": {"number": 0}}
    found = measured([record], [record], first=6).own
    sums = {name: found[name][0] for name in ("steps", "drafted", "accepted", "decoded", "decode_ms", "end_to_end_ms")}
    wanted = {"steps": 3, "drafted": 8, "accepted": 2, "decoded": 5, "decode_ms": 30.0, "end_to_end_ms": 35.0}
    assert sums == wanted
    assert np.isnan(found["forward_ms"]).all(), "known of the whole answer alone"


@pytest.mark.parametrize(("first", "repeated"), [(40, 20), (36, 16), (35, 0)])
def test_tokens_that_an_answer_had_before_are_counted(first: int, repeated: int) -> None:
    """Guards against answers that are easy to draft, as they repeat themselves, without a word about it; the text that
    is repeated, counted with its repetition; and the whole answer in the place of its beginning."""
    record: dict[str, Any] = {"method": "x", "options": {"files": {}, "drafter": None}, "rounds": [[[39, 0, 10.0]]]}
    record |= {"finding": {"kind": "equal"}, "equal": True, "memory_mb": 1.0, "ttft_ms": 5.0, "group": {"number": 0}}
    shares = [
        measured([one], [one], first).metric("repeated_share", np.zeros((1, 1), int))[0]
        for one in (record, record | {"token_ids": [[*range(20)] * 2]})
    ]
    assert shares == pytest.approx([float("nan"), 100 * repeated / first], nan_ok=True), "older records have no tokens"


def test_storage_is_that_of_the_warm_ups_file() -> None:
    """Guards against "not testable here" for a size that every warm-up has, and 0 MB for records that do not say."""
    record: dict[str, Any] = {"method": "x", "rounds": [[[3, 4, 10.0]]], "finding": {"kind": "equal"}, "equal": True}
    record |= {"memory_mb": 1.0, "ttft_ms": 5.0, "group": {"number": 0}}
    files = [{}, {"warm": {"name": "w", "sha256": "0", "bytes": 370_000}}, {"warm": {"name": "w", "sha256": "0"}}]
    found = [
        measured(
            [record | {"options": {"files": one, "drafter": None}}], [record | {"options": {"files": {}}}], first=3
        )
        for one in files
    ]
    assert [one.own["warm_mb"][0] for one in found] == pytest.approx([0.0, 0.37, float("nan")], nan_ok=True)


@pytest.mark.parametrize(
    ("first", "numbers", "wanted"),
    [
        ([[3, 4, 1.0], [2, 4, 2.0], [1, 4, 3.0]], "0, claimed 0", "holds"),
        ([[1, 4, 1.0], [2, 4, 2.0], [3, 4, 3.0]], "1, claimed 0", "does not hold"),
    ],
)
def test_rounds_at_the_same_token_are_compared(first: list[list[float]], numbers: str, wanted: str) -> None:
    """Guards against an average that hides rounds in which the larger tree accepts less, and against rounds at other
    tokens that are taken for the same."""

    def row(rounds: list[list[float]]) -> Measured:
        record: dict[str, Any] = {"method": "x", "options": {"files": {}, "drafter": None}, "rounds": [rounds]}
        record |= {"finding": {"kind": "equal"}, "equal": True, "memory_mb": 1.0, "ttft_ms": 5.0}
        record |= {"group": {"number": 0}}
        other = record | {"finding": {"kind": "tie"}, "equal": False, "group": {"number": 1}}  # does not count
        return measured([record, other], [record, other], first=7)

    claim = Claim(id="X", text="x", never_less=("larger", "pruned"), why={"holds": "so"})
    second = row([[2, 4, 1.0], [1, 4, 2.0], [1, 4, 3.0], [2, 4, 4.0]])  # begin at 1, 3, 4 and 5; the first at 1, 4, 6
    cells = {("cold", "larger", "s"): row(first), ("cold", "pruned", "s"): second}
    found = judge(claim, RUNS, CellComparison(cells), {}, {})
    assert found.verdict == wanted
    assert found.numbers.startswith("of 2 rounds that begin at the same token, ")
    assert found.numbers.endswith(f": {numbers}")


@pytest.mark.parametrize(
    ("options", "percent"),
    [
        ({"budget": 8, "shape_settings": {}}, 50.0),
        ({"budget": 256, "shape_settings": {"depth": 9, "breadth": 3}}, 40.0),
        ({"budget": 256, "shape_settings": {"depth": 8, "base_depth": 5}}, 400 / 7),
        ({"budget": 0}, float("nan")),
    ],
)
def test_acceptance_is_counted_as_dynatrees_table_3_does(options: dict[str, Any], percent: float) -> None:
    """Guards against the paper's tokens per round over a depth next to ours over drafted tokens, in one column."""
    rounds = [[4, 4, 10.0], [4, 4, 18.0]]
    record: dict[str, Any] = {"method": "x", "options": options | {"files": {}, "drafter": None}, "rounds": [rounds]}
    record |= {"finding": {"kind": "equal"}, "equal": True, "memory_mb": 1.0, "ttft_ms": 5.0, "group": {"number": 0}}
    found = measured([record], [record], first=9).metric("accepted_as_printed", np.zeros((1, 1), dtype=np.int64))
    assert found == pytest.approx([percent], nan_ok=True)


def test_records_that_do_not_say_what_a_method_started_with_are_refused() -> None:
    """Guards against tables of which nobody can tell whether a transition matrix was empty."""
    record = {"method": "recycle", "options": {"budget": 3}, "finding": {"kind": "equal"}}
    with pytest.raises(InvalidRequest, match="lack drafter, files"):
        measured([record], [record])


def test_draws_in_which_nothing_was_drafted_are_left_out() -> None:
    """Guards against a traceback where some drawn prompts have no value."""

    def row(accepted: float) -> Measured:
        own = {"requests": np.ones(10), "steps": np.ones(10)}
        own |= {"accepted": np.array([0.0] * 9 + [accepted]), "drafted": np.array([0.0] * 9 + [8.0])}
        return Measured(own, own, 10, 10, 0, {"files": {}, "drafter": None})

    claim = Claim(id="X", text="x", metric="accepted_per_drafted", order=("a", "b"))
    cells = {("cold", "a", "s"): row(4.0), ("cold", "b", "s"): row(2.0)}
    assert judge(claim, RUNS, CellComparison(cells), {}, {}).verdict == "holds"
