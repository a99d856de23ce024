"""The race: who decodes what with whom, in which order, and what is recorded of it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace.api import Model
from outpace.bench.certificate import Certifier, certify
from outpace.bench.records import TurnRun
from outpace.bench.runner import BenchPlan, BenchRun
from outpace.core.events import Generation
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem, in_groups
from outpace.drafters.ranked_vocabulary import save_vocabulary
from outpace.lib.errors import InvalidRequest
from outpace.methods import stores
from outpace.methods.stores import learns
from outpace.models.loading.shipped import Shipment
from outpace.testing import ToySource, blend
from outpace.trees.keyed_acceptance import KeyedAcceptance
from outpace.trees.proposer import GrowingProposer
from outpace.trees.retrieval.transition_matrix import TransitionMatrix
from outpace.trees.retrieval.warm_file import save_matrix
from outpace.trees.shapes.beam import Beam, BeamConfig
from tests.unit.methods.test_trained_drafters import write_drafters

METHODS = ("plain", "recycle:budget=6", "lookup")
PARAMS = SamplingParams(max_new_tokens=12)
ITEMS = tuple(WorkItem(str(number), "letters", ("abc" * (number + 1),), raw=True) for number in range(5))


@pytest.fixture(scope="module")
def model(folder: str) -> Model:
    return outpace.load(folder, "plain", dtype="float32", device="cpu", max_num_seqs=2)


class Watched:
    """A model's `generate`, with what it was asked; `change` may tamper with an answer."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self._model, self._generate = model, model.generate
        monkeypatch.setattr(model, "generate", self)

    def __call__(self, prompts: Sequence[Any], params: SamplingParams, *, method: str, **options: Any) -> Any:
        answers = self._generate(prompts, params, method=method, **options)
        if params is PARAMS:
            self.calls.append((method, [self._model.codec.decode(prompt) for prompt in prompts]))
            answers = [self.change(method, answer) for answer in answers]
        return answers

    def change(self, method: str, answer: Generation) -> Generation:
        return answer


def plan(**changes: Any) -> BenchPlan:
    return replace(BenchPlan(METHODS, ITEMS, PARAMS, batch_size=2), **changes)


