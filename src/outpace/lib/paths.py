"""Paths that users name."""

from pathlib import Path

from outpace.lib.checks import shown
from outpace.lib.errors import InvalidRequest


def path_of(name: str | Path) -> Path:
    """A path as it was named, with ~ for a home folder, whether or not anything is there.

    Raises:
        InvalidRequest: nothing can be there: a name too long, the home of nobody, a folder that may not be entered.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"path {shown(str(name))}: cannot be looked at: {reason}") from error
    return path
