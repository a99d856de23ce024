"""Tables of the pages of measurements, for the charts."""

import re
from pathlib import Path

MEASUREMENTS = Path(__file__).parents[1] / "measurements"


def table(page: str, first: str) -> dict[str, dict[str, str]]:
    """The rows of a page's first table whose header begins with this cell: by their first cell, then by column."""
    lines = (MEASUREMENTS / page).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    header, rows = _cells(lines[start]), {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = _cells(line)
        rows[cells[0].replace("`", "")] = dict(zip(header, cells, strict=True))
    return rows


def numbers(cell: str) -> list[float]:
    """The numbers in a cell: a speed, or a speed and its interval."""
    return [float(number) for number in re.findall(r"\d+\.\d+", cell)]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
