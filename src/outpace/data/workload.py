"""Prompts from JSON lines with an id, a dataset name and one or more turns."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from outpace.lib.checks import as_count, check_flags, check_text, path_of
from outpace.lib.errors import InvalidRequest

BUILT_IN = "builtin"


@dataclass(frozen=True)
class WorkItem:
    """One prompt of a workload. Its category is that in the file."""

    id: str
    dataset: str
    turns: tuple[str, ...]
    raw: bool = False
    category: str = field(default="", compare=False)

    @property
    def digest(self) -> int:
        """A hash of the prompt, at least 1."""
        asked = json.dumps([self.turns, self.raw]).encode()
        return 1 + int.from_bytes(hashlib.blake2b(asked, digest_size=7).digest(), "little")

    def prompt(self, turn: int, answers: list[str]) -> Any:
        """The prompt of a turn, given the answers to earlier turns."""
        if self.raw:
            before = [text for pair in zip(self.turns, answers) for text in pair]
            return "".join([*before, self.turns[turn]])
        messages = []
        for asked, answered in zip(self.turns, answers):
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": self.turns[turn]}]


def read_workload(spec: str, limit: int | None = None) -> list[WorkItem]:
    """Read "FILE" or "FILE:LIMIT"; "builtin" and "builtin:LIMIT" are a few prompts of this package. `limit`: used if
    `spec` has none; None for all."""
    name, _, ending = spec.rpartition(":")
    if (count := as_count(ending)) is None:
        name = spec
    else:
        limit = count
    if name == BUILT_IN:
        text = (files("outpace") / "data" / "prompts.jsonl").read_text(encoding="utf-8")
    else:
        path = path_of(name)
        if not path.is_file():
            raise InvalidRequest(f"workload {name!r}: no such file; give a JSON-lines file or '{BUILT_IN}'")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"workload {name!r}: cannot be read as UTF-8 text: {error}") from error
    # Not splitlines, which also splits at separators that JSON strings may hold, such as U+2028.
    items = [_read_line(name, number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not items:
        raise InvalidRequest(f"workload {name!r}: no prompts in it")
    return items[:limit]


def read_workloads(
    specs: list[str], max_turns: int | None = None, limit: int | None = None, may_be_empty: bool = False
) -> tuple[WorkItem, ...]:
    """Several workloads, conversations cut to `max_turns`, with `limit` items of those that name no limit."""
    if max_turns is not None and max_turns < 1:
        raise InvalidRequest(f"max_turns={max_turns}: must be at least 1")
    items = [item for spec in specs for item in read_workload(spec, limit)]
    if specs and not items and not may_be_empty:
        raise InvalidRequest(f"workload {specs[-1]!r}: its limit leaves no prompts; give 1 or more")
    return tuple(replace(item, turns=item.turns[:max_turns]) for item in items)


def fingerprint(items: Sequence[WorkItem]) -> str:
    """The number of prompts, and a short hash of them."""
    digest = hashlib.sha256(json.dumps([asdict(item) for item in items]).encode())
    return f"{len(items)} prompts, sha256 {digest.hexdigest()[:16]}"


def in_groups(items: Sequence[WorkItem], size: int) -> list[Sequence[WorkItem]]:
    """Items in groups of `size` to decode together; the last one may be smaller."""
    if size < 1:
        raise InvalidRequest(f"batch_size={size}: must be at least 1")
    groups = [items[start : start + size] for start in range(0, len(items), size)]
    for group in groups:
        if len({len(item.turns) for item in group}) > 1:
            turns = ", ".join(f"{item.id} {len(item.turns)}" for item in group)
            raise InvalidRequest(
                f"batch_size={size}: prompts decoded together need the same number of turns, and these have {turns}: "
                "cut them with --max-turns 1 (max_turns=1)"
            )
    return groups


def _read_line(name: str, number: int, line: str) -> WorkItem:
    where = f"workload {name!r}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and nesting as deep
        raise InvalidRequest(f"{where}: not JSON: {error}") from error
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise InvalidRequest(f"{where}: needs 'turns', a list of non-empty strings")
    for turn in turns:
        check_text(f"{where}: turns", turn)  # early, not in the middle of a run: JSON may hold half a surrogate pair
    check_flags(**{f"{where}: raw": row.get("raw", False)})
    dataset = str(row.get("dataset", Path(name).stem))
    name, category = str(row.get("id", f"{dataset}-{number}")), str(row.get("category", ""))
    check_text(f"{where}: id", name)  # which is hashed
    return WorkItem(name, dataset, tuple(turns), row.get("raw", False), category)
