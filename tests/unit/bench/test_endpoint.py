"""Servers under load: real sockets, a server that keeps count of what it is asked."""

import json
from dataclasses import replace
from threading import Event, Lock
from time import perf_counter, sleep
from typing import Any

import pytest

from outpace.bench.endpoint import EndpointPlan, EndpointRun, arrival_times
from outpace.bench.endpoint_report import endpoint_table, summarise_endpoint
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem
from outpace.endpoint.client import Endpoint
from outpace.endpoint.server import Server
from outpace.lib.errors import InvalidRequest
from tests.unit.endpoint.fake import Answer, Reply, event, serving, streamed

ITEMS = (
    WorkItem("one", "d", ("Hi.",)),
    WorkItem("talk", "d", ("First?", "And then?")),
    WorkItem("raw", "d", ("def f(",), raw=True),
    *(WorkItem(f"more-{number}", "d", (f"Say {number}.",)) for number in range(5)),
)
PARAMS = SamplingParams(max_new_tokens=9, seed=4)
OURS, THEIRS = Server("tiny", "lookup", {}), Server("tiny", None, {"version": "1"})
REPORT = {"steps": 2, "drafted": 4, "accepted": 1, "accepted_per_depth": [1, 0], "reused_tokens": 5}
REPORT |= {"by_origin": {"matched": 1, "bonus": 2}}
MACHINE = {"hardware": "a machine"}


def words(body: dict[str, Any]) -> list[str]:
    """A model that says four words, which depend on the whole conversation."""
    said = body["messages"] if "messages" in body else body["prompt"]
    return [f" w{sum(map(ord, json.dumps(said))) % (at + 90)}" for at in range(4)]


def honest(delay: float = 0.0) -> Answer:
    """A server of ours that drafts unless it is asked not to."""

    def answer(path: str, body: dict[str, Any]) -> Reply:
        if not body:
            return Reply([{}], 404)
        sleep(delay)
        report = REPORT if body.get("outpace", {}).get("method") == "lookup" else REPORT | {"drafted": 0, "accepted": 0}
        return streamed(words(body), "messages" in body, report=report if "outpace" in body else None)

    return answer


