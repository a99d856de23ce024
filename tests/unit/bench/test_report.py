"""Figures from records: the arithmetic behind every published number."""

from typing import Any

import pytest

from outpace.bench.records import DRAFT_MS, TurnRun, group_figures
from outpace.bench.report import summarise, table
from outpace.bench.runner import split_methods, with_baseline
from outpace.lib.errors import InvalidRequest


def _record(index: int, method: str, **changes: Any) -> dict[str, Any]:
    figures = {
        "index": index, "id": str(index), "dataset": "chat", "method": method, "turns": 1, "new_tokens": 11,
        "steps": 10, "drafted": 0,
        "draft_passes": 0, "accepted": 0, "tpot_ms": 10.0,
        "decode_ms": 100.0, "end_to_end_ms": 150.0, "ttft_ms": 50.0, "draft_ms": 0.0,
        "forward_ms": 90.0, "verify_ms": 5.0, "commit_ms": 5.0, "observe_ms": 0.0, **dict.fromkeys(DRAFT_MS, 0.0),
        "memory_mb": 1.0, "finding": {"kind": "equal"},
    }  # fmt: skip
    record: dict[str, Any] = figures | {"batch_size": 1, "concurrency": 1} | changes
    decoded = record["new_tokens"] - record["turns"]
    own: dict[str, Any] = {"number": index, "size": 1, "new_tokens": record["new_tokens"], "decoded": decoded}
    own |= {"decode_ms": (record["tpot_ms"] or 0.0) * decoded, "end_to_end_ms": record["end_to_end_ms"]}
    own["tokens_per_second"] = 1e3 / record["tpot_ms"] if record["tpot_ms"] else None
    return {"group": own} | record


def _runs(*times: tuple[int, float, float]) -> list[TurnRun]:
    """Answers of as many tokens, with their ttft_ms and decode_ms."""
    return [
        TurnRun(tuple(range(tokens)), "", "length", {"ttft_ms": ttft, "decode_ms": decode})
        for tokens, ttft, decode in times
    ]


def test_speedup_is_the_median_of_paired_ratios() -> None:
    """Guards against a ratio of means, which one slow prompt decides."""
    records = [_record(index, "plain", tpot_ms=tpot) for index, tpot in enumerate([10.0, 10.0, 1000.0])]
    records += [_record(index, "fast", tpot_ms=tpot) for index, tpot in enumerate([5.0, 4.0, 1000.0])]
    figures = summarise(records)
    assert figures["fast"]["speedup"] == 2.0
    assert figures["plain"]["speedup"] == 1.0
    assert figures["fast"]["slowest"] == 1.0
    assert figures["fast"]["tpot_p95_ms"] == pytest.approx(900.5)
    low, high = figures["fast"]["speedup_interval"]
    assert 1.0 <= low <= 2.0 <= high <= 2.5


def _sets(speedups: dict[str, tuple[float, ...]], **changes: Any) -> list[dict[str, Any]]:
    """Records of plain decoding and of a method with these speedups, by set of prompts."""
    every = [(name, ratio) for name, own in speedups.items() for ratio in own]
    return [
        _record(index, method, dataset=name, tpot_ms=10.0 if method == "plain" else 10.0 / ratio, **changes)
        for index, (name, ratio) in enumerate(every)
        for method in ("plain", "fast")
    ]


def test_copied_text_has_a_column_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against one set of copied text that carries the summary: with it the median here would be 2."""
    records = _sets({"chat": (1.0, 1.0, 1.0), "code": (2.0, 4.0, 2.0), "wikitext2": (7.0, 8.0, 7.5)})
    records[-1] |= {"finding": {"kind": "bug"}, "steps": 1, "memory_mb": 9.0}
    row = summarise(records)["fast"]
    assert row["sets"] == pytest.approx({"chat": 1.0, "code": 2.0})
    assert row["copied"] == pytest.approx({"wikitext2": 7.5})
    assert row["speedup"] == pytest.approx(1.5), "the median of 1, 1, 1, 2, 2, 4"
    assert row["speedup_interval"][1] <= 4.0
    assert row["speedup_over_sets"] == pytest.approx(2**0.5), "not the arithmetic mean of 1 and 2"
    assert (row["rounds"], row["tokens_per_step"]) == (60, 1.0), "copied text counts in no other figure of speed"
    assert (row["prompts"], row["bugs"], row["memory_mb"]) == (9, 1, 9.0), "but it does in these"
    table(summarise(records), "title").show(132)
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("over sets", "1.41x", "wikitext2", "7.50x"))
    assert "…" not in shown


def test_a_set_of_many_prompts_counts_once() -> None:
    """Guards against a mean over prompts that is called one over sets."""
    records = _sets({"chat": (1.0,) * 8, "code": (4.0,)})
    assert summarise(records)["fast"]["speedup_over_sets"] == pytest.approx(2.0)
    without_code = [record for record in records if record["method"] == "plain" or record["dataset"] == "chat"]
    row = summarise(without_code)["fast"]
    assert (row["sets"], row["speedup_over_sets"]) == ({"chat": 1.0, "code": None}, None)
    assert summarise(_sets({"chat": (2.0, 3.0)}))["fast"]["speedup_over_sets"] is None, "one set is no mean"


def test_copied_text_alone_is_summarised_as_any_other() -> None:
    """Guards against a run on wikitext2 only that prints no speed."""
    row = summarise(_sets({"wikitext2": (7.0, 8.0, 7.5)}))["fast"]
    assert (row["speedup"], row["copied"]) == (pytest.approx(7.5), {})


def test_batches_that_mix_sets_are_not_split() -> None:
    """Guards against a batch's speed that is counted for the set of one of its prompts."""
    records = []
    for method, factor in (("plain", 1.0), ("fast", 2.0)):
        for number in range(2):
            group = _record(0, method)["group"] | {"number": number, "tokens_per_second": 100.0 * factor}
            for place, name in enumerate(("chat", "wikitext2")):
                records.append(_record(2 * number + place, method, group=group, dataset=name, batch_size=2))
    row = summarise(records)["fast"]
    assert (row["speedup"], row["sets"], row["copied"], row["rounds"]) == (2.0, {}, {}, 40)


