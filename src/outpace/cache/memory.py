"""Memory of keys and values: how much there is, and tensors whose pages the system gives as rows are written."""

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from outpace.lib.errors import InvalidRequest
from outpace.lib.threads import ROOT, groups

SHARE = 0.8
"""Share of the memory that is free once weights are loaded; the rest is for drafters and intermediate results."""
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files and a field of control groups, version 2 and 1: the limit, the memory in use, and how much of that caches files
and can be reclaimed."""
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE: space beyond the memory there is

# What gives pages back: macOS only ages those that are not needed.
_GIVE_BACK = "MADV_FREE" if sys.platform == "darwin" else "MADV_DONTNEED"


def is_lazy(device: torch.device) -> bool:
    """Whether memory is given page by page. Windows commits all of it at once, and so do devices."""
    return device.type == "cpu" and sys.platform != "win32"


def free_bytes(device: torch.device, root: Path = ROOT) -> int:
    """Bytes that are free on a device, or in the control groups around this process, such as a container's."""
    if device.type == "cuda":
        # torch keeps and reuses the memory that this process has freed, as with an earlier model.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    import psutil

    free = int(psutil.virtual_memory().available)
    return min([free, *(one for group in groups("memory", root) if (one := _free_of(group)) is not None)])


def _free_of(group: Path) -> int | None:
    for limit, used, files in _GROUP_FILES:
        try:
            most, now = (int((group / name).read_text()) for name in (limit, used))
            shares = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # a group of the other version, or a limit of "max"
            continue
        return most - now + int(shares.get(files, 0))
    return None


class Pages:
    """A tensor whose memory is given as it is written, where the system can (`is_lazy`), and can be given back.

    Raises:
        InvalidRequest: there is no space for it.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        count = prod(shape)
        self._map: mmap.mmap | None = None
        size = count * dtype.itemsize
        try:
            if not is_lazy(device) or not count:
                self.tensor = torch.empty(*shape, dtype=dtype, device=device)
                return
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):
                # Each head of each layer of a slot lies in megabytes of its own: a large page there would be given for
                # a first row of 256 bytes, hundreds of megabytes for a short request.
                with suppress(OSError):  # a system without large pages
                    self._map.madvise(mmap.MADV_NOHUGEPAGE)
        except (OSError, OverflowError, RuntimeError) as error:  # torch's, of a device too, is the last one
            raise InvalidRequest(
                f"no space for {size / 1e9:.1f} GB of keys and values: load with a smaller max_model_len or "
                "max_num_seqs"
            ) from error
        self.tensor = torch.frombuffer(self._map, dtype=dtype, count=count).view(*shape)

    def release(self, part: Tensor) -> None:
        """Give the pages of a contiguous part of the tensor back. It then reads as zeros, or as before."""
        advice = getattr(mmap, _GIVE_BACK, None)
        if self._map is None or advice is None:
            return
        start = part.data_ptr() - self.tensor.data_ptr()
        first, last = -(-start // mmap.PAGESIZE), (start + part.numel() * part.element_size()) // mmap.PAGESIZE
        if first < last:
            self._map.madvise(advice, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
