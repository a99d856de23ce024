"""Steps happen as a whole or not at all: exceptions at random lines of every room, and all that is said afterwards."""

import random
from pathlib import Path

import pytest

import outpace
from tests.interrupted.doors import METHODS as DOOR_METHODS
from tests.interrupted.doors import OPTIONS, Doors
from tests.interrupted.injector import Injector, Interrupt, Line, NoMemory, Shot
from tests.interrupted.play import assert_nothing_wrong, choose, undisturbed
from tests.interrupted.world import METHODS
from tests.unit.models.tiny import save_tiny_model

TOGETHER = (
    ("lookup", "recycle", "samd", "lookahead", "union"),
    ("linear", "dynatree", "exit", "fixed"),
    ("eagle3", "dart", "medusa"),
    ("domino", "dflash", "eagle3"),
    ("graft", "tail", "recycle"),
    ("union-domino", "union-eagle3", "union"),
    ("private", "linear", "domino", "samd"),
    ("plain", "lookahead", "eagle3"),
)
"""Methods of the requests that are open at a time."""
KINDS = (Interrupt, NoMemory)


def shots(where: Line, number: int, source: random.Random) -> list[Shot]:
    """An exception at a line, and often others soon after it, as while the first is made up for."""
    made = [Shot(where, number, source.choice(KINDS))]
    while source.random() < 0.5:
        made.append(Shot(None, source.choice((source.randint(1, 12), source.randint(1, 300))), source.choice(KINDS)))
    return made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trials", [4, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("methods", TOGETHER, ids="-".join)
def test_an_exception_anywhere_changes_nothing_that_is_said(methods: tuple[str, ...], trials: int) -> None:
    """Guards against steps that happen by half: other tokens than plain decoding's in the request that was interrupted,
    in its neighbours, in a stream that is read on or in newcomers, errors out of nowhere, and slots or hooks that
    nobody takes back."""
    seen = undisturbed(methods)[0].seen
    source, raised = random.Random(trials), 0
    for _ in range(trials):
        where, number = choose(seen, source)
        raised += assert_nothing_wrong(methods, shots(where, number, source)) > 0
    assert raised > trials // 2, "the exceptions must come"


def test_every_method_is_interrupted() -> None:
    """Guards against a kind of method that is never open when an exception comes."""
    assert {method for methods in TOGETHER for method in methods} == set(METHODS)


def test_beginnings_are_shared_when_exceptions_come() -> None:
    """Guards against requests that have nothing to share with each other while they are interrupted."""
    for methods in TOGETHER:
        sessions = undisturbed(methods)[1].sessions
        sharing = [name for name, session, _, _ in sessions if session.metrics.reused_tokens]
        assert [name for name in sharing if not name.startswith("5:")], f"{methods}: what goes on with an answer alone"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trials", [6, pytest.param(300, marks=pytest.mark.slow)])
def test_doors_can_be_used_on_after_an_exception(trials: int, tmp_path: Path) -> None:
    """Guards against `generate`, `stream` and `chat` that go on wrongly when what was interrupted is done again, on a
    model that has been through it before."""
    folder = save_tiny_model(tmp_path, max_position_embeddings=512)
    model = outpace.load(str(folder), dtype="float32", device="cpu", max_num_seqs=2)
    source, lost = random.Random(trials), 0
    for trial in range(trials):
        method, options = DOOR_METHODS[trial % len(DOOR_METHODS)], OPTIONS[trial % len(OPTIONS)]
        dry = Injector()
        doors = Doors(model, dry)
        doors.use(method, options)
        assert not doors.faults, "without exceptions nothing must be wrong"
        injector = Injector()
        where, number = choose(dry.seen, source)
        injector.arm(*shots(where, number, source))
        doors = Doors(model, injector)
        doors.use(method, options)
        assert not doors.faults, f"raised at {injector.raised}: {doors.faults}"
        lost += doors.lost > 0
    assert lost <= max(2, trials // 10), "a request that cannot be restored is rare"
