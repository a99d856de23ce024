"""The race: every prompt goes to every contender, one at a time, in rotating order; one record for each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers.contenders import Service, entry_name
from benchmarks.peers.environments import PeerMissing
from benchmarks.peers.processes import RunnerProcess
from outpace.bench.records import TurnRun, group_figures, prompt_figures
from outpace.bench.runner import PLAIN, WARM_UP_TOKENS, Record
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem


@dataclass(frozen=True)
class Task:
    """The prompts that all contenders decode.

    Attributes:
        items, prompts: prompts and their ids.
        max_new_tokens: tokens of an answer at most.
        eos: ids that end an answer.
        shared: fields of every record, such as the machine.
    """

    items: tuple[WorkItem, ...]
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    eos: tuple[int, ...]
    shared: Mapping[str, Any]


@dataclass
class Entry:
    """A method of a running process.

    Attributes:
        peer, service, method: names of peer and method, and the process's description.
        process: the process that serves it.
        memory_mb: the process's peak memory in MiB.
    """

    peer: str
    service: Service
    method: str
    process: RunnerProcess
    memory_mb: float = 0.0

    @property
    def name(self) -> str:
        return entry_name(self.peer, self.service, self.method)

    def run(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """Its answer to a prompt, as `RunnerProcess.ask` gives it."""
        answer = self.process.ask(self.method, prompt, max_new_tokens)
        self.memory_mb = max(self.memory_mb, self.process.memory_mb())
        return answer


@dataclass
class Race:
    """Contenders and their task.

    Attributes:
        entries: the contenders, this library's plain decoding first; one that fails is removed.
        task: the prompts that they decode.
        missing: the reasons of contenders that cannot run or failed, by name.
        ceiling: measures tokens per second if each token only reads all weights once; None if contenders read different
            weights.
    """

    entries: list[Entry]
    task: Task
    missing: dict[str, str] = field(default_factory=dict)
    ceiling: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        self.baseline = self.entries[0].name

    def groups(self) -> Iterator[list[Record]]:
        """Warm up all contenders, then yield the records of each prompt as soon as all have decoded it.

        Raises:
            PeerMissing: this library's plain decoding failed, with which all others are compared.
        """
        # Reversed: methods that learn across requests would otherwise know how the first answer begins.
        warm_up = self.task.prompts[0][::-1]
        for entry in list(self.entries):
            self._run(entry, warm_up, min(WARM_UP_TOKENS, self.task.max_new_tokens))
        for number, prompt in enumerate(self.task.prompts):
            ceiling = self.ceiling() if self.ceiling else None
            shift = number % len(self.entries)
            order = self.entries[shift:] + self.entries[:shift]
            answers = {entry.name: self._run(entry, prompt, self.task.max_new_tokens) for entry in order}
            yield [
                self._record(number, entry, answer, answers) | {"ceiling": ceiling}
                for entry in self.entries
                if (answer := answers[entry.name]) is not None
            ]

    def _run(self, entry: Entry, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any] | None:
        """An answer, or None if the contender failed; it is then removed."""
        try:
            return entry.run(prompt, max_new_tokens)
        except PeerMissing as error:
            if entry.name == self.baseline:
                raise
            self.missing[entry.name] = str(error)
            self.entries = [other for other in self.entries if other is not entry]
            return None

    def _record(
        self, number: int, entry: Entry, answer: dict[str, Any], answers: Mapping[str, dict[str, Any] | None]
    ) -> Record:
        item, ids, eos = self.task.items[number], tuple(answer["token_ids"]), self.task.eos
        counters = {"prompt_tokens": len(self.task.prompts[number]), "new_tokens": len(ids)}
        counters["steps"] = answer["arrivals"] - 1
        times = {"ttft_ms": answer["prompt_seconds"] * 1e3, "decode_ms": answer["decode_seconds"] * 1e3}
        run = TurnRun(ids, "", "stop" if ids and ids[-1] in eos else "length", counters | times)
        group = {"number": number} | group_figures([[run]])
        # A contender that drafts during the prompt's pass has more than one token after it.
        group["decoded"] = len(ids) - answer["first"]
        decode_ms = group["decode_ms"]
        group["tokens_per_second"] = 1e3 * group["decoded"] / decode_ms if group["decoded"] and decode_ms else None
        record: Record = {"index": number, "id": item.id, "dataset": item.dataset, "method": entry.name}
        record |= {
            "peer": entry.peer,
            "precision": entry.service.precision,
            "batch_size": 1,
            "concurrency": 1,
            **self.task.shared,
        }
        record |= prompt_figures([run]) | {"arrivals": answer["arrivals"], "group": group}
        is_equal = self._without_eos(answer) == self._without_eos(answers[self.baseline])
        own = answers.get(entry_name(entry.peer, entry.service, PLAIN))
        record |= {"memory_mb": entry.memory_mb, "equal": is_equal, "process": entry.process.facts}
        record |= {"finding": {"kind": "equal" if is_equal else "different"}}
        record |= {"equal_to_own_plain": None if own is None else self._without_eos(answer) == self._without_eos(own)}
        return record | {"sampling": asdict(SamplingParams(self.task.max_new_tokens))}

    def _without_eos(self, answer: Mapping[str, Any] | None) -> list[int]:
        """An answer's ids without a final EOS, which some peers do not return."""
        ids: list[int] = [] if answer is None else answer["token_ids"]
        return ids[:-1] if ids and ids[-1] in self.task.eos else ids
