"""The search for the best method, with trials that are made up: no test here depends on a clock."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import outpace
from outpace.bench.tune import (
    FIRST_PROMPTS,
    WITH_DRAFTER,
    Trial,
    candidates,
    decide,
    spread,
    trials_of,
    tune,
)
from outpace.data.workload import WorkItem
from outpace.drafters.method import LANGUAGE_MODEL
from outpace.lib.errors import InvalidRequest
from tests.unit.bench.test_report import _record

ITEMS = tuple(WorkItem(str(number), "a", ("hello",)) for number in range(30))
WOBBLE = (0.97, 1.0, 1.03)
"""Of the prompts, in turns: what all methods share of it says nothing of them."""


class Clock:
    """A measuring function of methods whose speeds are known; it notes what was asked."""

    def __init__(self, speeds: Mapping[str, float], **changes: Mapping[str, Any]) -> None:
        self.speeds, self.changes = speeds, changes
        self.heats: list[tuple[tuple[str, ...], int]] = []

    def __call__(self, methods: tuple[str, ...], items: Sequence[WorkItem]) -> list[Trial]:
        self.heats.append((methods, len(items)))
        return [trial(name, self.speeds.get(name, 1.0), len(items), **self.changes.get(name, {})) for name in methods]


def trial(method: str, speed: float, prompts: int = 9, wobble: Sequence[float] = WOBBLE, **changes: Any) -> Trial:
    ratios = {number: speed * wobble[number % len(wobble)] for number in range(prompts)}
    return Trial(method, dict.fromkeys(ratios, 1.0) if method == "plain" else ratios, **changes)


def test_halving_keeps_the_best_and_decodes_few_prompts_by_the_rest() -> None:
    """Guards against a race of hours, and one that loses the fastest on the way or decides by its first heat."""
    speeds = {f"m{number}": 0.5 + number / 20 for number in range(24)}
    clock = Clock(speeds)
    found = tune(["plain", *speeds], ITEMS, clock)
    assert [(len(methods), prompts) for methods, prompts in clock.heats] == [(25, 3), (9, 9), (4, 30)]
    assert all(methods[0] == "plain" for methods, _ in clock.heats)
    assert set(clock.heats[-1][0]) == {"plain", "m23", "m22", "m21"}
    assert found.chosen.method == "m23"
    assert [one.method for one in found.trials][:4] == ["m23", "m22", "m21", "plain"]
    assert len(found.trials) == 25
    assert [len(one.speedups) for one in found.trials] == [30] * 4 + [9] * 5 + [3] * 16


def test_few_prompts_are_all_decoded_at_once() -> None:
    """Guards against heats that decode more prompts than there are, and intervals of two prompts."""
    clock = Clock({"a": 1.5, "b": 1.2})
    assert tune(["a", "b"], ITEMS[:4], clock).chosen.method == "a"
    assert clock.heats == [(("plain", "a", "b"), 4)]
    with pytest.raises(InvalidRequest, match=f"2 prompts; tune needs at least {FIRST_PROMPTS}"):
        tune(["a"], ITEMS[:2], clock)
    with pytest.raises(InvalidRequest, match="one token long"):
        tune(["a"], ITEMS[:4], lambda methods, items: [Trial(name, {}) for name in methods])


def test_an_output_that_is_not_plain_decodings_is_refused() -> None:
    """Guards against a profile of a method that changes answers, however fast, and a refusal that is forgotten."""
    speeds = {f"m{number}": 2.0 + number for number in range(10)}
    clock = Clock(speeds, m9={"refusal": "its output was not plain decoding's on 0"})
    found = tune(list(speeds), ITEMS, clock)
    assert found.chosen.method == "m8"
    assert [one.method for one in found.refused] == ["m9"]
    assert "m9" not in clock.heats[1][0]
    alone = tune(["bad"], ITEMS, Clock({"bad": 3.0}, bad={"refusal": "different"}))
    assert (alone.chosen.method, [one.method for one in alone.refused]) == ("plain", ["bad"])


def test_records_of_other_tokens_are_refused() -> None:
    """Guards against an unequal output taken for equal, one prompt's verdict hidden by another of its name."""
    records = [_record(number, name, id="same") for number in range(3) for name in ("plain", "lookup", "recycle")]
    records = [record | {"tokens_per_step": 1.0} for record in records]
    records[1]["finding"] = {"kind": "unchecked"}
    records[2]["finding"] = {"kind": "tie"}
    found = {one.method: one for one in trials_of(records)}
    assert found["lookup"].refusal == "its output was not plain decoding's on same"
    assert not found["recycle"].refusal
    assert not found["plain"].refusal


