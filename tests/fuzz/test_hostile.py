"""Small files that announce more than any memory holds, in a process that may have little and not for long."""

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.drafters.net.test_load import write_all
from tests.unit.models.tiny import save_tiny_model, write_tiny_gguf

LOADS = """
import pathlib, resource, sys
import outpace, outpace.api, outpace.drafters.load
status = pathlib.Path("/proc/self/status")
def peak():
    lines = status.read_text().splitlines() if status.exists() else ["VmHWM: 0"]
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))
before, used = peak(), resource.getrusage(resource.RUSAGE_SELF)
limit = int(used.ru_utime + used.ru_stime) + 60
resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
for path in sys.argv[1:]:
    try:
        outpace.drafters.load.load_net(path) if "/net-" in path else outpace.load(path, "plain", dtype="float32")
        said = "ACCEPTED"
    except outpace.OutpaceError as error:
        said = "refused: " + str(error).splitlines()[0]
    print("answer", peak() - before, path, said, sep="\\t", flush=True)
"""
BUDGET_MB = 300  # for all of them: hundreds of times what these files hold, and far less than they announce


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


ARCHITECTURE = string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama")


def gguf(values: bytes, count: int, tensors: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + values + rest


GGUF: dict[str, bytes] = {
    "nothing but its architecture": gguf(ARCHITECTURE, 1),
    "an array of 2^40": gguf(ARCHITECTURE + string(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 4, 2**40), 2),
    "strings of 2^60": gguf(ARCHITECTURE + string(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2**60), 2),
    "a string of 2^62": gguf(struct.pack("<Q", 2**62) + b"x" * 40, 1),
    "2^63 values": gguf(ARCHITECTURE, 2**63),
    "2^62 tensors": gguf(ARCHITECTURE, 1, 2**62),
    "arrays in arrays": gguf(string(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, 1),
    "10^9 layers": gguf(
        ARCHITECTURE + string(b"llama.block_count") + struct.pack("<II", 4, 10**9), 2, 1,
        string(b"x") + struct.pack("<IQIQ", 1, 1, 0, 0) + b"\0" * 64,
    ),
    "a tensor of 2^60": gguf(ARCHITECTURE, 1, 1, string(b"x") + struct.pack("<IQIQ", 1, 2**60, 0, 0)),
}  # fmt: skip


def gguf_files(folder: Path) -> list[Path]:
    paths = []
    for number, content in enumerate(GGUF.values()):
        paths.append(folder / f"{number}.gguf")
        paths[-1].write_bytes(content)
    whole = write_tiny_gguf(folder / "whole.gguf").read_bytes()
    for field in (b"llama.embedding_length", b"llama.feed_forward_length", b"llama.block_count"):
        paths.append(folder / f"{field.decode()}.gguf")
        place = whole.index(field) + len(field) + 4
        paths[-1].write_bytes(whole[:place] + struct.pack("<I", 2**30) + whole[place + 4 :])
    return paths


CONFIGS: dict[str, object] = {
    "num_hidden_layers": 10**6, "num_labels": 10**8, "vocab_size": 10**9, "head_dim": 2**28, "hidden_size": 2**28,
    "intermediate_size": 2**40, "num_attention_heads": 2**30, "num_key_value_heads": 2**30,
}  # fmt: skip


def configs(folder: Path) -> list[Path]:
    whole, paths = save_tiny_model(folder / "whole"), []
    for field, value in CONFIGS.items():
        paths.append(Path(shutil.copytree(whole, folder / field)))
        config = json.loads((whole / "config.json").read_text())
        (paths[-1] / "config.json").write_text(json.dumps(config | {field: value}))
    return paths


KINDS: dict[str, Callable[[torch.Tensor], object]] = {
    "declared": lambda one: torch.zeros(1).expand(one.shape[0], 2**25),  # one number
    "meta": lambda one: torch.empty(one.shape, device="meta"),
    "sparse": lambda one: torch.sparse_coo_tensor(torch.zeros(2, 1), torch.ones(1), (2**31, 2**31)),
    "nested": lambda one: torch.nested.nested_tensor(list(one.unbind())),
    "quantised": lambda one: torch.quantize_per_tensor(one, 0.1, 0, torch.qint8),
    "code": lambda one: print,  # a call of a function that is none of torch's
}


def saved(tensors: object, path: Path | io.BytesIO) -> None:
    """Pickles look through all modules for what has none, and modules of transformers may not be importable."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "transformers"}
    try:
        torch.save(tensors, path)
    finally:
        sys.modules.update(hidden)


def torch_files(folder: Path) -> list[Path]:
    write_all(folder / "all")
    model, medusa, paths = save_tiny_model(folder / "model"), folder / "all" / "medusa-authors", []
    for origin, weights in {model: "model.safetensors", medusa: "medusa_lm_head.safetensors"}.items():
        for kind, make in KINDS.items():
            tensors: dict[str, object] = dict(load_file(origin / weights))
            name = next(key for key, one in tensors.items() if isinstance(one, torch.Tensor) and one.dim() == 2)
            given = tensors[name]
            assert isinstance(given, torch.Tensor)
            tensors[name] = make(given)
            paths.append(Path(shutil.copytree(origin, folder / f"{'model' if origin == model else 'net'}-{kind}")))
            (paths[-1] / weights).unlink()
            saved(tensors, paths[-1] / ("pytorch_model.bin" if origin == model else "medusa_lm_head.pt"))
    shared = torch.zeros(1000, 1000)  # a file of 4 MB whose tensors, all the same one, declare 16 GB
    paths.append(Path(shutil.copytree(medusa, folder / "net-shared")))
    (paths[-1] / "medusa_lm_head.safetensors").unlink()
    saved({str(number): shared for number in range(4000)}, paths[-1] / "medusa_lm_head.pt")
    return [*paths, bomb(folder)]


def bomb(folder: Path) -> Path:
    """A torch file whose pickle is packed: a gigabyte of nothing in a megabyte."""
    path = Path(shutil.copytree(folder / "all" / "medusa-authors", folder / "net-bomb"))
    (path / "medusa_lm_head.safetensors").unlink()
    plain = io.BytesIO()
    saved({"x": torch.ones(3)}, plain)
    with (
        zipfile.ZipFile(plain) as whole,
        zipfile.ZipFile(path / "medusa_lm_head.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for member in whole.namelist():
            with packed.open(member, "w") as sink:
                sink.write(whole.read(member))
                for _ in range(1000 if member.endswith("data.pkl") else 0):
                    sink.write(bytes(2**20))
    return path


GROUPS = {"GGUF files": gguf_files, "configs": configs, "torch files": torch_files}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, int, str]]]:
    """Of each group its files, the megabytes of the process's peak behind each, and what was said of it."""
    made = {name: make(tmp_path_factory.mktemp("hostile")) for name, make in GROUPS.items()}
    paths = [str(path) for part in made.values() for path in part]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOADS, *paths]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    rows = [line.split("\t")[1:] for line in done.stdout.splitlines() if line.startswith("answer\t")]
    assert done.returncode == 0, f"{paths[len(rows)]}: {done.stderr[-2000:]}"
    found = {path: (path, int(megabytes), said) for megabytes, path, said in rows}
    return {name: [found[str(path)] for path in part] for name, part in made.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", GROUPS)
def test_small_files_that_announce_much_are_refused(group: str, answers: dict[str, list[tuple[str, int, str]]]) -> None:
    """Guards against a GGUF of 71 bytes that builds a model of default size, one of 149 that grows without end, torch
    files of kilobytes that declare gigabytes, or hold tensors without numbers or code, and configs that ask for a
    million layers or for tables of angles of heads that no tensor has."""
    rows = answers[group]
    largest = max(size(Path(path)) for path, _, _ in rows)
    print(f"\n{group}: {len(rows)} of at most {largest} bytes, all refused; peak +{max(row[1] for row in rows)} MB")
    assert not [row for row in rows if not row[2].startswith("refused: ")]
    assert max(megabytes for _, megabytes, _ in rows) < BUDGET_MB


def size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(one.stat().st_size for one in path.iterdir())
