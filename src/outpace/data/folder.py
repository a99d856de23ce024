"""Folders of what a long run makes: parts that are written whole or not at all, so that a run that was killed goes on
where its last part ended, and a file that says how they were made."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.paths import path_of

ABOUT = "about.json"


class PartFolder:
    """A folder of parts.

    Args:
        folder: new, empty, or with parts.
        contents: what is stored there, and the name under which a user gives it: "answers", "features".
    """

    def __init__(self, folder: str | Path, contents: str) -> None:
        self.path, self.contents = path_of(folder), contents
        self.format = f"outpace.{contents}"

    def parts(self) -> list[Path]:
        """In the order in which they were written."""
        return sorted(self.path.glob("part-[0-9][0-9][0-9][0-9][0-9].safetensors"))

    def check(self, about: Mapping[str, Any]) -> None:
        """Refuse a folder with other contents, or contents made otherwise.

        Args:
            about: settings that the contents depend on; must be JSON.

        Raises:
            InvalidRequest: as above.
            ModelError: what the folder says of itself cannot be read.
        """
        if (self.path / ABOUT).is_file():
            made, wanted = self.about(), json.loads(json.dumps(about))
            for field in sorted({*made, *wanted} - {"format"}):
                if made.get(field) != wanted.get(field):
                    raise InvalidRequest(
                        f"out={str(self.path)!r}: its {self.contents} were made with {field}={made.get(field)!r}, and "
                        f"this run has {wanted.get(field)!r}; choose a new folder"
                    )
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise InvalidRequest(f"out={str(self.path)!r}: is no folder of {self.contents}; choose a new one")

    def claim(self, about: Mapping[str, Any]) -> None:
        """Make a new folder one of such contents; errors as `check`."""
        self.check(about)
        if not (self.path / ABOUT).is_file():
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / ABOUT, json.dumps({"format": self.format, **about}, indent=1).encode())

    def about(self) -> dict[str, Any]:
        """How the contents were made, and their "format".

        Raises:
            ModelError: it is no folder of such contents.
        """
        where = f"{self.contents}={str(self.path)!r}"
        try:
            about = json.loads((self.path / ABOUT).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{where}: no readable {ABOUT} in it ({error})") from error
        if not isinstance(about, dict) or about.get("format") != self.format:
            raise ModelError(f"{where}: {ABOUT} is not that of a folder of {self.contents}")
        return about

    def write(self, tensors: Mapping[str, Tensor], names: list[str]) -> Path:
        """Add a part.

        Args:
            tensors: what it holds.
            names: of what it holds, for `opened`.

        Raises:
            ModelError: it cannot be written; what was written before stays.
        """
        numbers = [int(part.stem.removeprefix("part-")) for part in self.parts()]
        # Not their count: a damaged part may have been deleted, and those behind it are whole.
        path = self.path / f"part-{max(numbers, default=-1) + 1:05d}.safetensors"
        scratch = path.with_suffix(".tmp")
        try:
            save_file(dict(tensors), scratch, {"format": self.format, "ids": json.dumps(names)})
            os.replace(scratch, path)
        except (OSError, SafetensorError) as error:
            scratch.unlink(missing_ok=True)
            raise ModelError(
                f"{path}: cannot be written ({error}); make room and run the same command again"
            ) from error
        return path


@contextmanager
def opened(part: Path) -> Iterator[tuple[Any, list[str]]]:
    """A part and the names in it; tensors are read as they are asked for.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        with safe_open(part, framework="pt") as file:
            names = json.loads((file.metadata() or {}).get("ids", "null"))
            if not isinstance(names, list):
                raise contradiction(part)
            yield file, names
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{part}: cannot be read ({error}); delete it and run the same command again") from error


def contradiction(part: Path) -> ModelError:
    """The error for a part of which one half does not go with the other."""
    return ModelError(f"{part}: contradicts itself; delete it and run the same command again")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole, or as it was."""
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(content)
    os.replace(scratch, path)
