"""Prompts that are computed for one method and restored for the others."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import outpace
from outpace.api import Model
from outpace.bench.runner import BenchPlan, BenchRun
from outpace.bench.written import written_once
from outpace.core.params import SamplingParams
from outpace.core.protocols import Chunk, ChunkOutput
from outpace.data.workload import WorkItem

TAPS = (1, 2)
IDS = list(range(3, 15))


@pytest.fixture(scope="module", params=["auto", "int8"])
def model(request: pytest.FixtureRequest, folder: str) -> Model:
    return outpace.load(folder, "plain", dtype="float32", device="cpu", max_num_seqs=1, kv_cache_dtype=request.param)


def written(model: Model, sizes: Sequence[int], ids: Sequence[int] = IDS) -> tuple[list[Tensor], list[ChunkOutput]]:
    """Keys and values of ids that are written in chunks of these sizes, and the chunks' outputs."""
    target, outputs, start = model.target, [], 0
    target.rewind_slot(0, 0)
    for size in sizes:
        tokens, end = torch.tensor(ids[start : start + size]), start + size
        (output,), _ = target.run_pass([Chunk(0, tokens, True, end == len(ids), TAPS[:1])], (), ())
        outputs.append(output)
        start = end
    assert target.kv.lengths[0] == len(ids)
    return [storage[:, 0, :, : len(ids)].clone() for storage in target.kv.storages], outputs


@pytest.mark.parametrize("sizes", [[12], [7, 5], [3, 4, 5], [1, 11]])
def test_what_is_restored_is_what_was_computed(model: Model, sizes: list[int]) -> None:
    """Guards against rows or features of a neighbouring position, where chunks are cut anew."""
    rows, outputs = written(model, sizes)
    with written_once(model.target, TAPS) as stand_in:
        written(model, [7, 5])
        stand_in._compute = None  # type: ignore[assignment]
        again, restored = written(model, sizes)
    assert all(map(torch.equal, rows, again))
    for want, got in zip(outputs, restored, strict=True):
        assert want.top_ids is not None
        assert got.top_ids is not None
        assert want.features is not None
        assert got.features is not None
        assert torch.equal(want.top_ids, got.top_ids)
        assert torch.equal(want.features, got.features)
    first, second = outputs[-1].last, restored[-1].last
    assert first is not None
    assert second is not None
    assert torch.equal(first.top_ids, second.top_ids)


@pytest.mark.parametrize("at", [0, 5, 8, 11])
def test_another_prompt_is_computed(model: Model, at: int) -> None:
    """Guards against the keys of the last prompt behind a beginning that both share."""
    other = [*IDS[:at], 20, *IDS[at + 1 :]]
    rows, _ = written(model, [4, 8], other)
    with written_once(model.target, TAPS):
        written(model, [7, 5])
        again, _ = written(model, [4, 8], other)
        assert all(map(torch.equal, rows, again))
        rows, _ = written(model, [12])
    assert all(map(torch.equal, rows, written(model, [12])[0]))


def test_methods_share_each_prompt(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against long prompts that every method computes, and answers that differ where they are shared."""
    items = tuple(WorkItem(str(number), "letters", ("abcd" * 30 + str(number),), raw=True) for number in range(3))
    passes = Mock(wraps=model.target.run_pass)

    def plan(**changes: Any) -> BenchPlan:
        methods = ("plain", "recycle:budget=6", "lookup")
        return BenchPlan(methods, items, SamplingParams(max_new_tokens=12), **changes)

    apart = BenchRun(model, plan()).records()
    monkeypatch.setattr(model.target, "run_pass", passes)
    shared = BenchRun(model, plan(prompts_once=True)).records()
    prompts = [len(model.encode(item.prompt(0, []))) for item in items]
    assert sum(len(chunk.tokens) for call in passes.call_args_list for chunk in call.args[0]) == sum(prompts)
    assert [record["token_ids"] for record in shared] == [record["token_ids"] for record in apart]
    assert all(record["equal"] for record in shared)


def test_a_target_is_left_as_it_was(model: Model) -> None:
    """Guards against a method put back as an attribute, which keeps a target from being freed."""
    vars(model.target).pop("run_pass", None)
    with written_once(model.target, TAPS):
        pass
    assert "run_pass" not in vars(model.target)
