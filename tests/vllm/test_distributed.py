"""Several workers: the same tokens, and as many accepted drafts, as one."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.vllm.speculation import PROPOSER
from tests.vllm.engines import engine, speculative
from tests.vllm.tiny import BLOCK, VOCAB, Tiny, write_ranked

pytestmark = pytest.mark.thorough  # `make test-vllm` has them, its quick part has not
ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 9, 14, 200, 31], [7, 7, 300]]
LENGTH = 16
START = 420.0
"""Seconds that workers may take: half a minute, or many times that on a busy machine."""


def on_two_workers(
    target: Path, speculation: Mapping[str, Any], **more: Any
) -> tuple[list[list[int]], tuple[int, int]]:
    """What two workers say, and their counts of drafts."""
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", **more}
    asked = {"model": str(target), "speculation": speculation, "settings": settings}
    command = [sys.executable, "-m", "tests.vllm.generate", json.dumps({**asked, "prompts": PROMPTS, "length": LENGTH})]
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # each worker on its core
    around = os.environ | variables
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=START)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"answers"')))
    drafted, accepted = said["counts"]
    return said["answers"], (drafted, accepted)


def test_two_workers_say_what_one_says(tiny: Tiny, tmp_path: Path) -> None:
    """Guards against rows of the target's head that a worker has not, and a head that drafts another chain on each: of
    a ranked vocabulary they are spread over workers."""
    ids = torch.arange(0, VOCAB, 3)
    write_ranked(tmp_path / "ranked", tiny.shifted, ids, rows=ids)
    speculation = speculative("dflash", tmp_path / "ranked", BLOCK - 1)
    with engine(tiny.target, speculation) as made:
        alone = made.generate(PROMPTS, LENGTH), made.counts()
    assert on_two_workers(tiny.target, speculation) == alone


@pytest.mark.parametrize(("method", "kind"), [("outpace:draft=none", None), ("graft", "eagle3"), ("outpace", "domino")])
def test_our_proposers_draft_on_two_workers_what_they_draft_on_one(method: str, kind: str | None, tiny: Tiny) -> None:
    """Guards against workers that draft each something else, and hidden states that only one of them sees."""
    own: dict[str, Any] = {"method": method, "least_gain": 0.0}
    own |= {} if kind is None else {"drafter": str(getattr(tiny, kind))}
    speculation = speculative("custom_class", PROPOSER, BLOCK - 1)
    more: dict[str, Any] = {"additional_config": {"outpace": own}, "max_num_seqs": 1}
    with engine(tiny.target, speculation, **more) as made:
        alone = made.generate(PROMPTS, LENGTH), made.counts()
    assert alone[1][0] > 0
    assert on_two_workers(tiny.target, speculation, **more) == alone
