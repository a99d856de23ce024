"""vLLM's server as `outpace serve --engine vllm` starts it: asked by clients, measured, and answering for training."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from outpace.api import Model, load
from outpace.bench.endpoint import under_load
from outpace.core.params import SamplingParams
from outpace.data.answers import read_answers
from outpace.data.workload import WorkItem, read_workload
from outpace.endpoint.client import Endpoint
from outpace.endpoint.server import sampling_fields, speculation_counts
from tests.cli.runner import run_json
from tests.vllm.conftest import TARGET
from tests.vllm.engines import engine
from tests.vllm.servers import cores, serving, two_nodes
from tests.vllm.tiny import Tiny

CLIENTS, TOKENS = 8, 32


@pytest.fixture(scope="module")
def model() -> Model:
    """The same model in our own engine, whose plain decoding says what every server should."""
    return load(TARGET, "plain", dtype="float32", max_num_seqs=CLIENTS)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "log.txt"


@pytest.fixture(scope="module")
def domino(smollm2: Path, log: Path) -> Iterator[Endpoint]:
    """A server with the drafter that ships for the model, found by its name."""
    with serving(TARGET, "--method", "domino", log=log) as endpoint:
        yield endpoint


def _items() -> list[WorkItem]:
    """A prompt for each client, of one turn."""
    found = [item for item in read_workload("builtin", 1) if not item.raw]
    more = [WorkItem(f"more-{one}", "more", (f"Count from {one} to {one + 30}.",)) for one in range(CLIENTS)]
    return [*found, *more][:CLIENTS]


def _plainly(model: Model) -> list[str]:
    """What plain decoding of our own engine says to them."""
    answers = model.generate([item.prompt(0, []) for item in _items()], max_new_tokens=TOKENS)
    return [answer.text for answer in answers]


def _asked(endpoint: Endpoint, clients: int) -> list[str]:
    """What a server says to them, so many at a time."""
    fields = sampling_fields(SamplingParams(TOKENS)) | {"model": TARGET}
    requests = [("chat/completions", fields | {"messages": item.prompt(0, [])}) for item in _items()]
    return [run.text for run in under_load(endpoint, requests, clients)]


def _padded(drafter: Path, folder: Path, width: int) -> Path:
    """The same drafter with zeros in its layers, which then are so wide: a width that three workers share alike."""
    shutil.copytree(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".mlp." in name]:
        rows, columns = tensors[name].shape
        new = tensors[name].new_zeros((rows, width) if "down_proj" in name else (width, columns))
        new[:rows, :columns] = tensors[name]
        tensors[name] = new
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": width}))
    return folder


def test_the_command_is_printed(domino: Endpoint, log: Path) -> None:
    """Guards against a server that was started otherwise than was said."""
    said = next(line for line in log.read_text(errors="replace").splitlines() if "vllm serve " in line)
    assert f"--served-model-name {TARGET}" in said
    assert '"method": "dflash"' in said
    assert said.endswith("--enforce-eager")


def test_eight_clients_at_once_get_plain_decodings_answers(domino: Endpoint, model: Model) -> None:
    """Guards against answers that depend on who else asks, or on what was drafted."""
    before = speculation_counts(domino)
    assert _asked(domino, CLIENTS) == _plainly(model)
    after = speculation_counts(domino)
    assert before is not None
    assert after is not None
    assert (after - before).accepted > 0


def test_the_benchs_curve(domino: Endpoint, tmp_path: Path) -> None:
    """Guards against figures of a server that are not there, such as acceptance, or a curve that changes answers."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": one.id, "dataset": one.dataset, "turns": one.turns}) for one in _items()]
    prompts.write_text("\n".join(lines))
    arguments = ["bench", "--endpoint", domino.url, "-w", str(prompts), "--concurrency", "1,4", "--json"]
    levels = run_json(*arguments, "--max-new-tokens", "24")["levels"]
    assert [row["concurrency"] for row in levels] == [1, 4]
    for row in levels:
        assert (row["equal"], row["source"], row["counted_by"]) == (1.0, "metrics", ["usage"])
        assert row["tokens_per_second"] > 0
        assert row["ttft_ms"] > 0
        assert row["tpot_ms"] > 0
        assert 0 < row["accepted_per_drafted"] < 1
        assert row["tokens_per_step"] > 1.1
        assert len(row["accepted_per_depth"]) == 7


