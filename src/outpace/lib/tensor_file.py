"""Reading and writing safetensors files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outpace.lib.errors import ModelError


@contextmanager
def opened(file: Path, remedy: str = "download it again", name: str = "") -> Iterator[Any]:
    """An open safetensors file; only requested tensors are read. `name`: of the file in errors, by default its path."""
    try:
        with safe_open(file, framework="pt") as content:
            yield content
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{name or file}: cannot be read, maybe cut off: {error}; {remedy}") from error


def save_tensors(file: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors by name, and the file's metadata: all of it, or nothing if the process is killed.

    Raises:
        ModelError: a full disk, or a folder that cannot be written, in place of safetensors' own kind of error.
    """
    scratch = file.with_name(f"{file.name}.tmp")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, scratch, dict(about))
        scratch.replace(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: cannot be written ({error}); free some space, or choose another folder") from error
    finally:
        with suppress(OSError):  # gone where all went well
            scratch.unlink()
