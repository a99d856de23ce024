"""The files of a run other than the drafter: provenance, states to resume from, and its log."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.data.answers import write_whole
from outpace.data.workload import WorkItem
from outpace.drafters.load import PROVENANCE
from outpace.lib.errors import InvalidRequest, ModelError

LOG, COUNTERS = "log.jsonl", "counters.json"


def files_hash(paths: Sequence[Path]) -> str:
    """SHA-256 of the SHA-256s of files, in order."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        total.update(digest.digest())
    return total.hexdigest()


def prompts_hash(items: Iterable[WorkItem]) -> str:
    """SHA-256 of prompts, independent of their files."""
    total = hashlib.sha256()
    for item in items:
        total.update(json.dumps([item.id, item.turns, item.raw]).encode() + b"\n")
    return total.hexdigest()


def claim(folder: Path, depends: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """Write the provenance of a new run, or check that a resumed run has the same settings."""
    path = folder / PROVENANCE
    wanted = json.loads(json.dumps(depends))
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["run"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(f"{path}: cannot be read ({error}); choose a new folder") from error
        different = sorted(_differences(found, wanted, ""))
        if different:
            raise InvalidRequest(
                f"out={str(folder)!r}: holds a run with {'; '.join(different)}; choose a new folder, or give the same"
            )
    write_whole(path, json.dumps({"run": wanted, **notes}, indent=1).encode())


def _differences(found: Any, wanted: Any, name: str) -> list[str]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        return [
            line
            for key in {*found, *wanted}
            for line in _differences(found.get(key), wanted.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if found == wanted else [f"{name}={found!r}, and this one has {wanted!r}"]


class States:
    """States of a run, one folder per step, each complete or absent; the latest `keep` are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def latest(self) -> Path | None:
        """The newest complete state, or None."""
        found = self._all()
        return found[-1] if found else None

    @property
    def unfinished(self) -> Path:
        """The folder that a state is written into."""
        return self._folder / "unfinished"

    def scratch(self) -> Path:
        """`unfinished`, emptied."""
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.unfinished.mkdir(parents=True)
        return self.unfinished

    def finish(self, step: int, counters: Mapping[str, Any]) -> None:
        """Make `unfinished` the state of a step, and delete the oldest states."""
        (self.unfinished / COUNTERS).write_text(json.dumps({"step": step, **counters}))
        final = self._folder / f"step-{step:08d}"
        shutil.rmtree(final, ignore_errors=True)
        os.replace(self.unfinished, final)
        for old in self._all()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _all(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if re.fullmatch(r"step-\d{8}", path.name))


def read_counters(state: Path) -> dict[str, Any]:
    """The counters given to `States.finish`, with "step"."""
    try:
        counters = json.loads((state / COUNTERS).read_text())
        counters["step"] + 0
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{state}: a damaged state ({error}); delete it to resume from the one before") from error
    return dict(counters)


def replace_folder(new: Path, old: Path) -> None:
    """Replace a folder; the old one stays complete until the new one takes its place."""
    aside = old.with_name(old.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    if old.exists():
        os.replace(old, aside)
    os.replace(new, old)
    shutil.rmtree(aside, ignore_errors=True)


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Refuse a disk that is too small before anything is written."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise InvalidRequest(
            f"out={str(folder)!r}: {what} need {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free there; free "
            "some space or choose another disk"
        )


class RunLog:
    """The log in a run's folder: a JSON object per line, which a resumed run continues."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG

    def write(self, shown: Mapping[str, Any]) -> None:
        """Add a line, which must have a "step"."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(shown) + "\n")

    def cut(self, step: int) -> None:
        """Remove lines after a step, and an incomplete last line."""
        if self._path.is_file():
            kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
            write_whole(self._path, "".join(line + "\n" for line in kept).encode())


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


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