def test_tokens_per_step_counts_the_bonus_and_not_the_first_token() -> None:
    """Guards against counting the prefill's token as decoded, which flatters short answers."""
    figures = summarise([_record(0, "plain"), _record(0, "fast", steps=4, accepted=6, drafted=20)])
    assert figures["plain"]["tokens_per_step"] == 1.0
    assert figures["fast"]["tokens_per_step"] == 2.5
    assert figures["fast"]["accepted_per_step"] == 1.5
    assert figures["fast"]["drafted_per_step"] == 5.0
    assert (figures["fast"]["accepted_per_drafted"], figures["fast"]["rounds"]) == (0.3, 4)
    slow_start = _record(0, "fast", tpot_ms=5.0, decode_ms=50.0, end_to_end_ms=150.0, ttft_ms=100.0)
    figures = summarise([_record(0, "plain"), slow_start])
    assert (figures["fast"]["speedup"], figures["fast"]["end_to_end_speedup"]) == (2.0, 1.0), "with the prefill"


def test_phases_of_a_round() -> None:
    """Guards against figures per prompt, phases that are lost, and bookkeeping with drafting or the pass in it."""
    spent = {"draft_ms": 20.0, "retrieve_ms": 3.0, "merge_ms": 1.0}
    spent |= {"forward_ms": 60.0, "verify_ms": 3.0, "commit_ms": 2.0, "observe_ms": 1.0}
    records = [_record(index, "plain") for index in range(2)]
    records += [_record(index, "grafted", **spent, steps=5) for index in range(2)]
    figures = summarise(records)["grafted"]
    assert {phase: figures[phase] for phase in spent} == {phase: value / 5 for phase, value in spent.items()}
    assert (figures["round_ms"], figures["between_ms"]) == (20.0, pytest.approx(14.0 / 5))
    assert figures["bookkeeping_share"] == pytest.approx((4 + 3 + 2 + 1) / 100)
    nothing = summarise([_record(0, "plain", steps=0, new_tokens=1, tpot_ms=None, decode_ms=0.0)])["plain"]
    assert nothing["bookkeeping_share"] is None


def test_times_of_a_group() -> None:
    """Guards against shared steps counted once per request, and a wait for the first arrival that counts as work."""
    alone = group_figures([_runs((11, 50.0, 100.0)), _runs((6, 70.0, 25.0))])
    assert (alone["size"], alone["new_tokens"], alone["decoded"]) == (1, 17, 15)
    assert (alone["decode_ms"], alone["end_to_end_ms"]) == (125.0, 245.0), "turns follow one another"
    assert alone["tokens_per_second"] == 120.0
    batch = group_figures([_runs((11, 50.0, 100.0), (6, 50.0, 40.0), (1, 90.0, 0.0), (21, 90.0, 110.0))])
    assert (batch["size"], batch["new_tokens"], batch["decoded"]) == (4, 39, 35)
    assert (batch["decode_ms"], batch["end_to_end_ms"]) == (150.0, 200.0)
    assert group_figures([_runs((1, 50.0, 0.0))])["tokens_per_second"] is None
    times = {"ttft_ms": 50.0, "decode_ms": 100.0}
    arrived = [TurnRun((1, 2), "", "length", times | {"sent_ms": at}) for at in (400.0, 600.0)]
    assert group_figures([arrived])["end_to_end_ms"] == 350.0


