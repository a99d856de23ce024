"""Our proposers as vLLM calls them, without vLLM: settings, refusals, and faults while serving."""

import logging
import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outpace.budget.costs import RowPrice
from outpace.drafters.build_context import BuildContext
from outpace.lib.errors import InvalidRequest
from outpace.vllm import proposer
from outpace.vllm.host import check_graphs
from outpace.vllm.proposer import Method
from outpace.vllm.rounds import Rounds
from tests.unit.vllm.simulated import Witness


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here needs one."""
    monkeypatch.setattr(proposer, "check_host", lambda: None)


def config(settings: Any = None, **parallel: int) -> Any:
    """What our proposers read of vLLM's configuration."""
    model = SimpleNamespace(max_model_len=100)
    return SimpleNamespace(
        additional_config={} if settings is None else {"outpace": settings},
        parallel_config=SimpleNamespace(**{"pipeline_parallel_size": 1, "tensor_parallel_size": 1, **parallel}),
        model_config=model,
        speculative_config=SimpleNamespace(num_speculative_tokens=4, draft_model_config=model),
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "lookahead"}, "chains only"),
        ({"method": "triforce"}, "it drafts with the target itself"),
        ({"method": "plain"}, "leave speculative_config out"),
        ({"method": "linear"}, "'draft_model'"),
        ({"method": "outpace:draft=linear"}, "'draft_model'"),
        ({"method": "no-such"}, "no-such"),
        ({"drafer": "x"}, "drafer"),
        ({"least_gain": 2}, "least_gain"),
        ({"slots": 0}, "slots"),
        ("graft", "outpace"),
    ],
)
def test_what_cannot_be_is_refused_at_load(settings: Any, said: str) -> None:
    """Guards against a server that starts and drafts something else than was asked, or nothing."""
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        Method(config(settings))


def test_what_cannot_run_here_is_refused() -> None:
    """Guards against settings without a method, ranks without hidden states, and drafts longer than vLLM verifies."""
    with pytest.raises(InvalidRequest, match="name a method"):
        Method(config())
    with pytest.raises(InvalidRequest, match="pipeline_parallel_size=2"):
        Method(config({"method": "lookup"}, pipeline_parallel_size=2))
    asked = config({"method": "lookup"})
    assert Method(asked) is not None
    asked.speculative_config.num_speculative_tokens = 129
    with pytest.raises(InvalidRequest, match="num_speculative_tokens=129: vLLM verifies at most 128"):
        Method(asked)


def test_embeddings_as_prompts_are_refused() -> None:
    """Guards against a server whose passes have no ids, so that nothing is learned and no trained drafter ever drafts,
    without a word. Models that read images get the ids too."""
    asked = config({"method": "lookup"})
    asked.model_config.enable_prompt_embeds = asked.model_config.is_multimodal_model = True
    assert Method(asked) is not None
    asked.model_config.is_multimodal_model = False
    with pytest.raises(InvalidRequest, match="enable_prompt_embeds=True: "):
        Method(asked)


def test_vllm_asks_for_drafts_up_to_the_longest_request() -> None:
    """Guards against a batch that vLLM does not draft for, and whose hidden states are lost, while one of its requests
    is about to reach the maximal length."""
    asked = config({"method": "lookup"})
    Method(asked)
    assert asked.model_config.max_model_len == 100
    assert asked.speculative_config.draft_model_config.max_model_len == 104


class Failing(Witness):
    """Fails at the third draft."""

    def propose(self, states: Any, requests: Any) -> Any:
        if self.proposed == 2:
            raise RuntimeError("no more")
        return super().propose(states, requests)


