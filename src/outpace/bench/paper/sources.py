"""Where a report's records come from: a folder of `outpace bench paper`, servers that `outpace bench --endpoint`
measured, or a GPU that `scripts/gpu_check.sh` measured."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from outpace.bench.paper.cells import Cells
from outpace.bench.paper.exhibit import PLAIN_ROW, Exhibit, ExhibitRun, Row
from outpace.bench.paper.measure import SetRun, cells_of, read_manifest
from outpace.bench.paper.metrics import OF_RECORDS, Measured, measured
from outpace.bench.records import DRAFT_MS, PHASES, RECORDS, SETTINGS, object_of, text_of
from outpace.bench.runner import PLAIN
from outpace.data.workload import BUILT_IN, read_workload
from outpace.lib.checks import counted
from outpace.lib.errors import InvalidRequest, first_line

Record = dict[str, Any]
INSTEAD = ", in place of "
"""Between a stand-in and the row's method that it replaces."""
_OF_SETS = {
    "SHARE": re.compile(r"(?<=reserved=)[\d.]+"),
    "GATES": re.compile(r"checkpoints=[\d/]+,thresholds=[\d./e-]+"),
}
"""What may differ between sets in a row's method, by the word that is printed for it."""
_UNFILLED = re.compile(r",?\w+=\{\w+\}")
_SEPARATE = "gate_table=true"  # of rows whose head is separate operations


