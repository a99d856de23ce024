"""What a method's options come to on a model, for a record: a row can be made again from these alone."""

import hashlib
from pathlib import Path
from typing import Any

from outpace.api import Model
from outpace.methods.catalog import build_proposer, parse_method


def resolved_options(model: Model, method: str, budget: int | None) -> dict[str, Any]:
    """The options of a method as text, its preset and defaults among them, with what they leave open as this model has
    it. It is built once more for that, so that a record has what a build reads, and nothing is decided twice.

    Beside the options by name: `budget` is drafted nodes per round, at most these where `follows_prices`;
    `shape_settings` are in effect, gates of a warm file included; `files` are those that were read, by option, with
    their SHA-256; `drafter` is its kind, folder and fingerprint, None without one.

    Args:
        model: the model.
        method: as texts name it.
        budget: drafted nodes of a method that does not name its own; None for the method's default.
    """
    spec = parse_method(method)
    context = model.drafters.context_for(spec.drafter)
    proposer = build_proposer(spec, context)
    found, options = dict(context.resolved), spec.options.model_dump()
    files: dict[str, Path] = found.pop("files")
    given = spec.budget if spec.budget is not None else budget
    nodes = (proposer.needs.prices or proposer.budget) if given is None else given
    options |= {
        "budget": nodes,
        "follows_prices": given is None and nodes > 0,
        "files": {name: {"name": str(file), "sha256": _sha256(file)} for name, file in files.items()},
        "drafter": None,
    }
    if spec.drafter is not None:
        folder = model.drafters.folder(spec.drafter)
        which = model.drafters.fingerprint(spec.drafter)
        options["drafter"] = {"kind": spec.drafter, "folder": folder and str(folder), "fingerprint": which}
    return options | found


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