def test_a_proposer_that_fails_goes_without_drafts(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a server that dies of its drafter, that fills its log with one error."""
    made = Method(config({"method": "lookup"}))
    made._capture = SimpleNamespace(take=lambda: None, fault=None)  # type: ignore[assignment]
    made._rounds = Rounds(Failing(False, truth=1.0), 2, 100, 4)
    ids = np.arange(100, dtype=np.int32)[None] % 50
    drafts = []
    with caplog.at_level(logging.ERROR):
        for length in range(5, 12):
            drafts.append(made.propose([[int(ids[0, length - 1])]], np.array([length]), ids))
    assert [bool(row) for (row,) in drafts] == [True, True] + [False] * 5
    assert len(caplog.records) == 1
    assert "goes on without drafts" in caplog.text


def test_a_fault_of_the_capture_is_one_of_the_proposer() -> None:
    """Guards against drafts on hidden states that nobody could read."""
    made = Method(config({"method": "lookup"}))
    made._capture = SimpleNamespace(take=lambda: None, fault=ValueError("x"))  # type: ignore[assignment]
    made._rounds = Rounds(Witness(False), 2, 100, 4)
    assert made.propose([[1]], np.array([3]), np.ones((1, 100), dtype=np.int32)) == [[]]
    assert made._rounds is None


def test_graphs_of_whole_passes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a pass that is looked at while a graph records it, which ends vLLM on a GPU, whatever drafts."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    asked, mode = config({"method": "lookup"}), SimpleNamespace(name="FULL", has_full_cudagraphs=lambda: True)
    asked.compilation_config = SimpleNamespace(cudagraph_mode=mode)
    with pytest.raises(InvalidRequest, match=r"cudagraph_mode=FULL: .*PIECEWISE"):
        Method(asked).load_model(None)


def test_graphs_in_pieces_of_whole_passes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server whose passes are never seen, without a word: vLLM chooses breakable graphs for
    DeepSeek-V3.2, Kimi K3 and others, and for VLLM_BATCH_INVARIANT, and replays them without a call of the model."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    asked, mode = config({"method": "lookup"}), SimpleNamespace(name="PIECEWISE", has_full_cudagraphs=lambda: False)
    asked.compilation_config = SimpleNamespace(cudagraph_mode=mode)
    with pytest.raises(InvalidRequest, match=r"VLLM_USE_BREAKABLE_CUDAGRAPH=1: .*--enforce-eager"):
        Method(asked).load_model(None)
    mode.name = "NONE"
    check_graphs(asked)
    mode.name = "PIECEWISE"
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    check_graphs(asked)


@dataclass
class Steps:
    """Steps of a batch by a clock that is not the machine's: drafts win half a token each, and cost their time."""

    requests: int
    drafted_ms: float
    now: float = 0.0
    drafted: list[bool] = field(default_factory=list)

    def step(self, sampled: Any, lengths: Any, ids: Any, seen: Any, drafts: bool = True) -> list[list[int]]:
        self.drafted.append(drafts)
        return [[]] * self.requests

    def run(self, made: Method, count: int) -> float:
        """The share of steps behind which something is drafted, of the second half."""
        made._rounds = self  # type: ignore[assignment]
        starts, tokens = list(range(self.requests + 1)), [0] * self.requests
        for number in range(count):
            was_drafted = not self.drafted or self.drafted[-1]
            self.now += (self.drafted_ms if was_drafted else 10.0) / 1e3
            sampled = [[0, 0] if was_drafted and (number + row) % 2 else [0] for row in range(self.requests)]
            seen = SimpleNamespace(starts=starts, tokens=tokens, began=self.now - 0.005)
            made._capture = SimpleNamespace(take=lambda seen=seen: seen, fault=None)  # type: ignore[assignment]
            made.propose(sampled, None, None)
        later = self.drafted[count // 2 :]
        return sum(later) / len(later)


@pytest.mark.parametrize(
    ("requests", "drafted_ms", "is_priced", "wanted"),
    [(8, 12.0, True, True), (8, 30.0, True, False), (1, 30.0, True, True), (8, 30.0, False, True)],
)
def test_batches_draft_while_it_pays(
    monkeypatch: pytest.MonkeyPatch, requests: int, drafted_ms: float, is_priced: bool, wanted: bool
) -> None:
    """Guards against a full batch that is slower by its drafts, one that never tries again."""
    steps = Steps(requests, drafted_ms)
    monkeypatch.setattr(proposer, "perf_counter", lambda: steps.now)
    made = Method(config({"method": "lookup"}))
    made._proposer = SimpleNamespace(least_gain=0.3)  # type: ignore[assignment]
    made._price = RowPrice() if is_priced else None
    share = steps.run(made, 600)
    assert (share > 0.9) == wanted
    assert (share in (0.0, 1.0)) == (requests == 1 or not is_priced)


@pytest.mark.parametrize(
    ("settings", "device", "positions", "wanted"),
    [
        ({}, "cpu", 40960, 64),
        ({}, "cuda", 40960, 6),
        ({}, "cuda", 1 << 20, 2),  # no request is longer than the target's limit
        ({}, "cuda", 2048, 64),
        ({}, "cuda", None, 64),
        ({"slots": 16}, "cuda", 40960, 16),
    ],
)
def test_slots_leave_memory_to_vllm(settings: dict[str, Any], device: str, positions: int | None, wanted: int) -> None:
    """Guards against a drafter that takes a GPU's memory before vLLM's cache does: 54 GB for 64 slots of 40960 tokens
    in five layers with 8 heads of keys."""
    asked = config({"method": "lookup"} | settings)
    asked.model_config.max_model_len = 131072
    asked.scheduler_config = SimpleNamespace(max_num_seqs=256)
    sizes = SimpleNamespace() if positions is None else SimpleNamespace(positions=positions)
    net: Any = SimpleNamespace(config=sizes)
    no_draft_model: Any = None
    context = BuildContext(264, torch.device(device), no_draft_model, net=lambda: net)
    made = Method(asked)
    assert made._slots(context) == wanted
    if not settings:
        assert made._slots(replace(context, net=None)) == 256
