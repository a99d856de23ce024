"""Makes loading a model faster: skips work, or begins it early."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def without_collection() -> Iterator[None]:
    """Turn off garbage collection in a block: imports and vocabularies make millions of lasting objects, and visiting
    them repeatedly takes a sixth of the time of importing torch."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_ahead(path: Path) -> None:
    """Ask the operating system to read a file into memory, while libraries are imported."""
    if not path.is_file() or not hasattr(os, "posix_fadvise"):  # as on macOS and Windows
        return
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
