"""A step happens as a whole or not at all: what is counted, who is told, and what ends a request that is lost.

That it holds at every line is for `tests/interrupted`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outpace.core.params import SamplingParams
from outpace.core.protocols import Observation
from outpace.engine.engine import Engine
from outpace.engine.session import Change
from outpace.lib.errors import StateLost
from outpace.testing import OracleDrafter, ToyTarget
from outpace.trees.proposer import EmptyDraft
from tests.unit.engine.doubles import PROMPT, VOCAB, CharDetokenizer, alone, failing, run_all, text_of, toy_engine

PARAMS = SamplingParams(max_new_tokens=12)


def stubborn() -> Any:
    """A method that cannot serve anybody."""
    return failing(propose=ZeroDivisionError)


class LateFailure(OracleDrafter):
    """Fails once, in the last thing that a round does before it is over."""

    is_failing = False

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None:
        super().observe(states, observations)
        if self.is_failing:
            self.is_failing = False
            raise KeyboardInterrupt


def test_nothing_is_counted_or_returned_twice() -> None:
    """Guards against metrics, events, text and log-probabilities of a round that was rolled back."""
    answer = alone(PROMPT, PARAMS)
    params = SamplingParams(max_new_tokens=12, logprobs=1)
    counts = []
    for times in (0, 3):
        drafter = LateFailure([PROMPT + answer], budget=2)
        engine = Engine(ToyTarget(VOCAB, seed=13), CharDetokenizer)
        (session,) = engine.add(PROMPT, params, drafter)
        for _ in range(2):
            engine.step()
        for _ in range(times):
            drafter.is_failing = True
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            assert len(session.ids) - len(PROMPT) == session.metrics.new_tokens == len(session.logprobs)
            assert len(session.events) == 2
        run_all(engine, [session])
        metrics = {name: value for name, value in vars(session.metrics).items() if not name.endswith("_ms")}
        metrics["rounds"] = [(tokens, drafted) for tokens, drafted, _ in session.metrics.rounds]
        counts.append(metrics)
        assert session.generated == answer == [entry.token_id for entry in session.logprobs]
        assert [token for event in session.events for token in event.tokens] == answer
        assert "".join(event.text for event in session.events) == session.stopper.text == text_of(answer)
    assert counts[0] == counts[1]
    assert counts[0]["accepted"] == sum(counts[0]["accepted_per_depth"]) > 0


def test_a_request_that_cannot_be_restored_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a request that goes on with half a round's state, against its neighbours ending with it, and
    against a traceback that gets longer with each reading of the error."""
    engine = toy_engine()
    run_pass = engine.target.run_pass

    def interrupted(*arguments: Any, **options: Any) -> None:
        run_pass(*arguments, **options)
        raise KeyboardInterrupt

    (lost,) = engine.add(PROMPT, PARAMS, failing(rewind=RuntimeError))
    (other,) = engine.add([9, 9], PARAMS, EmptyDraft())
    for _ in range(3):
        engine.step()
    said = list(lost.generated)
    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "run_pass", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    run_all(engine, [lost, other])
    assert (lost.finish_reason, other.finish_reason) == ("error", "length")
    assert lost.generated == said
    lengths = []
    for _ in range(3):
        with pytest.raises(StateLost, match=r"request 0: .*planted.*send it again") as caught:
            engine.result(lost)
        lengths.append(len(caught.traceback))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert lengths[0] == lengths[-1]
    assert other.generated == alone([9, 9], PARAMS)
    assert engine.free_slots == engine.target.max_slots


@pytest.mark.parametrize("own", [0, 1])
def test_an_error_concerns_those_who_cause_it(own: int) -> None:
    """Guards against a request that takes down whoever makes the step, and a caller of it who never hears of it."""
    engine = toy_engine()
    sessions = [engine.add(PROMPT, PARAMS, proposer)[0] for proposer in (stubborn(), EmptyDraft())]

    def wait() -> None:
        engine.run_until(lambda: sessions[own].has_ended, [sessions[own]])

    if own == 0:
        with pytest.raises(ZeroDivisionError):
            wait()
    else:
        wait()
        assert sessions[1].generated == alone(PROMPT, PARAMS)
    engine.cancel(sessions[0])
    run_all(engine, sessions)
    assert sessions[1].generated == alone(PROMPT, PARAMS)


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_a_step_that_has_happened_is_not_made_again(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against tokens behind the end: requests that ended in a step which failed while it was noted down."""
    engine = toy_engine()
    params = SamplingParams(max_new_tokens=3)
    sessions = [engine.add(PROMPT, params, EmptyDraft())[0] for _ in range(2)]
    for _ in range(2):
        engine.step()
    applied: Callable[[Change], None] = Change.apply
    fails = [kind()]

    def apply(change: Change) -> None:
        applied(change)
        if fails:
            raise fails.pop()

    monkeypatch.setattr(Change, "apply", apply)
    for session in sessions:
        try:
            engine.run_until(lambda session=session: session.has_ended, [session])  # type: ignore[misc]
        except KeyboardInterrupt:
            engine.run_until(lambda session=session: session.has_ended, [session])  # type: ignore[misc]
    assert not fails
    for session in sessions:
        assert session.generated == alone(PROMPT, params)
        assert [event.finish_reason for event in session.events] == [None, None, "length"]
    engine.step()
    assert engine.is_idle


def test_who_waits_behind_requests_that_fail_hears_of_it() -> None:
    """Guards against a caller that waits for ever where all slots are held by requests whose steps fail, and against
    failing while others may still make room."""
    engine = toy_engine(max_slots=2)
    stuck, healthy = (engine.add(PROMPT, PARAMS, proposer)[0] for proposer in (stubborn(), EmptyDraft()))
    engine.step()
    (waiting,) = engine.add([9, 9], PARAMS, EmptyDraft())
    engine.run_until(lambda: waiting.has_ended, [waiting])
    assert healthy.has_ended
    assert waiting.generated == alone([9, 9], PARAMS)
    (other,) = engine.add(PROMPT, PARAMS, stubborn())
    with pytest.raises(ZeroDivisionError):
        engine.run_until(lambda: other.has_ended, [other])
    (waiting,) = engine.add([9, 9], PARAMS, EmptyDraft())
    with pytest.raises(ZeroDivisionError):
        engine.run_until(lambda: waiting.has_ended, [waiting])
    assert None not in (stuck.slot, other.slot)
