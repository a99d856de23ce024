"""What a figure depends on besides the method: machine, versions, settings."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from outpace.lib.checkout import git


def client_environment() -> dict[str, Any]:
    """The machine that asks a server, for a record: hardware, versions and git revision."""
    return {
        "hardware": cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("outpace", "httpx")},
        "git": _git_revision(),
    }


def environment(device: torch.device, dtype: torch.dtype, quantize: str = "none") -> dict[str, Any]:
    """Hardware, threads, versions and git revision, for a record."""
    on_gpu = device.type == "cuda"
    return {
        "hardware": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "quantize": quantize,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("outpace", "torch", "transformers")},
        "git": _git_revision(),
    }


def cpu_name() -> str:
    """The CPU's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git_revision() -> str | None:
    """Revision of the checkout this package runs from; None for an installed copy."""
    return git("describe", "--always", "--dirty", "--abbrev=12")