@dataclass
class RecordFolder:
    """A folder of records, and where they were measured."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "RecordFolder":
        """The records of a folder; raises InvalidRequest if it is not of this command."""
        return cls(folder, read_manifest(folder))

    @property
    def is_quick(self) -> bool:
        """Whether they are of the rows and runs of `--quick`."""
        return bool(self.manifest["quick"])

    @property
    def name(self) -> str:
        """The target, the machine, and the folder, which tells two runs of the same apart."""
        machine = " and ".join(self._machines) or "unknown machine"
        return f"{self.target}, {machine}, folder {self.folder.name}"

    @property
    def target(self) -> str:
        return Path(self.manifest["target"]).name

    @property
    def parameters(self) -> float | None:
        """Those of the target in millions, by its name, such as 1.5b; None where it does not say."""
        found = re.search(r"(\d+(?:\.\d+)?)([mb])(?![a-z0-9])", self.target.lower())
        return float(found[1]) * (1000 if found[2] == "b" else 1) if found else None

    @cached_property
    def _settings(self) -> list[dict[str, Any]]:
        """Settings of all records; those of an exhibit added later may be another machine's or version's."""
        files = [file.with_name(SETTINGS) for file in sorted(self.folder.glob(f"records/*/*/{RECORDS}"))]
        return [object_of(file, text) for file in files if (text := text_of(file))]

    @property
    def _machines(self) -> list[str]:
        return list(dict.fromkeys(str(one["hardware"]) for one in self._settings))

    def about(self) -> list[str]:
        """How they were measured, in words."""
        manifest, are_several = self.manifest, len(self._machines) > 1
        made = dict.fromkeys(_made(one, are_several) for one in self._settings)
        texts = list(made)
        texts += ["rows of different machines or versions were not measured together"] if len(made) > 1 else []
        texts += ["quick: few prompts, short answers" if self.is_quick else "full"]
        data = manifest["data"]
        texts += ["prompts of this package" if data == "builtin" else f"prompts of the folder {Path(data).name}"]
        texts += [f"measured {manifest['date']}"] if manifest.get("date") else []
        if load := manifest.get("load"):
            texts.append(
                f"memory bandwidth, measured before, {load['read_gb_per_second']:.0f} GB/s; other programs used "
                f"{load['others']:.2f} cores before, at most {manifest['others_at_most']:.2f} between prompts"
            )
        return texts

    def command(self, paper: str, names: Sequence[str]) -> str:
        """What measures these exhibits again, all if none is named."""
        drafters, data = self.manifest.get("drafters", {}), self.manifest["data"]
        trained = [name for name in drafters if Path(drafters[name]).parts[-3:] == ("drafters", name, "drafter")]
        given = {name: _published(path) for name, path in drafters.items() if name not in trained}
        words = ["outpace", "bench", "paper", paper, *(word for name in names for word in f"--{name}".split(" ", 1))]
        words += [*["--quick"] * self.is_quick, "--target", _published(self.manifest["target"])]
        words += [] if data == "builtin" else ["--data", _published(data)]
        for name, file in given.items():
            words += ["--drafter", f"{name}={file}" if name else file]
        return shlex.join([*words, *(["--train", "FILE"] if trained else [])])

    @cached_property
    def models(self) -> list[list[dict[str, Any]]]:
        """Lines about the target, then about the drafters of all records, as far as these say; None for the rest."""
        found: dict[str, dict[str, Any]] = {}
        for file in sorted(self.folder.glob(f"records/*/*/{RECORDS}")):
            given = object_of(file, text_of(file.with_name(SETTINGS)) or "{}").get("drafter")
            for line in text_of(file).split("\n")[:-1]:
                if drafter := object_of(file, line)["options"].get("drafter"):
                    which = drafter["fingerprint"]
                    shipped = "ships with the package" if drafter["folder"] else "the target's first layers"
                    found[which] = found.get(which, {}) | drafter | {"from": given or shipped}
        drafters = [
            {
                "drafter": one["kind"],
                "from": one["from"].replace(f"{self.folder}/", ""),
                "fingerprint": which,
                "layers": one.get("layers"),
                "parameters": f"{count / 1e6:.1f} million" if (count := one.get("parameters")) else None,
                "last trained on answers": (one.get("answers") or "")[:8],
                "steps": one.get("steps"),
            }
            for which, one in found.items()
        ]
        size: dict[str, Any] = next((one["target_size"] for one in self._settings if "target_size" in one), {})
        return [[{"target": self.target} | size], drafters]

    def cells(self, exhibit: Exhibit) -> tuple[Cells, dict[str, str]]:
        """An exhibit's cells, and why rows have none."""
        manifest = self.manifest
        names, absent, losses = manifest["names"], manifest["absent"], manifest.get("losses", {})
        return cells_of(exhibit, self.folder, self.is_quick, names, absent, losses)

    def described(self, runs: Sequence[ExhibitRun]) -> str:
        """How an exhibit's runs were measured, in words."""
        text = "; ".join(run.described() for run in runs if run.training is None)
        if text and self.manifest["data"] == "builtin":
            lengths = [len(item.turns[0]) for item in read_workload(BUILT_IN)]
            text += (
                "; but for each of these sets, and for warm-ups, the same few prompts of this package were taken: "
                f"{len(lengths)} of {min(lengths)} to {max(lengths)} characters, also where more prompts, more at a "
                "time, or longer ones are named"
            )
        return text

    def method(self, run: ExhibitRun, row: Row) -> str:
        """A row's method with {warm}, {reserved} and {gates} filled in, the last two by set, or its stand-in and the
        reason."""
        if run.training is not None:
            return row.method
        keys = {of: SetRun(run, of, row.needs_drafter).key for of in run.sets}
        names: dict[str, str] = self.manifest["names"]
        by_set = {of: names[f"{key} {row.method}"] for of, key in keys.items() if f"{key} {row.method}" in names}
        found = next(iter(by_set.values()), row.method)
        for word, pattern in _OF_SETS.items():
            given = {of: asked[0] for of, name in by_set.items() if (asked := pattern.search(name)) is not None}
            if len(set(given.values())) > 1:
                each = ", ".join(f"{one} on {of}" for of, one in given.items())
                found = f"{pattern.sub(word, found, count=1)} ({word}: {each})"
        own = found.partition(":")[0] == row.method.partition(":")[0]
        text = "" if own else f"{INSTEAD}{_UNFILLED.sub('', row.method)}, for which this target has no drafter"
        return found.replace(f"{self.folder}/", "") + text


def _published(path: str) -> str:
    """A path without private folders: of an absolute one, or one below home, only the last part. Other names, such as
    those of the hub, are unchanged."""
    return Path(path).name if Path(path).is_absolute() or path.startswith("~") else path


def _made(settings: Mapping[str, Any], names_machine: bool) -> str:
    """The machine, unless a source's name suffices, threads, versions, git revision and kernels of records, in one
    line."""
    versions = {name: number for name, number in settings["versions"].items() if number is not None}
    made = [f"{name} {number}" for name, number in versions.items()]
    made += [f"git {settings['git']}"] if settings.get("git") else []
    if settings.get("device") == "cpu" and "cpu_kernels" in settings:  # older records do not say
        level = settings["cpu_kernels"]
        made.append("no compiled kernels" if level is None else f"compiled kernels of level {level}")
    machine = [settings["hardware"]] if names_machine else []
    return ", ".join([*machine, f"{settings['threads']} threads", *made])


