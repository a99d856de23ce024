"""Measures the rows of exhibits. Rows with the same protocol are measured together, whichever exhibits they belong to.

A folder has manifest.json and records/RUN/METHODS/records.jsonl: the records of a file share one run of plain decoding
on one set. A stopped run continues; rows with records are not measured again.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from safetensors.numpy import load_file

from outpace.api import Model
from outpace.bench.paper.cells import Cells
from outpace.bench.paper.estimates import pace
from outpace.bench.paper.exhibit import PLAIN_ROW, TRAINING, Exhibit, ExhibitRun, Row
from outpace.bench.paper.metrics import Measured, measured
from outpace.bench.paper.peaks import measure_peak, read_peaks
from outpace.bench.paper.prompts import PromptSets
from outpace.bench.paper.training import read_losses, run_outpace, train_missing, trained
from outpace.bench.records import RECORDS, SETTINGS, RunFolder, object_of, text_of
from outpace.bench.runner import PLAIN, BenchPlan, BenchRun, completed_methods
from outpace.core.params import SamplingParams
from outpace.data.answers import write_whole
from outpace.data.workload import WorkItem, fingerprint
from outpace.lib.checks import check_same
from outpace.lib.errors import InvalidRequest, NoDrafter, OutpaceError
from outpace.trees.retrieval.warm_file import GATE_NAMES

MANIFEST, OF_MANIFEST = "manifest.json", {"target", "quick", "data", "names", "absent"}
WARM_ROUNDS = 5  # of Graft's warm-up (its table 4)
WARM_BUDGET = 15  # drafted nodes of methods that name no budget
_WARM, _GATES = re.compile(r"\{warm(\d*)\}"), re.compile(r"\{gates(?::([\w/]+))?\}")
Record = dict[str, Any]


@dataclass
class SetRun:
    """Rows that are measured on one set in one run, with one drafter.

    Attributes:
        rows: by method, as exhibits name it.
        after: for methods that need {reserved}, the method whose records decide it.
    """

    run: ExhibitRun
    of: str
    drafter: str | None = None
    rows: dict[str, Row] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name of the folder of its records."""
        return _digest(self.run.protocol() | {"set": self.of, "drafter": self.drafter})

    @property
    def tokens(self) -> int:
        """How many tokens are generated for a prompt, by plain decoding and all rows."""
        return self.run.decoded * (1 + len(self.rows))

    @property
    def slots(self) -> int:
        return self.run.in_flight or self.run.batch


def jobs_of(exhibits: Sequence[Exhibit], is_quick: bool) -> list[SetRun]:
    """The jobs of exhibits, each once; those that share a loaded target follow each other."""
    jobs: dict[str, SetRun] = {}
    for exhibit in exhibits:
        methods = {row.name: row.method for row in exhibit.rows_of(is_quick)}
        for run, row in exhibit.rows_in_runs(is_quick):
            for of in run.sets:
                job = SetRun(run, of, row.needs_drafter)
                job = jobs.setdefault(job.key, job)
                if row.method:
                    job.rows.setdefault(row.method, row)
                if row.after is not None:
                    job.after[row.method] = methods[row.after]
    return sorted(jobs.values(), key=lambda job: (job.slots, job.drafter or ""))


def _with_peaks(exhibits: Sequence[Exhibit]) -> list[Exhibit]:
    return [one for one in exhibits if any(column.metric == "peak_mb" for column in one.columns)]


def drafting(exhibits: Sequence[Exhibit]) -> list[str]:
    """Names of the exhibits' methods, at least one of which must use a drafter that the caller gives."""
    return sorted({row.method.partition(":")[0] for one in exhibits for row in one.rows_of(False) if row.method})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


