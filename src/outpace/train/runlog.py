"""A run's log: one JSON object per line, which a run that goes on from a state continues as if it had never stopped."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.data.folder import write_whole

FILE = "log.jsonl"


class RunLog:
    """The log in a run's folder.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def write(self, shown: Mapping[str, Any]) -> None:
        """Add a line; it has a "step"."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(shown) + "\n")

    def cut(self, step: int) -> None:
        """Take away what was written after a step, and a last line that was cut off."""
        if self._path.is_file():
            kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
            write_whole(self._path, "".join(line + "\n" for line in kept).encode())


def scalars(shown: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers by name, as TensorBoard takes them: "held_out/by_position/1" for the first of a list."""
    found: dict[str, float] = {}
    for name, value in shown.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            found |= {f"{prefix}{name}/{at}": float(one) for at, one in enumerate(value, start=1)}
        elif name != "step":
            found[prefix + name] = float(value)
    return found


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
