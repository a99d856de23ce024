"""States of a run on disk: whole or not there, the latest few kept."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.lib.errors import InvalidRequest, ModelError

COUNTERS = "counters.json"


class States:
    """States of a run, one folder per step.

    Args:
        folder: of the states.
        keep: how many to keep.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def latest(self) -> Path | None:
        """The newest whole state, or None."""
        found = self._all()
        return found[-1] if found else None

    def scratch(self) -> Path:
        """An empty folder to write a state into, which `finish` makes one."""
        path = self._folder / "unfinished"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def finish(self, scratch: Path, step: int, counters: Mapping[str, Any]) -> None:
        """Make a written folder the state of a step, and delete those that are too many."""
        (scratch / COUNTERS).write_text(json.dumps({"step": step, **counters}))
        final = self._folder / f"step-{step:08d}"
        shutil.rmtree(final, ignore_errors=True)
        os.replace(scratch, final)
        for old in self._all()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _all(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if re.fullmatch(r"step-\d{8}", path.name))


def replace_folder(new: Path, old: Path) -> None:
    """Put a folder in the place of another, which is whole until the new one is there."""
    aside = old.with_name(old.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    if old.exists():
        os.replace(old, aside)
    os.replace(new, old)
    shutil.rmtree(aside, ignore_errors=True)


def read_counters(state: Path) -> dict[str, Any]:
    """What `finish` was given, with "step".

    Raises:
        ModelError: the state is damaged.
    """
    try:
        counters = json.loads((state / COUNTERS).read_text())
        counters["step"] + 0
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{state}: a damaged state ({error}); delete it, and the run goes on from the one before"
        ) from error
    return dict(counters)


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Refuse a disk that is too small before anything is written.

    Args:
        folder: where it is to be written; need not exist yet.
        needed: bytes.
        what: for the error.

    Raises:
        InvalidRequest: less is free.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise InvalidRequest(
            f"out={str(folder)!r}: {what} need {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free there; make "
            "room or choose another disk"
        )
