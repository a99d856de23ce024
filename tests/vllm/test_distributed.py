"""Several workers: the same tokens, and the same drafts' worth, as one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from outpace.drafters.domino.files import read_domino
from outpace.drafters.kinds import write_net
from outpace.drafters.ranked_vocabulary import FILE_NAME, save_vocabulary
from outpace.lib.checkpoint import read_checkpoint, write_index
from outpace.vllm.versions import installed_version
from tests.vllm.engines import SETTINGS, engine, speculative
from tests.vllm.tiny import BLOCK, VOCAB, Tiny

pytestmark = pytest.mark.thorough  # `make test-vllm` has them, its quick part has not
ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 9, 14, 200, 31], [7, 7, 300]]
LENGTH = 16
START = 420.0
"""Seconds that servers have to start: half a minute, or many times that on a busy machine."""


def environment(cores: str) -> dict[str, str]:
    """Of engines in processes of their own, each worker on its core."""
    return os.environ | {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def named(folder: Path) -> Path:
    """A folder in which a package `vllm` is said to be installed: the wheel for CPUs has another name, and vLLM's own
    command asks by that name for its version."""
    about = folder / "named" / f"vllm-{vllm_version()}.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm_version()}\n")
    (about / "RECORD").touch()
    return about.parent


def vllm_version() -> str:
    """With the word by which vLLM tells that it was built for CPUs."""
    return f"{installed_version().partition('+')[0]}+cpu"


@pytest.fixture(scope="module")
def ranked(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter with a ranked vocabulary, whose rows of the target's head are spread over workers."""
    folder, ids = tmp_path_factory.mktemp("distributed") / "ranked", torch.arange(0, VOCAB, 3)
    write_net(read_domino(read_checkpoint(tiny.shifted)), folder, "domino", ids)
    save_vocabulary(folder / FILE_NAME, ids, VOCAB)
    write_index(folder)
    return folder


@pytest.fixture(scope="module")
def alone(tiny: Tiny, ranked: Path) -> tuple[list[list[int]], tuple[int, int]]:
    """What one worker says, and its counts of drafts."""
    with engine(tiny.target, speculative("dflash", ranked, BLOCK - 1)) as made:
        return made.generate(PROMPTS, LENGTH), made.counts()


def on_two_workers(
    target: Path, speculation: Mapping[str, Any], **more: Any
) -> tuple[list[list[int]], tuple[int, int]]:
    """What two workers say, and their counts of drafts."""
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", **more}
    asked = {"model": str(target), "speculation": speculation, "settings": settings}
    command = [sys.executable, "-m", "tests.vllm.generate", json.dumps({**asked, "prompts": PROMPTS, "length": LENGTH})]
    done = subprocess.run(command, cwd=ROOT, env=environment("0|1"), capture_output=True, text=True, timeout=START)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"answers"')))
    drafted, accepted = said["counts"]
    return said["answers"], (drafted, accepted)


def test_two_workers_say_what_one_says(
    tiny: Tiny, ranked: Path, alone: tuple[list[list[int]], tuple[int, int]]
) -> None:
    """Guards against rows of the target's head that a worker has not, and a head that drafts another chain on each."""
    assert on_two_workers(tiny.target, speculative("dflash", ranked, BLOCK - 1)) == alone


@pytest.mark.parametrize(("name", "kind"), [("Retrieval", None), ("Graft", "eagle3"), ("Union", "domino")])
def test_our_proposers_draft_on_two_workers_what_they_draft_on_one(name: str, kind: str | None, tiny: Tiny) -> None:
    """Guards against workers that draft each something else, and hidden states that only one of them sees. One request
    at a time: what others teach depends on when their first tokens come."""
    own: dict[str, Any] = {"least_gain": 0.0, "learn_prompts": False}  # several workers never learn from them
    own |= {} if kind is None else {"drafter": str(getattr(tiny, kind))}
    speculation = speculative("custom_class", f"outpace.vllm.proposer.{name}", BLOCK - 1)
    more: dict[str, Any] = {"additional_config": {"outpace": own}, "max_num_seqs": 1}
    with engine(tiny.target, speculation, **more) as made:
        alone = made.generate(PROMPTS, LENGTH), made.counts()
    assert alone[1][0] > 0
    assert on_two_workers(tiny.target, speculation, **more) == alone


@contextmanager
def serving(tiny: Tiny, ranked: Path, port: int, log: Path) -> Iterator[str]:
    """Two nodes on this machine, one core each, and the address of the first."""
    taken: dict[str, Any] = {"dtype": "float32", "max-model-len": SETTINGS["max_model_len"], "max-num-seqs": 8}
    taken |= {"tensor-parallel-size": 2, "nnodes": 2, "master-addr": "127.0.0.1", "master-port": port + 1}
    taken["speculative-config"] = json.dumps(speculative("dflash", ranked, BLOCK - 1))
    shared = [part for name, value in taken.items() for part in (f"--{name}", str(value))]
    with ExitStack() as stack:
        for rank, own in ((1, ["--headless"]), (0, ["--host", "127.0.0.1", "--port", str(port)])):
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(tiny.target), "--enforce-eager"]
            command += [*shared, "--node-rank", str(rank), *own]
            variables = environment(str(rank)) | {"PYTHONPATH": os.pathsep.join([str(named(log)), *sys.path[1:]])}
            out = stack.enter_context((log / f"node{rank}.log").open("w"))
            node = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=out, stderr=out, start_new_session=True)
            stack.callback(stop, node)
        yield f"http://127.0.0.1:{port}"


def stop(node: subprocess.Popen[bytes]) -> None:
    """End a node and its workers."""
    try:
        os.killpg(node.pid, signal.SIGTERM)
        node.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()
    except ProcessLookupError:
        return


def test_two_nodes_say_what_one_worker_says(
    tiny: Tiny, ranked: Path, alone: tuple[list[list[int]], tuple[int, int]], tmp_path: Path
) -> None:
    """Guards against a plugin that a second node does not load, and drafts that differ between nodes."""
    with serving(tiny, ranked, 8170, tmp_path) as url:
        deadline = time.monotonic() + START
        while True:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            logs = "".join((tmp_path / f"node{rank}.log").read_text()[-2000:] for rank in (0, 1))
            assert time.monotonic() < deadline, logs
            time.sleep(1)
        body = {"model": str(tiny.target), "prompt": PROMPTS, "max_tokens": LENGTH, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=START)
        assert answer.status_code == 200, answer.text
        assert [choice["token_ids"] for choice in answer.json()["choices"]] == alone[0]
