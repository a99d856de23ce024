"""The command behind `make peers`; see docs/results.md."""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer

from benchmarks.peers.contenders import FILE, HF, NEED_A_DRAFT, OURS, Peer, Service, entry_name, named_peers
from benchmarks.peers.environments import FOLDER, VERSIONS, PeerMissing, prepare
from benchmarks.peers.figures import markdown, rows
from benchmarks.peers.gguf_file import export_gguf, weight_bytes
from benchmarks.peers.processes import RunnerProcess
from benchmarks.peers.race import Entry, Race, Task
from outpace.bench.environment import environment
from outpace.bench.records import RunFolder
from outpace.cli.options import complain, note
from outpace.data.workload import fingerprint, read_workloads
from outpace.doctor.machine import bandwidth
from outpace.lib.errors import InvalidRequest, OutpaceError
from outpace.models.export import export, export_draft
from outpace.models.loading.gguf import read_gguf
from outpace.models.loading.load import load_vocabulary_facts
from outpace.models.loading.shipped import shipped_for


class Setup:
    """Sets up the contenders: environments, weights, processes.

    Args:
        model: as for `outpace.load`.
        task: the prompts to decode.
        folder: for environments and weights.
        constraints: the folder of pinned versions.
        draft: a draft model, if there is one.
        threads: threads of each contender.
    """

    def __init__(
        self, model: str, task: Task, folder: Path, constraints: Path, draft: str | None, threads: int
    ) -> None:
        self.missing: dict[str, str] = {}
        self._model, self._task, self._draft, self._threads = model, task, draft, threads
        self._is_gguf = model.endswith(".gguf")
        self._folder, self._constraints = folder, constraints
        self._weights = folder / "weights" / (Path(model).name or "model")

    def enter(self, name: str, peer: Peer, stack: ExitStack, logs: Path, variables: dict[str, str]) -> list[Entry]:
        """The entries of a peer, with loaded processes; `missing` gets those that cannot run, with the reason."""
        try:
            python = prepare(name, peer, self._folder, self._constraints)
        except PeerMissing as error:
            self.missing[name] = str(error)
            return []
        entries = []
        for service in peer.raced(self._is_gguf):
            without = [method for method in service.methods if method in NEED_A_DRAFT and self._draft is None]
            reason = "no draft model of this model: name one by --draft"
            self.missing |= {entry_name(name, service, method): reason for method in without}
            methods = tuple(method for method in service.methods if method not in without)
            if not methods:
                continue
            label = f"{name}-{service.precision}-{'-'.join(methods)}"
            try:
                settings = self._settings(service, methods)
                own = variables | ({"PYTHONPATH": ""} if peer.packages else {})
                process = RunnerProcess(python, peer.script, settings, logs / f"{label}.log", own)
            except OutpaceError as error:
                self.missing |= {entry_name(name, service, method): str(error) for method in methods}
                continue
            stack.enter_context(process)
            entries += [Entry(name, service, method, process) for method in methods]
        return entries

    def _settings(self, service: Service, methods: tuple[str, ...]) -> dict[str, object]:
        settings: dict[str, object] = {"model": self._model, "precision": service.precision, "methods": methods}
        settings |= {"threads": self._threads, "eos": self._task.eos}
        settings["max_length"] = max(map(len, self._task.prompts)) + self._task.max_new_tokens + 64
        if service.weights == FILE:
            settings |= {"weights": self._model, "draft": self._draft}
            if self._draft is not None and self._draft.endswith(".gguf"):
                settings["draft_architecture"] = read_gguf(Path(self._draft)).values.get("general.architecture")
        elif service.weights != OURS:
            exported = export(self._model, self._weights)
            settings["weights"] = str(exported if service.weights == HF else export_gguf(exported, service.weights))
            if "assisted" in methods and self._draft is not None:
                settings["draft"] = str(export_draft(self._draft, exported, self._weights))
        return settings


def main(
    model: Annotated[str, typer.Option("--model", "-m", help="As for the other commands.")] = "smollm2-135m",
    workload: Annotated[list[str] | None, typer.Option("--workload", "-w", help="FILE, FILE:LIMIT, builtin:N.")] = None,
    peers: Annotated[str, typer.Option(help="Comma-separated.")] = "transformers,llama.cpp,openvino,vllm",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    threads: Annotated[int | None, typer.Option(help="Of every contender; by default physical cores.")] = None,
    draft: Annotated[str | None, typer.Option(help="For methods with a draft model; by default what ships.")] = None,
    folder: Annotated[Path, typer.Option(help="For environments and weights.")] = FOLDER,
    constraints: Annotated[Path, typer.Option(help="Pinned versions of each peer.")] = VERSIONS,
    out: Annotated[Path | None, typer.Option(help="For records, table and chart; a new folder.")] = None,
) -> None:
    """Race other libraries against this one: same weights, prompts as ids, lengths and threads, greedy, interleaved."""
    chosen = named_peers(peers)
    items = read_workloads(workload or ["builtin:4"], 1)
    codec, _, eos = load_vocabulary_facts(model)
    prompts = tuple(
        tuple(codec.encode(item.turns[0]) if item.raw else codec.encode_chat(item.prompt(0, []))) for item in items
    )
    count = threads or psutil.cpu_count(logical=False) or 1
    shared = environment(torch.device("cpu"), torch.bfloat16) | {"model": model, "threads": count}
    task = Task(items, prompts, max_new_tokens, eos, shared)
    where = out or Path("runs") / f"peers-{datetime.now():%F-%H%M%S}"
    settings = shared | {"peers": list(chosen), "prompts": fingerprint(items), "max_new_tokens": max_new_tokens}
    run = RunFolder(where, settings)
    if (where / "records.jsonl").exists():
        raise InvalidRequest(f"out={str(where)!r}: holds the records of a race; choose a new folder")
    setup = Setup(model, task, folder, constraints, draft or _shipped_draft(model), threads=count)
    variables = {"OMP_NUM_THREADS": str(count)}
    with ExitStack() as stack:
        entries = []
        for name, peer in chosen.items():
            note(f"setting up {name}")
            entries += setup.enter(name, peer, stack, where, variables)
        if not entries or entries[0].peer != "outpace":
            raise PeerMissing(next(iter(setup.missing.values())))
        race = Race(entries, task, setup.missing, _ceiling(Path(model), count) if model.endswith(".gguf") else None)
        records = []
        for number, group in enumerate(race.groups(), start=1):
            run.append(group)
            records += group
            note(f"{number}/{len(items)} prompts")
    found = rows(records)
    hardware = f"{shared['cores']} cores of {shared['hardware']}"
    title = f"{model}, {len(items)} prompts, at most {max_new_tokens} tokens, greedy, {count} threads, {hardware}"
    table = markdown(found, race.missing, title)
    (where / "table.md").write_text(table, encoding="utf-8")
    (where / "chart.json").write_text(json.dumps({"title": title, "rows": found, "missing": race.missing}, indent=1))
    print(table)


def _ceiling(file: Path, threads: int) -> Callable[[], float]:
    """A function that measures tokens per second if each token only reads all of a file's weights once."""
    read = weight_bytes(file)
    return lambda: max(bandwidth(threads)) / read


def _shipped_draft(model: str) -> str | None:
    found = shipped_for(model).drafters.get("draft-lm")
    return None if found is None else str(found)


if __name__ == "__main__":
    try:
        typer.run(main)
    except OutpaceError as error:
        complain(error)
        sys.exit(2)
