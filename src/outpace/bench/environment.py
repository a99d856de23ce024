"""What a figure depends on in addition to the method: machine, versions, settings."""

import hashlib
import os
import platform
import subprocess
import sys
from collections import deque
from collections.abc import Hashable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from outpace.api import Model
from outpace.drafters.load import provenance_of
from outpace.drafters.method import LANGUAGE_MODEL
from outpace.kernels.build import build, loaded_kernels
from outpace.methods.catalog import build_proposer
from outpace.models.loading.shipped import size_of


def environment(
    device: torch.device, dtype: torch.dtype, quantize: str = "none", kv_cache_dtype: str = "auto"
) -> dict[str, Any]:
    """Hardware, threads, versions and git revision, and the level of the CPU's compiled kernels, None where passes run
    without them, for a record."""
    gpu = {"hardware": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        **host("outpace", "torch", "transformers"),
        **gpu,
        "threads": torch.get_num_threads(),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "quantize": quantize,
        "kv_cache_dtype": kv_cache_dtype,
        "cpu_kernels": build().level if device.type == "cpu" and loaded_kernels() is not None else None,
    }


def host(*packages: str) -> dict[str, Any]:
    """Hardware, versions and git revision, for a record: the commit of the checkout that this package runs from, None
    without one."""
    return {
        "hardware": cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "python": platform.python_version(),
        "versions": versions(*packages),
        "git": git("describe", "--always", "--dirty", "--abbrev=12"),
    }


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of packages; None for one that is not installed, as outpace run from its sources."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def cpu_name() -> str:
    """The CPU's name, as the system gives it; all names if its cores differ."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        if "model name" not in text:  # as on ARM
            text = _printed("lscpu") or ""
    except OSError:
        text = _printed("sysctl", "machdep.cpu.brand_string") or ""  # of Macs
    lines = [line.partition(":") for line in text.splitlines()]
    names = [name.strip() for label, _, name in lines if label.strip().lower() in _NAME_LABELS]
    return " + ".join(dict.fromkeys(names)) or platform.processor() or platform.machine()


_NAME_LABELS = ("model name", "machdep.cpu.brand_string")


def _printed(*command: str) -> str | None:
    """A program's standard output in English; None if it cannot be run, or fails."""
    try:
        where = os.environ | {"LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, env=where)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)


def held_mb(*owners: object) -> float:
    """MiB of the tensors, arrays and containers that can be reached from objects: weights, slots of keys and values,
    tables, automata, each counted once. A pass's temporary memory, the interpreter and libraries do not count."""
    held: dict[Hashable, int] = {}
    seen: set[int] = set()
    waiting: list[Any] = list(owners)
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            held |= [_storage(found)]
        elif isinstance(found, np.ndarray) and isinstance(found.base, Tensor):
            held |= [_storage(found.base)]  # its memory, as a GGUF file's weights have that of their panels
        elif isinstance(found, np.ndarray):
            held[id(found)] = found.nbytes
        elif isinstance(found, _CONTAINERS):
            held[id(found)] = sys.getsizeof(found)
            waiting += filter(_may_hold, found.values() if isinstance(found, Mapping) else found)
        else:
            waiting += filter(_may_hold, getattr(found, "__dict__", {}).values())
    return sum(held.values()) / 2**20


def _storage(tensor: Tensor) -> tuple[Hashable, int]:
    """A key of the memory that a tensor shares with its views, and its bytes."""
    if tensor.layout == torch.strided and not tensor.is_meta:
        storage = tensor.untyped_storage()
        return (str(tensor.device), storage.data_ptr()), storage.nbytes()
    return id(tensor), 0 if tensor.is_meta else tensor.nbytes  # packed for the CPU's kernels: no views


def _may_hold(value: object) -> bool:
    """Whether to search a value: numbers and texts are too many and too small, functions and modules hold no state."""
    return not isinstance(value, int | float | str | bytes | type | FunctionType | ModuleType | None)


def resolved_options(model: Model, method: str, budget: int | None) -> dict[str, Any]:
    """The options of a method by name, its preset and defaults included, with open choices resolved for this model. The
    method is built once more, so that a record has what a build reads, and nothing is decided twice.

    Added: `budget`, drafted nodes per round, a maximum where `follows_prices`; `shape_settings` in effect, gates of a
    warm file included; `files` that were read, by option, with SHA-256 and size; `drafter`, its kind, folder,
    fingerprint, training and size, None without one.

    Args:
        budget: drafted nodes of a method that does not name its own; None for the method's default.
    """
    spec = model.drafters.with_draft(method)
    context = model.drafters.context_for(spec.drafter)
    proposer = build_proposer(spec, context)
    found, options = dict(context.resolved), spec.options.model_dump()
    files: dict[str, Path] = found.pop("files")
    given = spec.budget if spec.budget is not None else budget
    nodes = (proposer.needs.prices or proposer.budget) if given is None else given
    options |= {
        "budget": nodes,
        "follows_prices": given is None and nodes > 0,
        "files": {
            name: {"name": str(file), "sha256": _sha256(file), "bytes": file.stat().st_size}
            for name, file in files.items()
        },
        "drafter": None,
    }
    if spec.drafter is not None:
        folder = model.drafters.folder(spec.drafter)
        which = model.drafters.fingerprint(spec.drafter)
        options["drafter"] = {"kind": spec.drafter, "folder": folder and str(folder), "fingerprint": which}
        options["drafter"] |= _training(folder) | _size(model, spec.drafter)
    return options | found


def _training(folder: Path | None) -> dict[str, Any]:
    """The SHA-256 of the answers that a drafter in a folder was trained on last, and its steps, as far as it says: of
    one that ships, or of one in the folder of its training."""
    for place in () if folder is None else (folder, folder.parent):
        made = provenance_of(place)
        answers, result = made.get("run", {}).get("answers"), made.get("result")
        if isinstance(answers, dict) and "sha256" in answers:
            steps = result.get("steps") if isinstance(result, dict) else None
            return {"answers": str(answers["sha256"]), "steps": steps}
    return {}


def _size(model: Model, kind: str) -> dict[str, Any]:
    """A drafter's layers, and the parameters in its files: the target's first layers have none."""
    net: Any = model.drafters.language_model() if kind == LANGUAGE_MODEL else model.drafters.net(kind)
    layers = getattr(net.config, "num_hidden_layers", getattr(net.config, "layers", None))
    folder = model.drafters.folder(kind)
    return {"layers": layers, "parameters": folder and size_of(folder).parameters}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


PACKAGE = Path(__file__).parents[1]


def git(*arguments: str) -> str | None:
    """Output of a git command in this package's checkout; None for an installed copy, even inside another checkout."""
    here = ("git", "-C", str(PACKAGE))
    is_ours = _printed(*here, "ls-files", "--error-unmatch", "--", "__init__.py") is not None
    return _printed(*here, *arguments) if is_ours else None
