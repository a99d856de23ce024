"""An exception at every line by which requests come in: no slot is lost, nothing runs on, and what is said is right."""

from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from tests.interrupted.injector import SOURCE, Interrupt, Line, NoMemory, Shot
from tests.interrupted.play import assert_nothing_wrong, undisturbed

METHODS = ("lookup", "recycle", "plain", "lookahead")
FILES = ("engine/admission.py", "engine/session.py", "engine/stopping.py", "engine/engine.py")
TIMES = 3
"""How often a line must have run before it is cut short: at its first times, that is in the first requests."""


@cache
def lines() -> Counter[Line]:
    """Lines of admission that run where nothing is raised, and how often."""
    wanted = {str(Path(SOURCE) / file) for file in FILES}
    return Counter({line: count for line, count in undisturbed(METHODS)[0].seen.items() if line[0] in wanted})


def shots() -> list[Shot]:
    """Every line at its first times and its last one, by Ctrl-C and by a full memory in turn."""
    places = [
        (line, number)
        for line, count in sorted(lines().items())
        for number in sorted({*range(1, min(count, TIMES) + 1), count})
    ]
    return [Shot(line, number, (Interrupt, NoMemory)[index % 2]) for index, (line, number) in enumerate(places)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_an_exception_at_any_line_of_admission_loses_nothing(step: int) -> None:
    """Guards against a slot that is lost, and a `close()` that raises, where an exception falls into admission, and
    against other answers afterwards."""
    raised = 0
    for shot in islice(shots(), 0, None, step):
        raised += assert_nothing_wrong(METHODS, [shot])
    assert raised > len(shots()) // step * 0.9, "the exceptions must come"


def test_admission_is_what_is_cut_short() -> None:
    """Guards against a test that looks at too few lines."""
    files = Counter(Path(file).name for file, _ in lines())
    assert files["admission.py"] > 70
    assert files["engine.py"] > 50