@dataclass
class Suite:
    """Measures exhibits into a folder.

    Attributes:
        load: loads the target, given a number of slots and the path of a drafter, None for those that ship.
        drafters: paths of drafters by the names that rows need; "" holds the one for all other rows.
        train_on: prompts, FILE[:LIMIT], on which missing drafters are trained; None leaves their rows out.
        names: of methods as in records, by job and method.
        absent: why a method could not be measured, by job and method.
        losses: the backbone's loss per step of each training that exhibits compare, by the drafter's name.
        load_before: the machine before the first prompt: cores used by other programs, and memory bandwidth.
        others_use: measures how many cores other programs use.
        others_at_most: the largest of these numbers between two prompts, measured about once a minute.
        date: of the last prompt that was measured.
    """

    folder: Path
    target: str
    is_quick: bool
    prompts: PromptSets
    load: Callable[[int, str | None], Model]
    drafters: dict[str, str] = field(default_factory=dict)
    train_on: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    load_before: dict[str, float] = field(default_factory=dict)
    others_use: Callable[[], float] = lambda: 0.0
    others_at_most: float = 0.0
    date: str = ""
    _looked: float = -math.inf

    def resume(self) -> None:
        """Read what an earlier run left.

        Raises:
            InvalidRequest: it measured another target, other prompts, or another length.
        """
        file = self.folder / MANIFEST
        if not file.is_file():
            return
        about, wanted = read_manifest(self.folder), self._identity()
        said = f"out={str(self.folder)!r}: its records were made"
        check_same({name: about[name] for name in wanted}, wanted, said)
        before = about.get("drafters", {})  # older folders have none, and no losses
        for name, path in self.drafters.items():
            made = before.get(name, path if name else "that ships")  # rows of a name have no records without it
            if made != path:
                raise InvalidRequest(f"{said} with drafter {made}, and this run has {path}; choose a new folder")
        self.drafters = before | self.drafters
        self.names, self.absent, self.load_before = about["names"], about["absent"], about.get("load", {})
        self.others_at_most, self.losses = about.get("others_at_most", 0.0), about.get("losses", {})
        self.date = about.get("date", "")

    def measure(self, exhibits: Sequence[Exhibit], advance: Callable[[int, bool], None], date: str) -> None:
        """Measure what is not there yet, and read the losses of trainings.

        Args:
            advance: called for every prompt of every job, warm-up prompts included, with the tokens of all rows and
                whether they were generated now.
        """

        def advanced(tokens: int, is_new: bool) -> None:
            self.date = date if is_new else self.date
            advance(tokens, is_new)

        self.losses |= read_losses(exhibits, self.drafters)
        self._write_manifest()
        model, loaded_as = None, None
        for job in jobs_of(exhibits, self.is_quick):
            if job.drafter is not None and job.drafter not in self.drafters:
                why = f"no {job.drafter} drafter ships for this target; --drafter {job.drafter}=PATH names one"
                self._leave_out(job, job.rows, why)
                advance(job.tokens * len(self.prompts.of(job.of, job.run)), False)
                continue
            wanted = (job.slots, self._drafter(job))
            if model is None or loaded_as != wanted:
                model, loaded_as = None, wanted  # freed before the next is loaded
                model = self.load(*wanted)
            self._measure_job(model, job, advanced)
            self._write_manifest()
        model = None  # freed, as each peak is that of a process with a model of its own
        self._measure_peaks(exhibits)
        self._write_manifest()

    def total(self, exhibits: Sequence[Exhibit]) -> int:
        """How many tokens `measure` advances by."""
        return sum(job.tokens * len(self.prompts.of(job.of, job.run)) for job in jobs_of(exhibits, self.is_quick))

    def minutes(self, exhibits: Sequence[Exhibit], plain_ms: float, paces: Mapping[str, float]) -> float:
        """Estimated minutes to measure only these exhibits. `plain_ms`, `paces`: as for `estimates.pace`."""
        ms, peaks = 0.0, {job.key for job in jobs_of(_with_peaks(exhibits), self.is_quick)}
        for job in jobs_of(exhibits, self.is_quick):
            if job.drafter is None or job.drafter in self.drafters:
                of_rows = (pace(f"{job.key} {method}", plain_ms, paces) for method in {PLAIN, *job.rows})
                ms += (job.run.prompts + job.run.warm + (job.key in peaks)) * job.run.decoded * sum(of_rows)
        return ms / 60e3

    def _measure_peaks(self, exhibits: Sequence[Exhibit]) -> None:
        """Measure peak memory on the first prompt, of measured rows of exhibits that show it."""
        for job in jobs_of(_with_peaks(exhibits), self.is_quick):
            folder, first = self.folder / "records" / job.key, self.prompts.of(job.of, job.run)[0]
            for asked in (f"{job.key} {method}" for method in job.rows):
                if asked in self.names and asked not in self.absent:
                    measure_peak(folder, self.names[asked], self.target, self._drafter(job), job.run, first)

    def _look_around(self) -> None:
        """Note how busy the machine is, about once a minute."""
        if perf_counter() - self._looked > 60:
            self.others_at_most = max(self.others_at_most, self.others_use())
            self._looked = perf_counter()

    def _drafter(self, job: SetRun) -> str | None:
        """The path of the drafter that a job's rows are given; None for those that ship."""
        return self.drafters.get(job.drafter or "")

    def _identity(self) -> dict[str, Any]:
        """What all records of a folder share."""
        return {"target": self.target, "quick": self.is_quick, "data": str(self.prompts.data or "builtin")}

    def _write_manifest(self) -> None:
        about = self._identity() | {
            "names": self.names,
            "absent": self.absent,
            "drafters": self.drafters,
            "losses": self.losses,
            "load": self.load_before,
            "others_at_most": self.others_at_most,
            "date": self.date,
        }
        write_whole(self.folder / MANIFEST, json.dumps(about, indent=1).encode())

    def _leave_out(self, job: SetRun, methods: Iterable[str], reason: object) -> None:
        self.absent |= {f"{job.key} {method}": str(reason) for method in methods}

    def _measure_job(self, model: Model, job: SetRun, advance: Callable[[int, bool], None]) -> None:
        usable = self._usable(model, job)
        first = {asked: self._with_warm_file(job, own) for asked, own in usable.items() if "{reserved}" not in own}
        self._measure(model, job, first, advance)
        if later := [asked for asked, own in usable.items() if "{reserved}" in own]:
            self._measure(model, job, self._reserved(job, later), lambda tokens, is_new: None)

    def _usable(self, model: Model, job: SetRun) -> dict[str, str]:
        """The method to run for each of a job's methods: itself, or its stand-in where this target has no drafter for
        it."""
        found = {}
        for method, row in job.rows.items():
            reason: object = row.missing
            for own in [] if row.missing is not None else [method, *([row.stand_in] if row.stand_in else [])]:
                try:
                    model.proposer(self._with_warm_file(job, own.replace("{reserved}", "0.5")))
                    found[method] = own
                    self.absent.pop(f"{job.key} {method}", None)
                    break
                except OutpaceError as error:
                    reason = reason or error
                    if not isinstance(error, NoDrafter):
                        break  # a stand-in replaces a missing drafter only, as the report states
            if method not in found:
                self._leave_out(job, [method], reason)
        return found

    def train(self, exhibits: Sequence[Exhibit]) -> None:
        """Train the drafters that rows need and that are not given."""
        if self.train_on is not None:
            rows = [(exhibit, row) for exhibit in exhibits for row in exhibit.rows_of(self.is_quick)]
            self.drafters |= train_missing(rows, self.target, self.train_on, self.folder / "drafters", self.drafters)

    def _with_warm_file(self, job: SetRun, method: str) -> str:
        """A method with {warm} and {gates} replaced by a warm-up file for its budget and by the gates of one."""
        method = self._with_gates(job, method)
        asked = _WARM.search(method)
        if asked is None:
            return method
        rounds = int(asked[1] or WARM_ROUNDS)
        file = self._warm_up(job, method, f"warm-{rounds}", lambda to: self.prompts.to_warm(rounds, to))
        return _WARM.sub(str(file), method)

    def _with_gates(self, job: SetRun, method: str) -> str:
        """A method with {gates} replaced by gates calibrated on the set, or on that of {gates:SET}."""
        asked = _GATES.search(method)
        if asked is None:
            return method
        of = asked[1] or job.of
        name = f"gates-{of.replace('/', '-')}"
        found = load_file(self._warm_up(job, method, name, lambda to: self.prompts.to_calibrate(of, to)))
        if not found.keys() >= {*GATE_NAMES}:
            raise InvalidRequest(f"set {of!r}: too few rounds to calibrate gates; give --data more of its prompts")
        depths, thresholds = ("/".join(map(str, found[one].tolist())) for one in GATE_NAMES)
        return _GATES.sub(f"checkpoints={depths},thresholds={thresholds}", method)

    def _warm_up(self, job: SetRun, method: str, name: str, workload: Callable[[Path], str]) -> Path:
        """The file of a warm-up for a method's budget, which is made if it is missing. `workload`: writes its prompts
        to a file, and gives the workload."""
        budget, drafter = re.search(r"budget=(\d+)", method), self._drafter(job)
        number = int(budget[1]) if budget else WARM_BUDGET
        of = "" if drafter is None else f"-{_digest(drafter)}"  # gates are calibrated for one drafter
        file = self.folder / f"{name}-{number}{of}.safetensors"
        if not file.exists():
            prompts = workload(self.folder / f"{name}.jsonl")
            own = ["--method", "graft:vocabulary=all", "--budget", str(number), "-w", prompts, "--out", str(file)]
            run_outpace("warmup", self.target, *own, *([] if drafter is None else ["--drafter", drafter]))
        return file

    def _reserved(self, job: SetRun, methods: Iterable[str]) -> dict[str, str]:
        """Methods with {reserved} replaced by the retrieved share of drafted nodes in the row that each comes
        `after`."""
        cells = read_cells(self.folder, job, self.names)
        found = {}
        for method in methods:
            own = cells.get(job.after[method])
            if own is None:
                self._leave_out(job, [method], f"{job.rows[method].after} was not measured")
                continue
            share = own.own["retrieved"].sum() / max(own.own["drafted"].sum(), 1.0)
            found[method] = self._with_warm_file(job, method.replace("{reserved}", f"{share:.2f}"))
        return found

    def _measure(
        self, model: Model, job: SetRun, methods: Mapping[str, str], advance: Callable[[int, bool], None]
    ) -> None:
        """Measure methods of a job. `methods`: by the exhibits' names, the form that this model takes."""
        run, items = job.run, self.prompts.of(job.of, job.run)
        ready = {asked: completed_methods(model, [method])[0] for asked, method in methods.items()}
        self.names |= {f"{job.key} {asked}": completed for asked, completed in ready.items()}
        self._write_manifest()  # now, for a report of a run that is killed within this set
        prompts = len(items) - run.warm
        done = {one for records in _folders(self.folder, job.key) for one in _methods(records, prompts)}
        wanted = tuple(dict.fromkeys(one for one in ready.values() if one not in {PLAIN, *done}))
        if not wanted and done:
            advance(job.tokens * len(items), False)
            return
        self._check_prompts(job, items[run.warm :])
        plan = BenchPlan(
            (PLAIN, *wanted),
            items[run.warm :],
            SamplingParams(max_new_tokens=run.decoded, temperature=run.temperature, seed=0, ignore_eos=run.ignore_eos),
            warm_items=items[: run.warm],
            batch_size=run.batch,
            concurrency=run.in_flight or None,
            forgets=run.forgets,
            prompts_once=run.prompts_once,
        )
        bench = BenchRun(model, plan)
        folder = RunFolder(self.folder / "records" / job.key / _digest(wanted), bench.settings)
        left = len(items)

        def fewer(count: int = 1, is_new: bool = True) -> None:
            nonlocal left
            left -= count
            advance(job.tokens * count, is_new)

        for group in bench.groups(folder.read(bench.group_sizes), fewer):
            folder.append(group)
            self._look_around()
        advance(job.tokens * left, False)  # warm prompts, where no group was left to decode

    def _check_prompts(self, job: SetRun, items: Sequence[WorkItem]) -> None:
        """Refuse to measure rows next to those that were measured on other prompts under the same name."""
        wanted, said = {"prompts": fingerprint(items)}, f"out={str(self.folder)!r}: its records of {job.of} were made"
        for records in sorted((self.folder / "records" / job.key).glob(f"*/{RECORDS}")):
            file = records.with_name(SETTINGS)
            if records.stat().st_size:  # not stopped before its first record
                check_same({"prompts": object_of(file, text_of(file)).get("prompts")}, wanted, said)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the records of a folder were made with.

    Raises:
        InvalidRequest: no manifest of this command, or one that cannot be read.
    """
    file = folder / MANIFEST
    about = object_of(file, text_of(file) or "{}")
    if missing := OF_MANIFEST - about.keys():
        raise InvalidRequest(f"{file}: not that of `outpace bench paper`: it lacks {', '.join(sorted(missing))}")
    return about


def _folders(folder: Path, key: str) -> Iterator[list[Record]]:
    """Lists of a job's records, with peaks of memory and the drafter that was named, which may be a GGUF file; those of
    a list share one run of plain decoding."""
    peaks = read_peaks(folder / "records" / key)
    for file in sorted((folder / "records" / key).glob(f"*/{RECORDS}")):
        named = object_of(file, text_of(file.with_name(SETTINGS)) or "{}").get("drafter")
        records = [object_of(file, line) for line in text_of(file).split("\n")[:-1]]
        yield [record | {"peak_mb": peaks.get(record["method"]) or math.nan, "named": named} for record in records]


def _methods(records: Sequence[Record], prompts: int) -> set[str]:
    """Methods with records of all prompts."""
    counts = Counter(record["method"] for record in records)
    return {method for method, count in counts.items() if count == prompts}


def read_cells(folder: Path, job: SetRun, names: Mapping[str, str]) -> dict[str, Measured]:
    """Measured methods of a job, by method as exhibits name it.

    Raises:
        InvalidRequest: records that do not say what their method started with.
    """
    found: dict[str, Measured] = {}
    first = job.run.tokens if job.run.first_of is not None else None
    asked: dict[str, list[str]] = {}
    for method in job.rows:
        asked.setdefault(names.get(f"{job.key} {method}", method), []).append(method)
    for records in _folders(folder, job.key):
        by_method: dict[str, list[Record]] = {}
        for record in records:
            by_method.setdefault(record["method"], []).append(record)
        plain = by_method.get(PLAIN, [])  # none where the first prompt was interrupted
        for completed, own in by_method.items():
            if len(own) == len(plain):  # else stopped within a prompt
                for method in {*asked.get(completed, ()), *([PLAIN] if completed == PLAIN else [])}:
                    if method not in found or len(own) > found[method].of:  # else of a run that was stopped
                        found[method] = measured(own, plain, first)
    return found


def cells_of(
    exhibit: Exhibit,
    folder: Path,
    is_quick: bool,
    names: Mapping[str, str],
    absent: Mapping[str, str],
    losses: Mapping[str, Sequence[float]],
) -> tuple[Cells, dict[str, str]]:
    """An exhibit's cells, and why rows have none."""
    cells: dict[tuple[str, str, str], Measured] = {}
    why: dict[str, str] = {row.name: row.missing for row in exhibit.rows if row.missing is not None}
    rows = {row.method: row for row in exhibit.rows_of(is_quick)}
    read: dict[tuple[str, str, str | None], dict[str, Measured]] = {}
    for run, row in exhibit.rows_in_runs(is_quick):
        if run.training is not None and row.needs_drafter is not None and row.needs_drafter in losses:
            cells[run.label, row.name, TRAINING] = trained(losses[row.needs_drafter], run.training)
        for of in run.sets:
            job, place = SetRun(run, of, row.needs_drafter, rows), (run.label, of, row.needs_drafter)
            if place not in read:
                read[place] = read_cells(folder, job, names)
            if PLAIN in read[place]:
                cells.setdefault((run.label, PLAIN_ROW, of), read[place][PLAIN])
            if (reason := absent.get(f"{job.key} {row.method}")) is not None:
                why[row.name] = reason
            if row.method in read[place]:
                cells[run.label, row.name, of] = read[place][row.method]
    return cells, why
