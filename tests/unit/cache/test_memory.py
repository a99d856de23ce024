"""How much memory there is for keys and values."""

from pathlib import Path

import pytest
import torch

from outpace.cache.memory import free_bytes
from tests.unit.lib.test_threads import write

GROUP = "sys/fs/cgroup/"
FULL = {
    "proc/self/cgroup": "0::/\n",
    GROUP + "memory.max": "1000\n",
    GROUP + "memory.current": "900\n",
    GROUP + "memory.stat": "anon 300\ninactive_file 500\n",
}
NESTED = {
    "proc/self/cgroup": "0::/a/b\n",
    GROUP + "a/b/memory.max": "max\n",
    GROUP + "a/memory.max": "1000\n",
    GROUP + "a/memory.current": "900\n",
    GROUP + "a/memory.stat": "inactive_file 50\n",
}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/docker/1\n",
    GROUP + "memory/memory.limit_in_bytes": "1000\n",
    GROUP + "memory/memory.usage_in_bytes": "900\n",
    GROUP + "memory/memory.stat": "total_inactive_file 100\n",
}


@pytest.mark.parametrize(("files", "free"), [(FULL, 600), (NESTED, 150), (VERSION_1, 200)])
def test_memory_of_a_container(files: dict[str, str], free: int, tmp_path: Path) -> None:
    """Guards against a context cut short by the page cache of the model's own file, and limits that nobody reads."""
    assert free_bytes(torch.device("cpu"), write(tmp_path, files)) == free


def test_what_torch_keeps_of_a_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a second model in a process with a short context: the first one's memory seems taken."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 800)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert free_bytes(torch.device("cuda")) == 600