def measured(answer: Answer, server: Server, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    """The records of a run, and what the server saw."""
    plan = EndpointPlan(ITEMS, PARAMS, **{"levels": (1, 2), **options})
    with serving(answer) as seen, Endpoint(seen.url) as endpoint:
        run = EndpointRun(endpoint, server, plan, MACHINE)
        return [record for group in run.groups() for record in group], seen


def test_a_record_for_each_prompt_and_method() -> None:
    """Guards against prompts or methods that are left out, prompts that a server knows from the level before, and a
    budget of all methods that replaces a method's own."""
    others = ("lookup:budget=8", "recycle", "recycle:as=paper", "outpace:draft=none", "theirs:budget=3")
    records, seen = measured(honest(), OURS, methods=others, budget=4)
    methods = ("plain", *others)
    assert sorted((one["index"], one["method"]) for one in records) == sorted(
        (index, method) for index in range(len(ITEMS)) for method in methods
    )
    levels = {one["index"]: one["concurrency"] for one in records}
    assert [levels[index] for index in range(len(ITEMS))] == [1, 1, 1, 2, 2, 2, 2, 2]
    budgets = {(body["outpace"]["method"], body["outpace"].get("budget")) for body in seen.bodies}
    assert budgets == {(name, 4 if name in ("recycle", "outpace:draft=none") else None) for name in methods}
    assert all(body["model"] == "tiny" and body["seed"] == 4 and body["outpace"]["report"] for body in seen.bodies)
    asked = [body["outpace"]["method"] for body in seen.bodies if body["max_tokens"] == 9]
    turns = 1 + len(ITEMS)
    assert [asked.count(method) for method in methods] == [2 * turns, *[turns] * 5], "plain once more, alone"
    assert all(record["equal"] for record in records)


def test_a_budget_that_no_method_takes_is_refused() -> None:
    """Guards against a budget that is recorded and never sent."""
    with pytest.raises(InvalidRequest, match="budget=4: no method takes it, of plain, lookup:budget=8; leave it out"):
        measured(honest(), OURS, methods=("lookup:budget=8",), budget=4)


def test_a_conversation_goes_on_without_thoughts() -> None:
    """Guards against second turns with the thoughts of the first as a part of its answer, which no client sends; they
    are compared and recorded, though."""

    def thinking(path: str, body: dict[str, Any]) -> Reply:
        if not body:
            return Reply([{}], 404)
        said = {"delta": {"reasoning_content": "Hm."}}, {"delta": {"content": "Yes"}, "finish_reason": "stop"}
        chunks = [event({"choices": [choice]}) for choice in said]
        return Reply([*chunks, event("[DONE]")], headers={"Content-Type": "text/event-stream"})

    plan = EndpointPlan(ITEMS[1:2], PARAMS, levels=(1,), warm_items=ITEMS[1:2])
    with serving(thinking) as seen, Endpoint(seen.url) as endpoint:
        ((record,),) = EndpointRun(endpoint, THEIRS, plan, MACHINE).groups()
    earlier = [body["messages"][1]["content"] for body in seen.bodies if len(body["messages"]) == 3]
    assert earlier == ["Yes"] * 3, "warm, measured, and alone"
    assert (record["texts"], record["equal"]) == (["Hm.Yes"] * 2, True)


def test_what_speculation_did_is_recorded_as_the_server_reports_it() -> None:
    """Guards against counts of one turn taken for the prompt's, and of a record taken for the level's, and passes of
    0 ms where no server says how long they took."""
    records, _ = measured(honest(), OURS)
    (talk,) = (one for one in records if one["id"] == "talk" and one["method"] == "lookup")
    assert (talk["steps"], talk["drafted"], talk["accepted_per_depth"], talk["reused_tokens"]) == (4, 8, [2, 0], 10)
    assert (talk["new_tokens"], talk["tokens_per_step"], talk["by_origin"]) == (8, 6 / 4, {"matched": 2, "bonus": 4})
    assert {talk[name] for name in ("draft_ms", "forward_ms", "net_ms", "rounds")} == {None}
    plain, lookup = summarise_endpoint(records)[:2]
    assert (plain["method"], lookup["method"], lookup["source"]) == ("plain", "lookup", "report")
    assert (plain["accepted_per_drafted"], lookup["accepted_per_drafted"]) == (None, 0.25)
    assert lookup["tokens_per_step"] == 3 / 2
    assert (plain["speedup"], plain["throughput_ratio"]) == (1.0, 1.0)


def test_copied_text_has_a_column_of_its_own_under_load() -> None:
    """Guards against one set of copied text that carries a server's speedup, and sets counted by their prompts."""
    records, _ = measured(honest(), OURS, levels=(1,))
    ratios = {"chat": 2.0, "code": 8.0, "wikitext2": 50.0}
    for record in records:
        record["dataset"] = ("chat", "wikitext2", "wikitext2", "wikitext2", "code")[min(record["index"], 4)]
        record["tpot_ms"] = 1.0 if record["method"] == "lookup" else ratios[record["dataset"]]
    _, lookup = summarise_endpoint(records)
    assert (lookup["sets"], lookup["copied"]) == ({"chat": 2.0, "code": 8.0}, {"wikitext2": 50.0})
    assert lookup["speedup_over_sets"] == pytest.approx(4.0)
    assert lookup["speedup"] == 8.0, "the median over prompts of chat and code"


@pytest.mark.parametrize("level", [1, 5])
def test_as_many_requests_as_asked_are_in_flight(level: int) -> None:
    """Guards against levels that are never reached, or passed."""
    lock, open_now, most, reached = Lock(), [0], [0], Event()

    def waiting(path: str, body: dict[str, Any]) -> Reply:
        if body and body["max_tokens"] == 9:
            with lock:
                open_now[0] += 1
                most[0] = max(most[0], open_now[0])
                if open_now[0] == level:
                    reached.set()
            assert reached.wait(20)
            with lock:
                open_now[0] -= 1
        return honest()(path, body)

    measured(waiting, THEIRS, levels=(level,), check=False)
    assert most == [level]


def test_clocks() -> None:
    """Guards against a TTFT that waits for the answer's end, and throughput that adds up requests that ran together."""
    records = [record for level in (1, 8) for record in measured(honest(0.1), THEIRS, levels=(level,))[0]]
    one, eight = summarise_endpoint(records)
    assert 100 <= one["ttft_ms"] <= eight["ttft_p99_ms"]
    assert one["tpot_ms"] < 50
    assert eight["tokens_per_second"] > 2 * one["tokens_per_second"]
    assert one["tokens_per_second"] <= 4 / 0.1


def test_requests_arrive_at_a_rate() -> None:
    """Guards against a rate that is the concurrency's, a first text that is timed from sending though the request had
    waited for others, methods that get other arrivals, and a check that waits for arrivals."""
    assert arrival_times(3, None, 4) == [0.0] * 3
    times = arrival_times(400, 20.0, 4)
    assert times == sorted(times)
    assert 400 / times[-1] == pytest.approx(20, rel=0.2), "4 standard deviations of a mean of 400"
    assert times == arrival_times(400, 20.0, 4) != arrival_times(400, 20.0, 5)
    slow, began = honest(0.15), perf_counter()
    (row,) = summarise_endpoint(measured(slow, THEIRS, levels=(8,), request_rate=5.0)[0])
    assert 1.5 + arrival_times(8, 5.0, 4)[-1] < perf_counter() - began < 2 * arrival_times(8, 5.0, 4)[-1] + 4
    assert row["ttft_p99_ms"] < 1000, "eight in flight keep up"
    (queued,) = summarise_endpoint(measured(slow, THEIRS, levels=(1,), request_rate=1000.0)[0])
    assert queued["ttft_p99_ms"] > 3.5 * 150, "the last of a group of four waits for the others"


def test_a_pause_within_a_stream_is_a_gap() -> None:
    """Guards against gaps that are averaged over an answer, in which one long pause does not show."""
    records, _ = measured(honest(), THEIRS, levels=(1,))
    records[0]["turn_gaps_ms"] = [[5.0] * 8 + [900.0]]
    (row,) = summarise_endpoint(records)
    assert row["gap_p99_ms"] > 100
    assert all(len(gaps) == 3 for record in records[1:] for gaps in record["turn_gaps_ms"])


def test_a_server_whose_answers_change_under_load_is_seen() -> None:
    """Guards against an equality column that compares a run with itself, and one that is full where none is asked."""
    lock, now = Lock(), [0]

    def moody(path: str, body: dict[str, Any]) -> Reply:
        if not body:
            return Reply([{}], 404)
        with lock:
            now[0] += 1
        sleep(0.05)
        with lock:
            is_alone = now[0] == 1
        sleep(0.05)
        with lock:
            now[0] -= 1
        return streamed(words(body) if is_alone else ["else"], "messages" in body)

    (alone,) = summarise_endpoint(measured(moody, THEIRS, levels=(1,))[0])
    (together,) = summarise_endpoint(measured(moody, THEIRS, levels=(8,))[0])
    (unchecked,) = summarise_endpoint(measured(moody, THEIRS, levels=(8,), check=False)[0])
    assert alone["equal"] == 1
    assert together["equal"] < 0.2
    assert unchecked["equal"] is None


@pytest.mark.parametrize("check", [True, False])
def test_all_continue_the_first_methods_conversation(check: bool) -> None:
    """Guards against later turns that are compared though they answer another conversation, and a speedup without its
    equality where nothing is asked again."""

    def different(path: str, body: dict[str, Any]) -> Reply:
        if not body:
            return Reply([{}], 404)
        return streamed(words(body) if body["outpace"]["method"] == "plain" else ["else"], "messages" in body)

    records, seen = measured(different, OURS, check=check)
    said = {json.dumps(body["messages"]) for body in seen.bodies if len(body.get("messages", ())) == 3}
    assert len(said) == 1
    assert "else" not in said.pop()
    assert {(record["method"], record["equal"]) for record in records} == {("plain", True), ("lookup", False)}
    assert {tuple(one["different_turns"]) for one in records if one["method"] == "lookup"} == {(0,), (0, 1)}


def page(drafted: int, accepted: int, drafts: int = 0) -> Reply:
    """Counters as vLLM's."""
    lines = []
    for name, value in (("drafts", drafts), ("draft_tokens", drafted), ("accepted_tokens", accepted)):
        lines += [f"# TYPE vllm:spec_decode_num_{name}_total counter"]
        lines += [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}']
    lines += ["# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter"]
    lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {accepted}', ""]
    return Reply(["\n".join(lines).encode()], headers={"Content-Type": "text/plain"})


def test_acceptance_of_other_servers_is_what_their_counters_grew_by() -> None:
    """Guards against counters since the server's start, or the warm-up's, taken for the run's."""
    asked, lock = [0], Lock()

    def counting(path: str, body: dict[str, Any]) -> Reply:
        with lock:
            asked[0] += bool(body)
        return honest()(path, body) if body else page(1000 + 6 * asked[0], 500 + asked[0])

    records, _ = measured(counting, THEIRS, levels=(2,))
    (one,) = summarise_endpoint(records)
    turns = 1 + len(ITEMS)
    assert (one["source"], one["accepted_per_drafted"], one["accepted_per_depth"]) == ("metrics", 1 / 6, [turns])
    assert one["tokens_per_step"] == 3 / 2  # of 3 tokens behind the first 1 was accepted: 2 steps
    assert {record["steps"] for record in records} == {None}


def test_tokens_accepted_behind_an_answers_end_save_no_step() -> None:
    """Guards against tokens per step that are too many, most of all of short answers: vLLM counts what the last step
    accepted beyond the answer's limit."""
    asked, lock = [0], Lock()

    def counting(path: str, body: dict[str, Any]) -> Reply:
        with lock:
            asked[0] += bool(body)
        return honest()(path, body) if body else page(14 * asked[0], 5 * asked[0], 2 * asked[0])

    (one,) = summarise_endpoint(measured(counting, THEIRS, levels=(2,))[0])
    assert one["tokens_per_step"] == 3 / 2  # 3 tokens behind the first in 2 steps, and 4 accepted behind the end


def test_a_server_that_counts_nothing() -> None:
    """Guards against counts of nothing where nothing is counted, and figures that fail for it."""

    def silent(path: str, body: dict[str, Any]) -> Reply:
        return streamed(words(body), "messages" in body, has_usage=False) if body else Reply([{}], 404)

    records, _ = measured(silent, THEIRS)
    rows = summarise_endpoint(records)
    assert {record["prompt_tokens"] for record in records} == {None}
    for row in rows:
        assert (row["counted_by"], row["tokens_per_step"], row["reused"]) == (["pieces"], None, None)
    assert sum(row["new_tokens"] for row in rows) == 4 * (1 + len(ITEMS))
    assert len(endpoint_table(rows, "t").rows) == 2


def test_a_run_goes_on_where_it_stopped() -> None:
    """Guards against answers asked for twice, and a bar that begins at nothing and ends half full."""
    plan = EndpointPlan(ITEMS, PARAMS, (1, 2), ("lookup",))
    advanced: list[tuple[int, ...]] = []
    with serving(honest()) as seen, Endpoint(seen.url) as endpoint:
        whole = list(EndpointRun(endpoint, OURS, plan, MACHINE).groups())
        asked = len(seen.bodies)
        again = EndpointRun(endpoint, OURS, plan, MACHINE)
        rest = list(again.groups(whole[0], lambda *counts: advanced.append(counts)))
        assert len(seen.bodies) - asked == 2 + 5 * 3, "the warm-up, and the second level"
        assert list(EndpointRun(endpoint, OURS, plan, MACHINE).groups(whole[0] + rest[0])) == []
    assert [record["id"] for record in rest[0]] == [record["id"] for record in whole[1]]
    assert advanced == [(3, False), *[()] * 5]


def test_a_run_goes_on_with_a_server_that_was_started_again() -> None:
    """Guards against records that are lost with a server, whose memory now holds requests of another length."""
    plan = EndpointPlan(ITEMS, PARAMS, (1, 2), ("lookup",))
    with serving(honest()) as seen, Endpoint(seen.url) as endpoint:
        before, after, other = (
            EndpointRun(endpoint, replace(OURS, facts={"max_model_len": length, "drafter": drafter}), plan, MACHINE)
            for length, drafter in ((4000, None), (3900, None), (4000, "domino"))
        )
    assert before.settings == after.settings
    assert before.settings != other.settings
    for stated, is_same in ((("max_new_tokens", "temperature"), True), (("top_p",), False)):
        again = EndpointRun(endpoint, before._server, replace(plan, stated=stated), MACHINE)
        assert (again.settings == before.settings) == is_same, stated


def test_one_failure_ends_the_run() -> None:
    """Guards against figures of the requests that worked, and a run that asks on for an hour."""

    def failing(path: str, body: dict[str, Any]) -> Reply:
        if body.get("prompt"):
            return Reply([{"error": {"message": "no completions here"}}], 400)
        return honest(0.01)(path, body)

    with pytest.raises(InvalidRequest, match="no completions here"):
        measured(failing, THEIRS, levels=(2,))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"levels": (0,)}, "concurrency='0'"),
        ({"levels": (2, 2)}, "each once"),
        ({"levels": (1, 8)}, r"concurrency='1,8': the workload has 8 prompts, .* at least 9"),
        ({"request_rate": 0}, "request_rate=0: must be a positive number"),
        ({"methods": ("lookup",)}, "methods='lookup': the server at .* is not outpace's"),
        ({"budget": 4}, "budget=4: the server at .* is not outpace's"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], said: str) -> None:
    """Guards against a figure of 32 requests in flight where there were never more than 8, and against methods that a
    server of others would ignore, in a table that says it used them."""
    with pytest.raises(InvalidRequest, match=said):
        measured(honest(), THEIRS, **options)


@pytest.mark.parametrize("place", [0, 2])
def test_the_warm_up_asks_nothing_that_is_measured(place: int) -> None:
    """Guards against a first prompt, of low levels the only one, that a server has in its prefix cache before it is
    timed; and against a warm-up by chat where prompts are raw."""
    plan = EndpointPlan(ITEMS[place : place + 1], PARAMS, (1,), ("lookup",), check=False)
    with serving(honest()) as seen, Endpoint(seen.url) as endpoint:
        list(EndpointRun(endpoint, OURS, plan, MACHINE).groups())
    asked = [body.get("prompt") or body["messages"][-1]["content"] for body in seen.bodies]
    assert asked == ["Hello."] * 2 + [ITEMS[place].turns[0]] * 2
    assert all(("prompt" in body) == ITEMS[place].raw for body in seen.bodies)


def test_warm_prompts_are_asked_and_not_measured() -> None:
    """Guards against warm prompts in the figures."""
    warm = (WorkItem("warm", "d", ("Warm?", "Warmer?")),)
    records, seen = measured(honest(), OURS, warm_items=warm, levels=(1,))
    assert {record["id"] for record in records} == {item.id for item in ITEMS}
    assert sum("Warm?" in json.dumps(body) for body in seen.bodies) == 4
