"""Where the time of a round goes: parts that take known times on a clock of their own, and the phase of each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outpace.core import timing as parts
from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.core.timing import HEAD, NET, DraftClock
from outpace.engine import engine
from outpace.engine import phases as timing
from outpace.engine import session as sessions
from outpace.engine.session import Session
from outpace.testing import OracleDrafter, ToyTarget, decode
from outpace.testing.toy import draft_request
from outpace.trees.grafting import GraftedProposer, MatrixRetriever
from outpace.trees.retrieval.transition_matrix import TransitionMatrix
from outpace.trees.shapes.rank_paths import grafted_paths
from tests.unit.engine.doubles import CharDetokenizer

CPU = torch.device("cpu")
VOCAB = 40
STEPS = 4
PHASES = ("draft_ms", "forward_ms", "verify_ms", "commit_ms", "observe_ms")
DRAFT_MS = tuple(f"{name}_ms" for name in parts.DRAFT_PARTS)


class Clock:
    """A clock that stands still but for parts that take time: milliseconds by their names."""

    def __init__(self) -> None:
        self.now, self.takes = 100.0, dict[str, float]()

    def part(self, name: str) -> None:
        self.now += self.takes.get(name, 0.0) / 1e3

    def timed(self, owner: Any, *methods: str) -> Any:
        """The owner, these methods of which are parts."""
        for name in methods:
            setattr(owner, name, self._timed(name, getattr(owner, name)))
        return owner

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **options: Any) -> Any:
            self.part(name)
            return method(*arguments, **options)

        return slow


class TimedTarget(ToyTarget):
    def __init__(self, clock: Clock) -> None:
        super().__init__(VOCAB)
        self._clock = clock
        clock.timed(self, "commit")

    def run_pass(self, chunks: Any, slots: Any, trees: Any, taps: Any = ()) -> Any:
        if trees:
            self._clock.part("forward")
        return super().run_pass(chunks, slots, trees, taps)


def timed_base(clock: Clock) -> Proposer:
    """Drafts nothing."""
    made: Proposer = clock.timed(OracleDrafter([], budget=4), "prefill", "propose", "observe")
    return made


def timed_retriever(clock: Clock) -> MatrixRetriever:
    """Knows nothing."""
    made = MatrixRetriever(TransitionMatrix(VOCAB, CPU), grafted_paths())
    made.observe = lambda *arguments: None  # type: ignore[method-assign]
    clock.timed(made, "prepare")
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (engine, sessions, timing, parts):
        monkeypatch.setattr(module, "perf_counter", lambda: clock.now)
    return clock


def run(clock: Clock, batch: int) -> list[Session]:
    proposer = GraftedProposer(timed_base(clock), [timed_retriever(clock)], CPU)
    params = SamplingParams(max_new_tokens=STEPS + 1)
    timed = engine.Engine(TimedTarget(clock), lambda: clock.timed(CharDetokenizer(), "push"))
    return decode(timed, [[1, 2]] * batch, [params] * batch, [proposer] * batch)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("part", "phases"),
    [
        ("propose", {"draft_ms", "tree_ms"}),
        ("prepare", {"draft_ms", "retrieve_ms"}),
        ("forward", {"forward_ms"}),
        ("commit", {"commit_ms"}),
        ("push", {"commit_ms"}),
        ("observe", {"observe_ms"}),
        ("prefill", set()),
    ],
)
def test_time_is_found_in_its_phase(clock: Clock, part: str, phases: set[str], batch: int) -> None:
    """Guards against learning counted as drafting, drafting as retrieval, and requests of a batch that are told a share
    of a phase, or nothing of what their company's tokens took."""
    clock.takes = {part: 10.0}
    for session in run(clock, batch):
        assert session.metrics.steps == STEPS
        spent = 10.0 * STEPS * (batch if part == "push" else 1)  # all that was accepted is committed at once
        for phase in (*PHASES, *DRAFT_MS):
            assert getattr(session.metrics, phase) == pytest.approx(spent if phase in phases else 0.0), phase


@pytest.mark.parametrize("batch", [1, 3])
def test_phases_add_up_to_the_round(clock: Clock, batch: int) -> None:
    """Guards against a phase counted twice or not at all: of a decoding nothing is left over and nothing missing."""
    names = ("propose", "prepare", "forward", "commit", "push", "observe")
    clock.takes = {name: 2.0**power for power, name in enumerate(names)}
    for session in run(clock, batch):
        metrics = session.metrics
        first = 16.0 * (batch - 1 - session.request_id)  # the first tokens of those behind it, after its own
        assert sum(getattr(metrics, phase) for phase in PHASES) + first == pytest.approx(metrics.decode_ms)
        assert sum(getattr(metrics, part) for part in DRAFT_MS) == pytest.approx(metrics.draft_ms)
        assert metrics.retrieve_ms == pytest.approx(2.0 * STEPS)


@pytest.mark.parametrize("place", ["root", "tail"])
def test_grafting_is_counted_whole(clock: Clock, place: Any) -> None:
    """Guards against a base's own drafting in the figure, and nested grafts of which only the last is counted."""
    clock.takes = {"propose": 50.0, "prepare": 10.0}
    inner = GraftedProposer(timed_base(clock), [timed_retriever(clock)], CPU, place)
    outer = GraftedProposer(inner, [timed_retriever(clock)], CPU, place)
    requests = [draft_request([5], 0, 0), draft_request([6], 4, 4)]
    for proposer, spent in ((inner, 0.01), (outer, 0.02)):
        with DraftClock() as spans:
            proposer.propose([proposer.open(slot) for slot in range(len(requests))], requests)
        assert spans.seconds["retrieve"] == pytest.approx(spent)
        assert spans.seconds["tree"] == pytest.approx(0.05)


def test_a_part_within_another_is_counted_once(clock: Clock) -> None:
    """Guards against a drafter's pass that also counts to the head around it, a part that ends with an error and stays
    open, and what is computed outside of drafting."""
    clock.takes = {"a": 1.0, "b": 2.0}

    @NET
    def net() -> None:
        clock.part("b")
        raise ValueError("of the net")

    with DraftClock() as spans:
        for _ in range(2):
            with HEAD:
                clock.part("a")
                with pytest.raises(ValueError, match="of the net"):
                    net()
                clock.part("a")
        clock.part("a")
    with HEAD:
        clock.part("a")
    assert {name: 1e3 * spent for name, spent in spans.seconds.items() if spent} == pytest.approx(
        {"head": 4.0, "net": 4.0}
    )