def test_figures_of_a_trial() -> None:
    """Guards against a break-even that is not a round's price in plain tokens or that one slow prompt decides."""
    dear = {"steps": 5, "decode_ms": 100.0, "draft_ms": 40.0, "tpot_ms": 8.0, "drafted": 35, "draft_passes": 10}
    dear["tokens_per_step"] = 2.0
    slow = {"decode_ms": 9000.0, "tpot_ms": 900.0}
    records = [_record(number, "plain", tokens_per_step=1.0, **(slow if number == 2 else {})) for number in range(3)]
    records += [_record(number, "linear", **dear) for number in range(3)]
    plain, found = trials_of(records)
    assert found.break_even == pytest.approx(1.6)  # 16 ms for two tokens, which plain decoding says in 20
    assert (found.tokens_per_step, found.drafting_share) == (2.0, 0.4)
    assert found.speedup == pytest.approx(1.25)
    assert found.effort == (True, 2.0, 7.0)
    assert (plain.break_even, plain.effort) == (1.0, (False, 0.0, 0.0))


def test_plain_decoding_unless_something_surely_beats_it() -> None:
    """Guards against a method that was faster by luck, and one chosen although it loses."""
    plain = trial("plain", 1.0)
    lucky = trial("lucky", 1.1, wobble=(0.7, 1.0, 1.3))
    chosen, why = decide(plain, [trial("slow", 0.8), lucky])
    assert chosen is plain
    assert "the fastest candidate, lucky at 1.10x" in why
    assert decide(plain, [])[0] is plain
    steady = trial("steady", 1.05)
    assert decide(plain, [trial("slow", 0.8), lucky, steady])[0] is steady


def test_the_simpler_one_of_equally_fast_methods_is_chosen() -> None:
    """Guards against a drafter, or more passes or nodes, for a gain that is noise."""
    plain = trial("plain", 1.0)
    union = trial("union", 1.52, has_drafter=True, draft_passes=1.0, drafted=15.0)
    deeper = trial("deeper", 1.50, wobble=(1.03, 1.0, 0.97), has_drafter=True, draft_passes=5.0, drafted=15.0)
    free = trial("free", 1.50, wobble=(1.03, 1.0, 0.97), drafted=31.0)
    smaller = trial("smaller", 1.50, wobble=(1.03, 1.0, 0.97), drafted=7.0)
    assert decide(plain, [union, deeper])[0] is union
    chosen, why = decide(plain, [union, deeper, free])
    assert chosen is free
    assert why.startswith("1.50x")
    assert why.endswith("union at 1.52x (1.47-1.57), and is simpler")
    assert decide(plain, [union, free, smaller])[0] is smaller
    wide = (0.7, 1.0, 1.4)  # the same for both: by prompt one is always 4 % faster
    first, second = trial("first", 1.56, wobble=wide, has_drafter=True), trial("second", 1.5, wobble=wide)
    assert first.interval is not None
    assert second.interval is not None
    assert first.interval[0] < second.interval[1]
    assert decide(plain, [trial("sure", 1.2), first, second])[0].method == "sure", "neither is surely above 1"
    first, second = trial("first", 2.6, wobble=wide, has_drafter=True), trial("second", 2.5, wobble=wide)
    assert decide(plain, [first, second])[0] is first


def test_the_first_prompts_are_of_every_data_set() -> None:
    """Guards against a first heat on one file's prompts alone, which suit one method."""
    items = [WorkItem(f"{name}{number}", name, ("x",)) for name, many in (("a", 3), ("b", 1)) for number in range(many)]
    assert [item.id for item in spread(items)] == ["a0", "b0", "a1", "a2"]


@pytest.fixture(scope="module")
def model(folder: str) -> outpace.Model:
    return outpace.load(folder, "plain", dtype="float32", device="cpu")


def test_candidates_are_those_of_the_drafters_at_hand(model: outpace.Model) -> None:
    """Guards against a candidate that no drafter is there for, which ends the race, and one that is raced twice."""
    found, left_out = candidates(model)
    assert not left_out
    assert len(set(found)) == len(found)
    assert {"outpace:draft=none", "lookup:budget=31", "recycle:budget=7", "dynatree:budget=15"} <= set(found)
    assert not [name for name in found if name.startswith(("domino", "eagle3"))]


def test_a_drafter_of_another_packages_kind_is_raced(model: outpace.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a drafter that was named and that nothing is tried with."""
    monkeypatch.delitem(WITH_DRAFTER, LANGUAGE_MODEL)
    assert candidates(model)[0][-1] == "outpace:draft=linear"
