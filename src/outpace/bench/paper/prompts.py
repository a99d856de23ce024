"""Prompts of exhibits, by the names of their sets."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from outpace.bench.paper.exhibit import ExhibitRun
from outpace.data.workload import BUILT_IN, WorkItem, read_workload
from outpace.lib.errors import InvalidRequest

WARM_SET = "sharegpt"  # Graft's warm-up takes its prompts from this set
TO_CALIBRATE = 24  # prompts of a set that calibrate its gates, of 40 after 16 that are measured: more than 100 rounds


class PromptSets:
    """Sets of prompts by name.

    Args:
        data: a folder of NAME_dev.jsonl or NAME.jsonl; None takes the package's own prompts for every set.

    Raises:
        InvalidRequest: no such folder.
    """

    def __init__(self, data: Path | None) -> None:
        self.data = data
        if data is not None and not data.is_dir():
            raise InvalidRequest(f"data={str(data)!r}: no such folder; leave it out for the prompts of this package")

    def of(self, name: str, run: ExhibitRun) -> tuple[WorkItem, ...]:
        """First turns of a set's prompts: those for the warm-up, then those to measure.

        Raises:
            InvalidRequest: no file has the set.
        """
        items = self._all(name)[: run.prompts + run.warm]
        return tuple(
            replace(item, dataset=name, turns=(item.turns[0][: run.characters],), raw=item.raw or run.raw)
            for item in items
        )

    def _all(self, name: str) -> list[WorkItem]:
        if self.data is None:
            return read_workload(BUILT_IN)
        stem, _, category = name.partition("/")
        for file in (f"{stem}_dev.jsonl", f"{stem}.jsonl"):
            if (self.data / file).is_file():
                items = read_workload(str(self.data / file))
                kept = [item for item in items if category in ("", item.category)]
                if not kept:
                    raise InvalidRequest(f"set {name!r}: {file} has no prompts of this category")
                return kept
        raise InvalidRequest(f"set {name!r}: {self.data} has no {stem}_dev.jsonl")

    def to_calibrate(self, name: str, file: Path) -> str:
        """The workload that calibrates gates on a set: its last prompts, after those that are measured where it has as
        many. `file`: where to write them."""
        items = self._all(name)[-TO_CALIBRATE:]
        file.write_text("".join(f"{json.dumps(asdict(item))}\n" for item in items), encoding="utf-8")
        return f"{file}:{len(items)}"

    def to_warm(self, rounds: int, file: Path) -> str:
        """The workload of a warm-up: training prompts, which are not measured. If there are none, this package's
        prompts, which are also measured if no folder is given. `file`: where to write training prompts.

        Raises:
            InvalidRequest: there are fewer prompts than rounds, or the file is no workload.
        """
        training = None if self.data is None else self.data / "train_prompts.jsonl"
        if training is None or not training.is_file():
            spec, found = f"{BUILT_IN}:{rounds}", len(read_workload(BUILT_IN))
        else:
            own = [item for item in read_workload(str(training)) if item.dataset == WARM_SET]
            file.write_text("".join(f"{json.dumps(asdict(item))}\n" for item in own[:rounds]), encoding="utf-8")
            spec, found = f"{file}:{rounds}", len(own)  # without a limit the warm-up would take five
        if found < rounds:
            raise InvalidRequest(
                f"a warm-up of {rounds} rounds takes as many prompts, and there are {found}: give --data a folder with "
                f"more of dataset {WARM_SET!r} in train_prompts.jsonl"
            )
        return spec
