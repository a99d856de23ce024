"""Records of a run as they come: kept in its folder, with a line now and then on how it goes."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from outpace.cli.options import notes

SECONDS_BETWEEN_LINES = 30
Record = dict[str, Any]


class Run(Protocol):
    """What is measured: groups of records, each with a number, and the settings that they depend on."""

    @property
    def settings(self) -> dict[str, Any]: ...

    @property
    def group_sizes(self) -> list[int]: ...

    def groups(self, done: Sequence[Record], on_item: Callable[[], None]) -> Iterator[list[Record]]: ...


def collect(
    run: Run, prompts: int, out: Path | None, advance: Callable[[], None], say: Callable[[list[Record]], str]
) -> list[Record]:
    """All records of a run, those included that its folder holds already.

    Args:
        run: what is measured.
        prompts: how many there are.
        out: the folder, if they are kept.
        advance: called after each prompt.
        say: the line on how it goes.
    """
    from outpace.bench.folder import RunFolder

    folder = None if out is None else RunFolder(out, run.settings)
    records = [] if folder is None else folder.read(run.group_sizes)
    if records:
        _note(f"{out}: {len(records)} records are there already, of {sum(run.group_sizes)}")
    last = monotonic()
    for group in run.groups(records, advance):
        if folder is not None:
            folder.append(group)
        records += group
        if monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = monotonic()
            _note(f"{len({record['index'] for record in records})}/{prompts} prompts: {say(records)}")
    return records


def _note(text: str) -> None:
    notes.print(text, highlight=False, markup=False, soft_wrap=True)