@dataclass
class ServedRows:
    """Records of servers, such as vLLM's: folders of `outpace bench --endpoint URL --out FOLDER` for each row.

    A run's rows are the records of its sets at its temperature, with its number of requests in flight.

    Attributes:
        records: by row; the other rows are compared with "plain".
    """

    records: Mapping[str, Sequence[Record]]
    is_quick: bool = False

    @classmethod
    def read(cls, folders: Iterable[tuple[str, Path]]) -> "ServedRows":
        """The records of rows and their folders, of which a row may have several, such as one for each set.

        Raises InvalidRequest: no records of a server; none of plain decoding; groups of several sets; two folders of a
        row that measure the same.
        """
        found: dict[str, list[Record]] = {}
        for row, folder in folders:
            own, before = _read(row, folder), found.setdefault(row, [])
            if twice := {*map(_setting, own)} & {*map(_setting, before)}:
                of, level, temperature = min(twice)
                raise InvalidRequest(
                    f"from={row}={folder}: another folder of this row has {of} with {level} in flight at temperature "
                    f"{temperature:g}, too; leave one of them out"
                )
            before += own
        if PLAIN_ROW not in found:
            raise InvalidRequest(f"from={', '.join(found)}: give {PLAIN_ROW}=FOLDER, a server without drafts, too")
        return cls(found)

    @property
    def name(self) -> str:
        return f"{self._first['model']}, served"

    @property
    def _first(self) -> Record:
        return self.records[PLAIN_ROW][0]

    def about(self) -> list[str]:
        addresses = dict.fromkeys(record["endpoint"] for records in self.records.values() for record in records)
        return [f"asked at {', '.join(addresses)} from {self._first['hardware']}", "full"]

    def cells(self, exhibit: Exhibit) -> tuple[Cells, dict[str, str]]:
        cells: dict[tuple[str, str, str], Measured] = {}
        for run in exhibit.runs:
            for of in run.sets:
                plain = _of_run(self.records[PLAIN_ROW], run, of)
                for row in (Row(name=PLAIN_ROW, method=PLAIN), *exhibit.rows):
                    of_row = PLAIN_ROW if row.method == PLAIN and row.name not in self.records else row.name
                    if plain and (own := _of_run(self.records.get(of_row, ()), run, of)):
                        cells[run.label, row.name, of] = _compared(row.name, own, plain)
        measured_rows = {row for _, row, _ in cells}
        return cells, {row.name: "no records" for row in exhibit.rows if row.name not in measured_rows}

    @property
    def models(self) -> list[list[dict[str, Any]]]:
        return [[{"target": self.name}]]

    def described(self, runs: Sequence[ExhibitRun]) -> str:
        counts = Counter((record["dataset"], record["concurrency"]) for record in self.records[PLAIN_ROW])
        texts = [f"{counted(count, 'prompt')} of {of}, {level} in flight" for (of, level), count in counts.items()]
        return f"{'; '.join(texts)}; at most {self._first['sampling']['max_new_tokens']} tokens"

    def method(self, run: ExhibitRun, row: Row) -> str:
        return "as the server was started"


@dataclass
class GpuRecord:
    """The record of `scripts/gpu_check.sh`: times of the parts of a round of one request, by context and method."""

    record: Record
    is_quick: bool = False

    @classmethod
    def read(cls, file: Path) -> "GpuRecord":
        """The record in a file; raises InvalidRequest if it is not of that script."""
        if "latency" not in (record := object_of(file, text_of(file))):
            raise InvalidRequest(f"from={str(file)!r}: not the record of scripts/gpu_check.sh, its last line")
        return cls(record)

    @property
    def name(self) -> str:
        return f"random weights of Qwen3-8B's shape, {self.record['hardware']}"

    def about(self) -> list[str]:
        return ["medians of repeated calls of each part of a round, added up", f"measured {self.record['date']}"]

    def cells(self, exhibit: Exhibit) -> tuple[Cells, dict[str, str]]:
        alone = {f"context of {one['context']:,} tokens": one for one in self.record["latency"] if one["batch"] == 1}
        cells = {
            (run.label, row.name, of): _timed(alone[run.label], row)
            for run, row in exhibit.rows_in_runs(False)
            for of in run.sets
            if row.method.partition(":")[0] in alone.get(run.label, {})
        }
        return cells, {}

    @property
    def models(self) -> list[list[dict[str, Any]]]:
        return [[{"target": self.name}]]

    def described(self, runs: Sequence[ExhibitRun]) -> str:
        return "one request, 16 verified rows, blocks of 15 drafts; EAGLE-3 without the time of building its tree"

    def method(self, run: ExhibitRun, row: Row) -> str:
        return f"Triton kernels, one by one{INSTEAD}separate operations" if _SEPARATE in row.method else "CUDA graphs"


RecordSource = RecordFolder | ServedRows | GpuRecord
"""Records of a paper's rows on one machine."""


