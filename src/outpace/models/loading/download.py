"""Download a file of known size and checksum. A later call continues what an interrupted one has left."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import file_digest
from pathlib import Path
from typing import Any

from outpace.lib.errors import ModelError, first_line
from outpace.lib.stages import advance, stage


class _Bar:
    """The progress bar of `http_get`: counts bytes in the current stage."""

    def __init__(self, *, initial: int = 0, **_: Any) -> None:
        advance(initial)

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, amount: int) -> None:
        advance(amount)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Let one process at a time do the work that the file `lock` stands for. The file stays if the work fails."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        yield
    with suppress(PermissionError):  # Windows removes no file that another process waits for
        lock.unlink(missing_ok=True)


def download(url: str, file: Path, label: str, size: int, sha256: str | None, headers: Mapping[str, str]) -> None:
    """Download a file, check it once, and move it into place. Nothing happens if it is there already.

    Args:
        url: where it is.
        file: where it goes. Until it is complete and checked, the bytes are in a file of this name with `.part`.
        label: its name on the progress bar.
        size, sha256: what it must have; a sha256 of None is not checked.
        headers: of the request.

    Raises:
        ModelError: the download was cut short, or the file is another one.
    """
    part, lock = (file.with_name(f"{file.name}.{suffix}") for suffix in ("part", "lock"))
    with alone(lock):  # two processes must not append to the same file
        if not file.is_file():
            _fill(url, part, label, size, headers)
            check(url, part, size, sha256)
            part.replace(file)


def _fill(url: str, part: Path, label: str, size: int, headers: Mapping[str, str]) -> None:
    """Append what is missing. Lost connections are tried again a few times by the hub's client."""
    from huggingface_hub.file_download import http_get

    try:
        with part.open("ab") as sink, stage(f"downloading {label}", size):
            if sink.tell() < size:
                # Compressed replies cannot be continued at an offset.
                plain = {**headers, "Accept-Encoding": "identity"}
                http_get(url, sink, resume_size=sink.tell(), headers=plain, tqdm_class=_Bar)  # type: ignore[arg-type]
    except Exception as error:
        held = part.stat().st_size if part.is_file() else 0
        if getattr(getattr(error, "response", None), "status_code", None) == 416:  # the file there has become shorter
            part.unlink()
        raise ModelError(
            f"{label}: the download stopped at {held:,} of {size:,} bytes: {first_line(error)} ({url}); run the same "
            "command again to continue it"
        ) from error


def check(origin: str, file: Path, size: int, sha256: str | None) -> None:
    """Refuse and remove a file that is not the expected one. `origin`: where it comes from."""
    held = file.stat().st_size
    with stage("checking the file"), file.open("rb") as source:
        found = sha256 and file_digest(source, "sha256").hexdigest()
    if held != size or found != sha256:
        file.unlink()
        raise ModelError(
            f"{origin}: the file has {held} bytes and sha256 {found}, expected {size} bytes and {sha256}; not kept. "
            "Run the same command again; if it fails again, the file there is a different one"
        )
