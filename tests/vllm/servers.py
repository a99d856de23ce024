"""vLLM's server, as `outpace serve --engine vllm` starts it: processes of their own, on a free port."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep

import httpx

from outpace.endpoint.client import Endpoint

STARTING_S, ENDING_S = 900.0, 30.0  # half a minute, or many times that on a busy machine
SMALL = ("--dtype", "float32", "--max-model-len", "512", "--no-enable-prefix-caching")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def process(
    arguments: Sequence[str], more: Sequence[str], log: Path, variables: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """`outpace serve ... --engine vllm -- ...`, which is ended with all that it started."""
    command = [sys.executable, "-m", "outpace", "serve", *arguments, "--engine", "vllm", "--", "--enforce-eager", *more]
    inherited = {key: value for key, value in os.environ.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("wb") as sink:
        one = subprocess.Popen(command, stdout=sink, stderr=sink, env=inherited | dict(variables), process_group=0)
    try:
        yield one
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(one.pid, number)
                one.wait(ENDING_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


@contextmanager
def serving(
    model: str | Path, *arguments: str, log: Path, variables: Mapping[str, str] | None = None
) -> Iterator[Endpoint]:
    """A server that answers."""
    port = free_port()
    asked = [str(model), *SMALL, "--port", str(port), *arguments]
    with process(asked, (), log, variables or {}) as one, Endpoint(f"http://127.0.0.1:{port}") as endpoint:
        wait_until_ready(one, port, log)
        yield endpoint


@contextmanager
def two_nodes(model: str | Path, *arguments: str, more: Sequence[str], logs: Path) -> Iterator[Endpoint]:
    """A server whose tensors are shared by two nodes, which are both this machine; `more` are options of vLLM's."""
    port, meeting = free_port(), free_port()
    shared = [str(model), *SMALL, *arguments, "--tensor-parallel-size", "2", "--nnodes", "2"]
    shared += ["--master-addr", "127.0.0.1", "--master-port", str(meeting)]
    with ExitStack() as stack:
        for rank, own in ((1, []), (0, ["--port", str(port)])):
            variables = {"VLLM_CPU_OMP_THREADS_BIND": cores(2).split("|")[rank]}
            started = process([*shared, "--node-rank", str(rank), *own], more, logs / f"node{rank}.log", variables)
            one = stack.enter_context(started)
        endpoint = stack.enter_context(Endpoint(f"http://127.0.0.1:{port}"))
        wait_until_ready(one, port, logs / "node0.log")
        yield endpoint


def cores(workers: int) -> str:
    """For VLLM_CPU_OMP_THREADS_BIND: a core for each worker; where there are fewer, some share one."""
    there = sorted(os.sched_getaffinity(0))
    return "|".join(str(there[number % len(there)]) for number in range(workers))


def wait_until_ready(one: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return when the server answers; an error says what it said if it ended, or did not begin to answer."""
    until = monotonic() + STARTING_S
    while monotonic() < until and one.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            sleep(0.5)
    raise RuntimeError(f"status {one.poll()}: {log.read_text(errors='replace')[-3000:]}")
