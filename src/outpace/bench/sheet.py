"""Tables for people: names never wrap, and where a terminal is narrow the least important columns are left out."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

UNLIMITED = 10_000


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        rank: the highest is left out first; a column of rank 0 never is.
        prose: the maximal width of a column of sentences, which wrap; 0 for a column that does not wrap.
        is_name: whether it is aligned to the left, as names are; else to the right, as numbers are.
    """

    name: str
    rank: int = 0
    prose: int = 0
    is_name: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table that leaves out columns which do not fit."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]
    title: str = ""
    ends: Collection[int] = ()
    has_lines: bool = False

    def show(self, width: int | None = None) -> None:
        """Print it on standard output. `width`: columns of the terminal; None finds out, and leaves nothing out where
        there is no terminal."""
        if width is None:
            console = Console()
            has_prose = any(column.prose for column in self.columns)
            is_limited = console.is_terminal or "COLUMNS" in os.environ or has_prose
            width = console.width if is_limited else UNLIMITED
        table, left_out, needed = self.within(width)
        wide = Console(width=max(width, needed), markup=False, highlight=False)
        if self.title:
            wide.print(self.title, style="italic", soft_wrap=True)
        wide.print(table)
        if left_out:
            what = ", ".join(dict.fromkeys(left_out))
            wide.print(f"left out: {what}; widen the terminal, or see the JSON", style="dim", soft_wrap=True)

    def within(self, width: int) -> tuple[Table, list[str], int]:
        """The table with as many columns as fit, the names of the others, and its minimal width."""
        kept = list(range(len(self.columns)))
        while True:
            table = self._of(kept)
            console = Console(width=UNLIMITED)
            needed = Measurement.get(console, console.options, table).minimum
            last = max(kept, key=lambda place: self.columns[place].rank)
            if needed <= width or self.columns[last].rank == 0:
                return table, [one.name for place, one in enumerate(self.columns) if place not in kept], needed
            kept.remove(last)

    def _of(self, kept: Sequence[int]) -> Table:
        table = Table(show_lines=self.has_lines)
        for place in kept:
            column = self.columns[place]
            cells = [column.name, *(str(row[place]) for row in self.rows)]
            table.add_column(
                column.name,
                justify="left" if column.is_name or column.prose else "right",
                no_wrap=not column.prose,
                min_width=None if column.prose else max(map(cell_len, cells)),  # rich would count the longest word
                max_width=column.prose or None,
            )
        for number, row in enumerate(self.rows):
            table.add_row(*(row[place] for place in kept), end_section=number in self.ends)
        return table
