"""The checkout that this package runs from, if it runs from one."""

import subprocess
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def git(*arguments: str) -> str | None:
    """What git says of the checkout; None for an installed copy, also one that lies in somebody else's checkout."""
    try:
        is_ours = _said("ls-files", "--error-unmatch", "--", "__init__.py") is not None
        return _said(*arguments) if is_ours else None
    except (OSError, subprocess.SubprocessError):
        return None


def _said(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True, timeout=20)
    return done.stdout.strip() if done.returncode == 0 else None
