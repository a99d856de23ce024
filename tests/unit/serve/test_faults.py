"""Exceptions out of the engine: those whose fault it is get a 500, the others their answers, and nothing hangs."""

import errno
import io
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.api import Model
from outpace.core.protocols import BaseProposer, DraftRequest
from outpace.core.tree import DraftTree
from outpace.methods.catalog import parse_method
from outpace.serve.run import new_log
from tests.unit.serve.served import serving, tiny_model
from tests.unit.serve.test_limits import wait_until
from tests.unit.serve.test_refusals import CHAT, error_of


class Faulty(BaseProposer):
    """Fails when a request has said so many tokens; where it does not, it drafts nothing."""

    def __init__(self, at: int) -> None:
        self.at = at

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        if any(len(request.sampling.ids) - request.sampling.prompt_length >= self.at for request in requests):
            raise RuntimeError("the drafter is broken")
        return [DraftTree.chain(torch.tensor(request.sampling.ids[-1:])) for request in requests]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return tiny_model(tmp_path)


def test_a_request_that_breaks_steps_fails_alone(model: Model) -> None:
    """Guards against a fault that ends its neighbours' answers, or is met again at every step for ever."""
    spec = parse_method("lookup:budget=2")
    model._proposers._recent[spec] = model._proposers._alive[spec] = Faulty(at=5)
    common = CHAT | {"max_tokens": 40, "temperature": 0}
    bodies = [common | {"seed": index, "stream": index % 2 == 1} for index in range(4)]
    for body in bodies[:2]:
        body["outpace"] = {"method": "lookup:budget=2"}
    expected = model.generate(CHAT["messages"], max_new_tokens=40).text
    with serving(model) as one, ThreadPoolExecutor(4) as pool:
        whole, streamed, sound, flowing = pool.map(one.post, bodies)
        assert error_of(whole, 500)["code"] == "engine_fault"
        events = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "engine_fault"
        assert sound.json()["choices"][0]["message"]["content"] == expected
        pieces = [json.loads(line[6:]) for line in flowing.text.split("\n\n") if line.startswith("data: {")]
        assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces) == expected
        assert "the drafter is broken" in str(one.log.lines)
        assert one.chat(max_tokens=40).choices[0].message.content == expected
        one.assert_idle()
        assert one.metric("request_success_total", finished_reason="error") == 2


@pytest.mark.usefixtures("without_kernels")
def test_a_target_that_says_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a 200 without an answer where the model failed, and a server that is done for afterwards."""
    model = tiny_model(tmp_path)
    with serving(model) as one:
        run_pass = model.target.run_pass

        def broken(*args: Any, **options: Any) -> Any:
            written, outputs = run_pass(*args, **options)
            for output in outputs:
                output.logits.fill_(float("nan"))
                output.top_logits.fill_(float("nan"))
            return written, outputs

        with monkeypatch.context() as patch:
            patch.setattr(model.target, "run_pass", broken)
            error = error_of(one.post(CHAT | {"outpace": {"method": "plain"}}), 500)
        assert (error["code"], "finite" in error["message"]) == ("engine_fault", True)
        assert one.chat().choices[0].message.content
        one.assert_idle()


def test_an_unforeseen_fault_of_the_server(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback in an answer, one that no line of the log belongs to."""
    with serving(model) as one:
        with monkeypatch.context() as patch:
            patch.setattr(one.service, "_add", lambda *args: 1 / 0)
            answer = one.post(CHAT)
        error = error_of(answer, 500)
        assert (error["code"], "division" in error["message"]) == ("server_fault", False)
        assert "ZeroDivisionError" in str(one.log.lines)
        wait_until(lambda: any(line["event"] == "request" for line in one.log.lines))
        told = [line for line in one.log.lines if line["event"] in ("request", "unforeseen")]
        assert {line["request_id"] for line in told} == {answer.headers["x-request-id"]}
        assert [line["status"] for line in told if line["event"] == "request"] == [500]
        assert one.chat().choices[0].message.content
        one.assert_idle()


class Closed(io.StringIO):
    """A pipe whose reader has ended, as in `outpace serve MODEL 2>&1 | grep -m1 ready`."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_log_that_nobody_reads_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that SIGTERM does not end, and an engine that the first fault ends, since they log."""
    monkeypatch.setattr(sys, "stderr", Closed())
    log = new_log()
    log.info("draining")
    log.error("engine_fault", error="x", exc_info=RuntimeError("x"))
