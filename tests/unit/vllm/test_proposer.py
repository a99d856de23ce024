"""Our proposers as vLLM calls them, without vLLM: settings, refusals, and faults while serving."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outpace.core.errors import InvalidRequest
from outpace.vllm import proposer as classes
from outpace.vllm.proposer import Method
from outpace.vllm.rounds import Rounds
from tests.unit.vllm.simulated import Witness


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here needs one."""
    monkeypatch.setattr(classes, "check_host", lambda: None)


def config(settings: Any = None, **parallel: int) -> Any:
    """What our proposers read of vLLM's configuration."""
    return SimpleNamespace(
        additional_config={} if settings is None else {"outpace": settings},
        parallel_config=SimpleNamespace(**{"pipeline_parallel_size": 1, "tensor_parallel_size": 1, **parallel}),
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "lookahead"}, "chains only"),
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


def test_more_drafts_than_vllm_verifies_are_refused() -> None:
    """Guards against an engine that ends when a long draft comes: vLLM's sampler asserts that no step has more."""
    asked = config({"method": "lookup"})
    asked.speculative_config.num_speculative_tokens = 129
    with pytest.raises(InvalidRequest, match="num_speculative_tokens=129: vLLM verifies at most 128"):
        Method(asked)


def test_a_method_must_be_named() -> None:
    """Guards against a class without a method that drafts by some default."""
    with pytest.raises(InvalidRequest, match="name a method"):
        Method(config())
    assert Method(config({"method": "lookup"})) is not None


def test_pipelines_are_refused() -> None:
    """Guards against a rank that waits for hidden states which are on another one."""
    with pytest.raises(InvalidRequest, match="pipeline_parallel_size=2"):
        classes.Union(config(pipeline_parallel_size=2))


def test_every_class_names_a_method() -> None:
    """Guards against a class whose method was renamed."""
    own = [one for one in vars(classes).values() if isinstance(one, type) and issubclass(one, Method)]
    assert len([one(config({"method": "lookup"} if one is Method else None)) for one in own]) >= 7


class Failing(Witness):
    """Fails at the third draft."""

    def propose(self, states: Any, requests: Any) -> Any:
        if self.proposed == 2:
            raise RuntimeError("no more")
        return super().propose(states, requests)


def test_a_proposer_that_fails_goes_without_drafts(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a server that dies of its drafter, that fills its log with one error, or that goes on with states
    which an exception left half changed."""
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