def test_groups_are_decoded_together_method_by_method(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against prompts one after the other, a remainder that is lost, and a method that always goes first."""
    watched, done = Watched(model, monkeypatch), list[int]()
    records = BenchRun(model, plan()).records(lambda: done.append(1))
    said = [[item.turns[0] for item in group] for group in (ITEMS[:2], ITEMS[2:4], ITEMS[4:])]
    plain, recycle, lookup = METHODS
    orders = [(plain, recycle, lookup), (recycle, lookup, plain), (lookup, plain, recycle)]
    assert watched.calls == [(method, asked) for order, asked in zip(orders, said, strict=True) for method in order]
    assert len(done) == 5
    assert [(one["id"], one["method"]) for one in records] == [(item.id, name) for item in ITEMS for name in METHODS]
    assert [record["index"] for record in records] == [number for number in range(5) for _ in METHODS]
    groups = [(record["group"]["number"], record["group"]["size"]) for record in records]
    assert groups == [(0, 2)] * 6 + [(1, 2)] * 6 + [(2, 1)] * 3
    assert {record["batch_size"] for record in records} == {2}


def test_a_batch_changes_times_alone(model: Model) -> None:
    """Guards against counts of the batch in the record of a prompt, and against answers of its neighbours."""
    alone, together = (BenchRun(model, plan(batch_size=size)).records() for size in (1, 2))
    for one, other in zip(alone, together, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert other["equal"]
        assert other["tokens_per_step"] == pytest.approx(11 / other["steps"])
        assert one["group"]["decode_ms"] == pytest.approx(one["decode_ms"])
        assert one["group"]["end_to_end_ms"] == pytest.approx(one["end_to_end_ms"])
    for place in range(3):
        pair = together[place], together[place + 3]
        assert pair[0]["group"] == pair[1]["group"]
        assert pair[0]["group"]["decoded"] == 22
        firsts = [record["ttft_ms"] for record in pair]
        lasts = [record["ttft_ms"] + record["decode_ms"] for record in pair]
        assert pair[0]["group"]["decode_ms"] == pytest.approx(max(lasts) - min(firsts)), "shared steps count once"


def test_a_request_begins_as_another_ends(model: Model) -> None:
    """Guards against more requests in flight than asked for, waits outside the group's time, and changed answers."""
    alone = BenchRun(model, plan(batch_size=1)).records()
    records = BenchRun(model, plan(batch_size=4, concurrency=2)).records()
    assert [record["token_ids"] for record in records] == [record["token_ids"] for record in alone]
    assert {(record["batch_size"], record["concurrency"]) for record in records} == {(4, 2)}
    assert [record["group"]["size"] for record in records] == [4] * 12 + [1] * 3
    for method in METHODS:
        own = [record for record in records if record["method"] == method][:4]
        ends = [record["ttft_ms"] + record["decode_ms"] for record in own]
        assert min(record["ttft_ms"] for record in own[2:]) > min(ends[:2]), "it waited for a slot"
        assert own[0]["group"]["decode_ms"] == pytest.approx(max(ends) - min(record["ttft_ms"] for record in own))


def test_equality_is_recorded_prompt_by_prompt(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a difference laid on a neighbour or a whole group, or compared with another prompt's answer."""
    wrong = tuple(model.encode(ITEMS[3].turns[0]))

    class Wrong(Watched):
        def change(self, method: str, answer: Generation) -> Generation:
            if method != "lookup" or answer.prompt_ids != wrong:
                return answer
            (sample,) = answer.samples
            return replace(answer, samples=(replace(sample, token_ids=sample.token_ids[:-1]),))

    Wrong(model, monkeypatch)
    records = BenchRun(model, plan(check=False)).records()
    different = [(one["id"], one["method"], one["finding"]["kind"]) for one in records if not one["equal"]]
    assert different == [("3", "lookup", "unchecked")]


@pytest.mark.parametrize(("what", "said"), [("quantize", "quantize='int8'"), ("kv_cache_dtype", "values in int8")])
def test_stock_generate_rounds_nothing_to_int8(
    what: str, said: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against bugs that are the rounding of int8 products or of stored keys and values, and copies of the model
    that are loaded for them."""
    asked = list[Any]()
    stock = TurnRun((1, 2), "", "unknown", {"ttft_ms": 1.0, "decode_ms": 1.0})
    monkeypatch.setattr(type(model.target) if what == "kv_cache_dtype" else model.target, what, "int8")
    monkeypatch.setattr(BenchRun, "_stock_run", lambda *arguments: stock)
    monkeypatch.setattr(Certifier, "classify", lambda *arguments: asked.append(arguments))
    methods = ("plain", "transformers")
    records = BenchRun(model, plan(methods=methods, items=ITEMS[:1], batch_size=1)).records()
    found = {record["method"]: record["finding"] for record in records}
    assert [found[method]["kind"] for method in methods] == ["equal", "different"]
    assert said in found["transformers"]["note"]
    assert not asked


@pytest.mark.parametrize("forgets", [False, True])
def test_methods_that_forget_meet_a_prompt_as_the_first_time(model: Model, forgets: bool) -> None:
    """Guards against a cold start that is none: the second of two equal prompts drafts from the rows of the first."""
    items = tuple(WorkItem(str(number), "letters", ("abcabcab",), raw=True) for number in range(2))
    records = BenchRun(model, plan(items=items, batch_size=1, methods=METHODS[:2], forgets=forgets)).records()
    first, second = (record["accepted"] for record in records if record["method"] != "plain")
    assert (first == second) == forgets


def test_conversations_go_on_together(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against second turns that hold a neighbour's answer, or another method's, and times of one turn only."""
    watched = Watched(model, monkeypatch)
    items = tuple(replace(item, turns=(*item.turns, "xyz")) for item in ITEMS[:2])
    records = BenchRun(model, plan(items=items, methods=("lookup", "plain"))).records()
    assert [method for method, _ in watched.calls] == ["lookup", "plain"] * 2
    firsts = {record["id"]: record["token_ids"][0] for record in records if record["method"] == "plain"}
    for place, item in enumerate(items):
        for _, prompts in watched.calls[2:]:
            assert prompts[place] == item.prompt(1, [model.codec.decode(firsts[item.id])])
    assert {(record["turns"], record["group"]["decoded"]) for record in records} == {(2, 44)}
    with pytest.raises(InvalidRequest, match="these have 0 2, 4 1: cut them with --max-turns 1"):
        plan(items=(items[0], ITEMS[4]))
    assert len(in_groups((items[0], ITEMS[4]), 1)) == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"batch_size": 3}, "batch_size=3, with 3 requests in flight: the model decodes 2 at a time"),
        ({"concurrency": 3}, "concurrency=3: must be from 1 to batch_size, 2"),
        ({"concurrency": 0}, "concurrency=0: must be from 1"),
        ({"concurrency": 1}, "with 1 requests in flight: the model decodes 2 at a time; load it with max_num_seqs=1"),
        ({"methods": ("plain", "transformers")}, "decodes one prompt at a time; leave 'transformers' out"),
    ],
)
def test_impossible_batches_are_refused(model: Model, changes: dict[str, Any], complaint: str) -> None:
    """Guards against requests that wait for a slot while their group is timed, and a batch that is none."""
    with pytest.raises(InvalidRequest, match=complaint):
        BenchRun(model, plan(**changes))