def test_answers_for_training(domino: Endpoint, tmp_path: Path) -> None:
    """Guards against answers to train on that the target did not give: the ids are those of our own engine."""
    prompts = tmp_path / "prompts.jsonl"
    turns: list[dict[str, Any]] = [{"id": "two", "dataset": "x", "turns": ["Name three colours.", "And three more."]}]
    turns.append({"id": "raw", "dataset": "x", "turns": ["Once upon a time"], "raw": True})
    prompts.write_text("".join(json.dumps(one) + "\n" for one in turns))
    found = []
    for name, where in (("there", ["--endpoint", domino.url]), ("here", ["--dtype", "float32"])):
        out = str(tmp_path / name)
        command = ["train", "regenerate", "--target", TARGET, "--prompts", str(prompts), "--out", out, *where]
        run_json(*command, "--max-new-tokens", "24")
        found.append({one.id: one.answers for one in read_answers(out)})
    assert found[0] == found[1]
    assert {len(answers) for answers in found[0].values()} == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize(("option", "workers"), [("--tensor-parallel-size", 3), ("--data-parallel-size", 2)])
@pytest.mark.parametrize("method", ["domino", "outpace:draft=none"])
def test_several_workers_say_the_same(
    smollm2: Path, shipped: dict[str, Path], model: Model, tmp_path: Path, method: str, option: str, workers: int
) -> None:
    """Guards against tensor parallelism that changes drafts or answers, three workers for nine heads."""
    arguments = ["--method", method, option, str(workers)]
    if method == "domino" and workers == 3:
        arguments += ["--drafter", str(_padded(shipped["domino"], tmp_path / "padded", 513))]
    variables = {"VLLM_CPU_OMP_THREADS_BIND": cores(workers)}
    with serving(TARGET, *arguments, log=tmp_path / "log.txt", variables=variables) as endpoint:
        assert _asked(endpoint, CLIENTS) == _plainly(model)
        counts = speculation_counts(endpoint)
        assert counts is not None
        assert counts.accepted > counts.drafted / 50


@pytest.mark.slow
def test_a_draft_model_says_the_same(smollm2: Path, model: Model, tmp_path: Path) -> None:
    """Guards against a draft model without an embedding of its own that reaches vLLM without one."""
    with serving(TARGET, "--method", "linear", "--drafter", f"{TARGET}/draft-lm", log=tmp_path / "log.txt") as endpoint:
        assert _asked(endpoint, CLIENTS) == _plainly(model)
        counts = speculation_counts(endpoint)
        assert counts is not None
        assert counts.accepted > counts.drafted / 20


@pytest.mark.slow
def test_two_nodes_say_the_same(tiny: Tiny, tmp_path: Path) -> None:
    """Guards against a second node that never joins, or that computes something else. Here both are one machine."""
    prompts = [[5, 9, 14, 200, 31], [7, 7, 300]]
    with engine(tiny.target) as plain:
        wanted = plain.generate(prompts, 24)
    arguments = ["--method", "domino", "--drafter", str(tiny.domino), "--served-model-name", "tiny"]
    body = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with two_nodes(tiny.target, *arguments, more=["--skip-tokenizer-init"], logs=tmp_path) as endpoint:
        said = [endpoint.post("completions", body | {"prompt": prompt})[1]["token_ids"] for prompt in prompts]
        counts = speculation_counts(endpoint)
    assert said == wanted
    assert counts is not None
    assert counts.drafted > 0