def test_speed_of_batches_is_that_of_groups() -> None:
    """Guards against a batch as fast as its requests taken one by one, and groups that count by their members."""
    records = []
    for method, factor in (("plain", 1.0), ("fast", 2.0), ("slow", 0.5)):
        for number, size in enumerate((4, 4, 2)):
            speed = 1000.0 * (factor if number else 3 * factor if method == "fast" else 1.0)
            own: dict[str, Any] = {"number": number, "size": size, "new_tokens": 11 * size, "decoded": 10 * size}
            own |= {"decode_ms": 1e4 * size / speed, "end_to_end_ms": 1e4 * size / speed, "tokens_per_second": speed}
            records += [_record(4 * number + place, method, group=own, batch_size=4) for place in range(size)]
    figures = summarise(records)
    assert [figures["fast"][name] for name in ("prompts", "groups", "batch_size")] == [10, 3, 4]
    assert [figures[method]["speedup"] for method in ("plain", "fast", "slow")] == [1.0, 2.0, 0.5]
    assert figures["plain"]["tokens_per_second"] == pytest.approx(1000.0)
    assert figures["slow"]["tokens_per_second"] == pytest.approx(100 / (0.04 + 0.08 + 0.04))
    assert figures["plain"]["tpot_ms"] == 10.0, "what a request waits, whatever the batch yields"


def test_outputs_and_short_answers() -> None:
    """Guards against a speed whose runs were not equal (rule 7), and a division by a time that does not exist."""
    records = [_record(index, "plain") for index in range(4)]
    records += [_record(at, "odd", finding={"kind": kind}) for at, kind in enumerate(("equal", "tie", "bug", "bug"))]
    figures = summarise(records)["odd"]
    assert (figures["equal"], figures["ties"], figures["bugs"]) == (0.25, 1, 2)
    short = {"new_tokens": 1, "steps": 0, "tpot_ms": None, "decode_ms": 0.0}
    figures = summarise([_record(0, "plain", **short), _record(0, "fast", **short)])["fast"]
    assert (figures["speedup"], figures["tokens_per_step"]) == (None, 1.0)


def test_one_output_that_differs_is_seen() -> None:
    """Guards against 399 of 400 equal outputs that are shown as 100 %, and differences that nobody classified and that
    are shown as no bugs."""
    records = [_record(index, method) for method in ("plain", "odd") for index in range(400)]
    records[-1] |= {"finding": {"kind": "unchecked"}}
    summary = summarise(records)
    assert [row[-3:] for row in table(summary, "").rows] == [["100%", "0", "0"], ["99%", "-", "-"]]


def test_method_lists() -> None:
    """Guards against options that break a comma-separated list, and against a table without its baseline."""
    assert with_baseline(("lookup",)) == ("plain", "lookup")
    assert with_baseline(("lookup", "plain")) == ("lookup", "plain")
    assert split_methods("recycle:budget=8,shape=chain,plain") == ("recycle:budget=8,shape=chain", "plain")
    assert split_methods("plain, recycle:budget=8, shape=chain") == ("plain", "recycle:budget=8,shape=chain")
    assert split_methods("recycle:budget=8,warm=a:b.st,plain") == ("recycle:budget=8,warm=a:b.st", "plain")
    assert split_methods("transformers,plain", has_stock=True) == ("transformers", "plain")
    for empty in ("", " , "):
        with pytest.raises(InvalidRequest, match=r"methods=.*: names none; name one or more"):
            split_methods(empty)
    with pytest.raises(InvalidRequest, match="twice"):
        split_methods("lookup,lookup")
    with pytest.raises(InvalidRequest, match=r"recycle takes budget, .*shape"):
        split_methods("recycle:depth=3")
    with pytest.raises(InvalidRequest, match="unknown; choose one of"):
        split_methods("plain,xyzzy")


METHODS = ("plain", "outpace:draft=none", "outpace:draft=eagle3,retrieve=suffix,budget=31,context=1")


@pytest.mark.parametrize("with_phases", [False, True])
@pytest.mark.parametrize("width", [60, 80, 100, 120, 300])
def test_the_table_fits_a_terminal(width: int, with_phases: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a table that wraps into garbage where people look, names such as `outpace:draft=none` that are
    broken in the middle, and a speed without the share of equal outputs beside it."""
    summary = summarise([_record(index, method) for method in METHODS for index in range(4)])
    for methods in (METHODS[:2], METHODS):
        table({method: summary[method] for method in methods}, "a title, 4 prompts", with_phases).show(width)
        shown = capsys.readouterr().out
        lines = [line for line in shown.splitlines() if line.startswith("\u2502")]
        assert [line.split("\u2502")[1].strip() for line in lines] == list(methods)
        if width >= 100 or methods != METHODS:
            assert max(map(len, shown.splitlines()[1:-1])) <= width
        assert all(column in shown for column in ("speedup", "equal"))
        assert "\u2026" not in shown
        assert ("left out: " in shown) == (width < (300 if with_phases or methods == METHODS else 120))
        if width == 300:
            assert ("forward ms" in shown) == with_phases