@pytest.mark.parametrize("command", ["bench", "verify"])
@pytest.mark.parametrize("turns", [("abc" * 1000,), ("abc", "abc" * 1000)], ids=["first", "second"])
def test_a_prompt_that_does_not_fit_is_named(
    turns: tuple[str, ...], command: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against hours of a race or a certificate that end at a prompt longer than the context, without its id."""
    calls, generate = list[str](), model.generate

    def counted(*given: Any, **options: Any) -> Any:
        calls.append(options["method"])
        return generate(*given, **options)

    monkeypatch.setattr(model, "generate", counted)
    long = WorkItem("long", "letters", turns, raw=True)
    items = (*ITEMS, long) if len(turns) == 1 else (long,)
    said = rf"prompt 'long', turn {len(turns)}: has \d+ tokens, and prompt and answer have"
    with pytest.raises(InvalidRequest, match=said):
        BenchRun(model, plan(items=items)).records() if command == "bench" else certify(model, METHODS, items, PARAMS)
    assert bool(calls) == (len(turns) == 2), "first turns are looked at before any is decoded"


def test_no_method_finds_the_prompt_of_another_written(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against times to the first token that flatter whoever decodes a prompt second."""
    reused = list[int]()

    class Counting(Watched):
        def change(self, method: str, answer: Generation) -> Generation:
            reused.append(answer.metrics.reused_tokens)
            return answer

    model.engine.shares_prefixes = True
    Counting(model, monkeypatch)
    items = tuple(WorkItem(str(number), "letters", ("abcd" * 10 + str(number),), raw=True) for number in range(2))
    BenchRun(model, plan(items=items)).records()
    assert reused == [0] * len(METHODS) * len(items)


def test_a_budget_for_all_methods_is_not_for_plain_decoding(model: Model) -> None:
    """Guards against a race that its own baseline ends, and a record by which plain decoding drafted."""
    chosen = {"methods": ("plain", "lookup"), "items": ITEMS[:1], "batch_size": 1, "budget": 3}
    records = BenchRun(model, plan(**chosen)).records()
    assert {record["method"]: record["options"]["budget"] for record in records} == {"plain": 0, "lookup": 3}


def test_rates_of_scores_are_learned() -> None:
    """Guards against a run that goes on without the rates of acceptance that a method's shape had learned."""
    source = ToySource(blend(0.7, vocab=8))
    proposer = GrowingProposer(source, Beam(BeamConfig()), 8, acceptance=KeyedAcceptance())
    assert learns(proposer, is_sampled=True)
    assert not learns(proposer, is_sampled=False), "greedy scores are not keyed"


def test_records_have_the_options_that_were_in_effect(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rows that cannot be made again: `outpace` recorded warm=None where it began with the transitions
    that ship, and a tree's depth, budget and vocabulary were those of whoever read the record; and against one method
    under two names."""
    drafter = write_drafters(tmp_path)["eagle3"]
    save_vocabulary(drafter / "vocabulary.safetensors", torch.arange(0, 264, 2), 264)
    transitions = tmp_path / "transitions.safetensors"
    save_matrix(transitions, TransitionMatrix(264, torch.device("cpu"), context=2))
    monkeypatch.setattr(stores, "shipped_for", lambda *target: Shipment("tiny", transitions=transitions))
    model = outpace.load(folder, "plain", dtype="float32", device="cpu", max_num_seqs=2, drafter=str(drafter))
    names = ("plain", "outpace", "outpace:draft=eagle3", "eagle3", "graft:as=paper,budget=7", "samd")
    records = BenchRun(model, plan(methods=names, items=ITEMS[:2], batch_size=1, budget=None)).records()
    found: dict[str, dict[str, Any]] = {record["method"]: record["options"] for record in records}
    assert json.loads(json.dumps(found))
    assert len(records) == 2 * 5

    def of(file: Path) -> dict[str, Any]:
        written = file.read_bytes()
        return {"name": str(file), "sha256": hashlib.sha256(written).hexdigest(), "bytes": len(written)}

    ranked = drafter / "vocabulary.safetensors"
    union, eagle, graft = found["outpace:draft=eagle3"], found["eagle3"], found["graft:as=paper,budget=7"]
    assert union["files"] == {"warm": of(transitions), "vocabulary": of(ranked)}
    assert (union["warm"], union["context"], union["follows_prices"]) == (str(transitions), 2, True)
    assert union["draft_options"]["breadth"] == 10
    assert (eagle["files"], eagle["budget"], eagle["follows_prices"]) == ({"vocabulary": of(ranked)}, 7, True)
    assert eagle["shape_settings"]["depth"] == 8
    assert (graft["files"], graft["vocabulary"], graft["warm"], graft["context"]) == ({}, "all", "none", 1)
    assert (graft["budget"], graft["follows_prices"], graft["shape_settings"]["depth"]) == (7, False, 9)
    assert graft["shape_settings"]["thresholds"] == (0.15, 0.13, 0.51)
    assert found["samd"]["draft_options"]["context"] == 1
    assert (found["plain"]["drafter"], eagle["drafter"]["kind"]) == (None, "eagle3")
    assert eagle["drafter"] == graft["drafter"] == union["drafter"]
    assert len(eagle["drafter"]["fingerprint"]) > 8
    assert eagle["drafter"]["layers"] == 1
    assert eagle["drafter"]["parameters"] > 1000
    sizes = model.target.config.num_hidden_layers, model.target.config.vocab_size
    assert all((one["target_size"]["layers"], one["target_size"]["vocabulary"]) == sizes for one in records)