def _timed(case: Mapping[str, Any], row: Row) -> Measured:
    """The parts of a row's round, in a case of a GPU's record; NaN where time was up."""
    parts = case[kind := row.method.partition(":")[0]]
    ms = {part: times.get("graph_ms", nan) for part, times in parts.items() if isinstance(times, dict)}
    head = parts["rollout_chain"].get("eager_ms", nan) if _SEPARATE in row.method else ms.get("rollout_chain", 0.0)
    own: dict[str, float] = {"net_ms": sum(ms.get(part, 0.0) for part in ("context", "block", "level"))}
    own["lm_head_ms"] = ms["level_head" if kind == "eagle3" else "lm_head"]
    own = {name: parts.get("levels", 1) * value for name, value in own.items()} | {"head_ms": head}
    own |= {"draft_ms": sum(own.values()), "forward_ms": case["verify"]["16"].get("graph_ms", nan), "steps": 1.0}
    around = (case[part].get("eager_ms", nan) for part in ("verdict", "commit"))
    own["own_ms"] = own["draft_ms"] + own["forward_ms"] + sum(around)
    options: dict[str, Any] = {"files": {}, "drafter": {"kind": kind, "fingerprint": "with random weights"}}
    return Measured({name: np.array([value]) for name, value in own.items()}, {}, 0, 0, 0, options)


def _read(row: str, folder: Path) -> list[Record]:
    """The records of a server's last method; of plain decoding, if that is the row."""
    try:
        lines = (folder / RECORDS).read_text(encoding="utf-8").split("\n")[:-1]
        records = [json.loads(line) for line in lines]
        methods = dict.fromkeys(record["method"] for record in records)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = first_line(error)
        raise InvalidRequest(f"from={row}={folder}: no {RECORDS} of `outpace bench --endpoint`: {why}") from error
    wanted = PLAIN if row == PLAIN_ROW and PLAIN in methods else [*methods][-1] if methods else ""
    own = [record for record in records if record["method"] == wanted]
    if not own or "endpoint" not in own[0]:
        raise InvalidRequest(f"from={row}={folder}: its records are not of a server; measure one with --endpoint")
    sets: dict[int, str] = {}
    for record in own:
        if sets.setdefault(record["group"]["number"], record["dataset"]) != record["dataset"]:
            raise InvalidRequest(
                f"from={row}={folder}: groups of requests mix {sets[record['group']['number']]} with "
                f"{record['dataset']}; measure each set in a folder of its own"
            )
    return own


def _of_run(records: Iterable[Record], run: ExhibitRun, of: str) -> list[Record]:
    wanted = of, run.in_flight or run.batch, run.temperature
    return [one for one in records if _setting(one) == wanted]


def _setting(record: Record) -> tuple[str, int, float]:
    return record["dataset"], record["concurrency"], record["sampling"]["temperature"]


def _compared(row: str, own: Sequence[Record], plain: Sequence[Record]) -> Measured:
    """A row measured against plain decoding; raises InvalidRequest if their prompts or groups differ."""
    places = [[(record["id"], record["group"]["number"]) for record in records] for records in (own, plain)]
    if places[0] != places[1]:
        raise InvalidRequest(f"from={row}: other prompts than {PLAIN_ROW}'s; measure both with the same command")
    texts = {record["id"]: (record["texts"], record["finish_reasons"]) for record in plain}
    rows = [_as_row(record, texts[record["id"]] == (record["texts"], record["finish_reasons"])) for record in own]
    return measured(_with_group_counts(rows), _with_group_counts([_as_row(record, True) for record in plain]))


def _as_row(record: Record, is_equal: bool) -> Record:
    """A server's record in the form of a row's: unknown figures are NaN, and a difference is unchecked: texts show no
    ties."""
    unknown = dict.fromkeys(OF_RECORDS, nan) | {"memory_mb": nan, "tokens_per_step": nan}
    known = {name: value for name, value in record.items() if value is not None and name not in (*PHASES, *DRAFT_MS)}
    options = {"files": {}, "drafter": None, "server": record["endpoint"]}
    finding = {"kind": "equal" if is_equal else "unchecked"}
    return unknown | known | {"equal": is_equal, "finding": finding, "options": options}


def _with_group_counts(records: Sequence[Record]) -> list[Record]:
    """Records with steps, drafted and accepted tokens. Where the server counts them for all requests of a group
    together, the group's first record gets the sums and the others get 0."""
    found, seen = [], set[int]()
    for record in records:
        number, counts = record["group"]["number"], record["group"]["speculation"]
        if counts is not None:
            shares = {name: 0 if number in seen else counts[name] for name in ("steps", "drafted", "accepted")}
            record = {**record, **shares}
        seen.add(number)
        found.append(record)
    return found
