"""The folder of a bench run: records as they come, and their settings, so that a run that was killed goes on there."""

import json
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from outpace.lib.errors import InvalidRequest

SETTINGS, RECORDS = "settings.json", "records.jsonl"


class RunFolder:
    """A folder of records, all made with the same settings.

    Args:
        folder: new, empty, or of a run with these settings.
        settings: what the records depend on; must be JSON.

    Raises:
        InvalidRequest: its records were made with other settings, or say nothing of them; a file that cannot be read.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path = folder
        wanted = json.loads(json.dumps(settings))
        if (folder / SETTINGS).is_file():
            made = _read_object(folder / SETTINGS)
            for field in dict.fromkeys([*wanted, *made]):
                if made.get(field) != wanted.get(field):
                    raise InvalidRequest(
                        f"out={str(folder)!r}: its records were made with {field}={made.get(field)!r}, and this run "
                        f"has {wanted.get(field)!r}; choose a new folder"
                    )
        elif (folder / RECORDS).exists():
            raise InvalidRequest(f"out={str(folder)!r}: its records do not say their settings; choose a new folder")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            _write_whole(folder / SETTINGS, json.dumps(wanted, indent=1))

    def read(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Records of the groups that are there whole; what a kill left of another one is cut off.

        Args:
            sizes: records of each group, in the order in which they are written.
        """
        path = self.path / RECORDS
        try:
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(path, error) from error
        lines = text.split("\n")[:-1]  # behind the last line break stands nothing, or a line that was cut off
        whole = max((end for end in accumulate(sizes) if end <= len(lines)), default=0)
        kept = "".join(line + "\n" for line in lines[:whole])
        if kept != text:
            _write_whole(path, kept)
        return [_object_of(path, line) for line in lines[:whole]]

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add the records of a group."""
        with (self.path / RECORDS).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return _object_of(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _object_of(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(found, dict):
        raise _unreadable(path, f"an object is expected, not {type(found).__name__}")
    return found


def _unreadable(path: Path, reason: object) -> InvalidRequest:
    return InvalidRequest(f"{path}: cannot be read: {reason}; choose a new folder")


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole, or as it was."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
