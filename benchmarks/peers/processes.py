"""Processes that answer one at a time: all others are stopped, and take no core from the one that answers."""

import json
import os
import re
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil

from benchmarks.peers.environments import PeerMissing
from outpace.lib.threads import VARIABLES

SERVE = Path(__file__).parent / "serve.py"
LOADING_S, ANSWER_S, END_S = 900.0, 600.0, 10.0


class RunnerProcess:
    """A runner in its own environment, loaded and then stopped until a request.

    Threads wait as the library chooses: a stopped process does not spin.

    Args:
        python: of its environment.
        script: the runner.
        settings: as `serve` describes.
        log: a file for what it prints.
        variables: environment variables in addition to this process's.

    Attributes:
        facts: facts for records: the runner's, and the seconds until it was loaded, imports included.

    Raises:
        PeerMissing: it cannot be loaded.
    """

    def __init__(
        self, python: Path, script: Path, settings: Mapping[str, Any], log: Path, variables: Mapping[str, str]
    ) -> None:
        self._log, self._name = log, log.stem
        started = perf_counter()
        inherited = {key: value for key, value in os.environ.items() if key not in VARIABLES}
        with log.open("wb") as sink:
            # A new process group in our session: if this process is killed, the kernel ends the group, stopped or not.
            self._process = subprocess.Popen(
                [str(python), "-P", str(SERVE), str(script), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=inherited | dict(variables),
                text=True,
                process_group=0,
            )
        try:
            self.facts: dict[str, Any] = self._read(LOADING_S) | {"load_s": perf_counter() - started}
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> "RunnerProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, method: str, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """The answer to a prompt, as `serve.Clock.answer` gives it.

        Raises:
            PeerMissing: the process ended or did not answer in time.
        """
        request = {"method": method, "prompt": list(prompt), "max_new_tokens": max_new_tokens}
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return self._read(ANSWER_S)
        except BrokenPipeError as error:
            raise PeerMissing(f"{self._name}: ended: {self._last_words()}") from error
        finally:
            self._signal(signal.SIGSTOP)

    def memory_mb(self) -> float:
        """Peak memory in MiB of the process and its children; the current memory if the system keeps no peak."""
        return sum(map(_peak_bytes, self._family())) / 2**20

    def cpu_seconds(self) -> float:
        """CPU time that it and its children have used."""
        return sum(times.user + times.system for times in (process.cpu_times() for process in self._family()))

    def close(self) -> None:
        """End it."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # a request that it never read
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def _family(self) -> list[psutil.Process]:
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def _read(self, seconds: float) -> dict[str, Any]:
        """The next line. Each request has one, so nothing remains in the reader's buffer."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            self._signal(signal.SIGKILL)  # a late answer would be taken for the next request's
            raise PeerMissing(f"{self._name}: silent for {seconds:.0f} s: {self._last_words()}")
        line = self._process.stdout.readline()
        if not line:
            raise PeerMissing(f"{self._name}: ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        last = max((number for number, line in enumerate(lines) if "rror" in line), default=len(lines) - 1)
        return " ".join(lines[last:])[:500] or "no reason given"

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _peak_bytes(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    return int(peak[1]) * 1024 if peak else int(process.memory_info().rss)
