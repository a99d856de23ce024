"""A run's log, read again."""

import json
from pathlib import Path
from typing import Any

from outpace.train.records import LOG


def read_log(folder: Path) -> list[dict[str, Any]]:
    """All lines of the log in a run's folder."""
    return [json.loads(line) for line in (folder / LOG).read_text(encoding="utf-8").splitlines()]
