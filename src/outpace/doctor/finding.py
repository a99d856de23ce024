"""A finding of the doctor: a measurement, a verdict, and a remedy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["fine", "look here"]


@dataclass(frozen=True)
class Finding:
    """The result of one examination. `verdict`: "fine", or "look here" if speed or exactness is lost. `remedy`: a
    sentence with a command or a setting; empty if the verdict is "fine"."""

    name: str
    measured: str
    verdict: Verdict
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_fine(self) -> bool:
        return self.verdict == "fine"


def finding(name: str, measured: str, remedy: str = "", **figures: Any) -> Finding:
    """A finding that is fine unless there is a remedy for it."""
    return Finding(name, measured, "look here" if remedy else "fine", remedy, figures)
