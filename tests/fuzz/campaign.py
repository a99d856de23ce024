"""What fuzzers share: how many cases, and what became of them.

Cases follow from their seed and number alone. `make test` tries a few, and a campaign as many times as many as it
says: OUTPACE_FUZZ_FACTOR=10 pytest tests/fuzz -s
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from outpace.lib.errors import OutpaceError
from tests.fuzz.mutation import factor


def counts(quick: int, thorough: int) -> pytest.MarkDecorator:
    """The parameter `cases` of a fuzzer; of the thorough one times the factor that the environment says."""
    many = thorough * factor()
    return pytest.mark.parametrize(
        "cases", [pytest.param(quick, id="quick"), pytest.param(many, id="many", marks=pytest.mark.slow)]
    )


class Tally:
    """What became of the cases of a fuzzer.

    Attributes:
        outcomes: how many cases were answered and refused.
        failures: what went wrong, in words: a traceback, a mistake that was answered, an answer that is another.
    """

    def __init__(self, name: str) -> None:
        self.name, self.outcomes, self.failures = name, Counter[str](), list[str]()

    def attempt(self, said: str, call: Callable[[], Any], names: tuple[str, ...] | None, may: bool = False) -> Any:
        """Make a call that must be refused, or must not.

        Args:
            said: the case in words.
            call: it.
            names: one of these must be in the error's one line; None if the call must be answered.
            may: it may be answered or refused.

        Returns:
            What the call returned; None where it was refused.
        """
        try:
            answer = call()
        except OutpaceError as error:
            self.outcomes["refused"] += 1
            line = str(error)
            if names is None and not may:
                self.failures.append(f"right and refused: {said}: {line[:300]}")
            elif "\n" in line or len(line) > 1500:
                self.failures.append(f"more than a line: {said}: {line[:300]!r}")
            elif names and not any(name in line for name in names):
                self.failures.append(f"refused without its name, one of {names}: {said}: {line[:300]}")
            return None
        except Exception as error:
            self.outcomes["traceback"] += 1
            self.failures.append(f"traceback: {said}: {type(error).__name__}: {str(error)[:300]}")
            return None
        self.outcomes["answered"] += 1
        if names is not None and not may:
            self.failures.append(f"a mistake that was answered: {said}")
        return answer

    def check(self) -> None:
        """Say how many cases there were, and fail if any failed."""
        total = sum(self.outcomes.values())
        print(f"\n{self.name}: {total} cases, {dict(self.outcomes)}, {len(self.failures)} failures")
        assert not self.failures, f"{len(self.failures)} of {total}: " + "\n".join(self.failures[:20])
