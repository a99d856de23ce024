"""Where a drafter comes from: data, template, versions and settings, written beside it."""

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outpace.data.folder import write_whole
from outpace.data.workload import WorkItem
from outpace.lib.checkout import git
from outpace.lib.errors import InvalidRequest, ModelError

FILE = "provenance.json"
PACKAGES = ("outpace", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "tensorboard")


def files_hash(paths: Sequence[Path]) -> str:
    """SHA-256 of the contents of files, in their order, cut apart by their lengths."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        total.update(digest.digest())
    return total.hexdigest()


def prompts_hash(items: Iterable[WorkItem]) -> str:
    """SHA-256 of prompts, wherever they came from."""
    total = hashlib.sha256()
    for item in items:
        total.update(json.dumps([item.id, item.turns, item.raw]).encode() + b"\n")
    return total.hexdigest()


def versions() -> dict[str, str | None]:
    """Versions of what a run computes with."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def git_revision() -> str | None:
    """The commit of the code that runs, "+" behind it where files differ from it; None outside a checkout."""
    commit, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no", "--", ".")
    return None if commit is None else commit + ("+" if changed else "")


def claim(folder: Path, depends: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """Write a run's provenance, or check that a run to go on with is the same.

    Args:
        folder: of the run.
        depends: what the result depends on; must be JSON.
        notes: what is worth knowing besides; from the latest start of the run.

    Raises:
        InvalidRequest: the folder holds a run with other data or settings, each named.
        ModelError: its provenance cannot be read.
    """
    path = folder / FILE
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
