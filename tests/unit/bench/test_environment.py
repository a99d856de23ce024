"""What a method is said to hold: everything of its own, nothing of its neighbours', each byte once; and of which
commit a package is."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import outpace
from outpace.bench import environment
from outpace.bench.environment import held_mb
from outpace.bench.runner import BenchPlan, BenchRun
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem
from outpace.kernels.build import VARIABLE, build
from outpace.methods.stores import matrix_of
from outpace.models.layers.linear import PackedLinear
from outpace.models.reference import TransformersReference
from tests.unit.models.tiny import save_tiny_model


@pytest.mark.parametrize(
    ("cpuinfo", "printed", "name"),
    [
        ("model name\t: EPYC\nflags\t: fma\n\nmodel name\t: EPYC\n", "", "EPYC"),
        ("CPU part\t: 0xd0b\n", "Vendor ID: ARM\n  Model name: Cortex-A55\n  Model name: Cortex-A76\n", "A55 + A76"),
        (None, "machdep.cpu.brand_string: Apple M4 Pro\n", "Apple M4 Pro"),
    ],
)
def test_the_name_of_a_cpu(cpuinfo: str | None, printed: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against records in which all Macs are "arm", and a Raspberry Pi and a server "aarch64"."""

    def read_text(path: Path) -> str:
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(environment, "_printed", lambda *command: printed)
    assert environment.cpu_name().replace("Cortex-", "") == name


ITEMS = (WorkItem("0", "letters", ("abc",), raw=True),)
MIB = 2**20


def measured(folder: str, drafter: str, *methods: str) -> tuple[outpace.Model, dict[str, float]]:
    """A model that has raced methods, and the memory that was recorded of each."""
    model = outpace.load(folder, "plain", drafter=drafter, dtype="float32", device="cpu", max_num_seqs=1)
    records = BenchRun(model, BenchPlan(methods, ITEMS, SamplingParams(max_new_tokens=4))).records()
    return model, {record["method"]: record["memory_mb"] for record in records}


def test_plain_decoding_holds_no_drafter(tmp_path: Path) -> None:
    """Guards against memory of the whole process, in which every method's drafter is loaded before plain decodes."""
    folder, drafter = (str(save_tiny_model(tmp_path / name, eos_token_id=None)) for name in ("target", "drafter"))
    model, alone = measured(folder, drafter, "plain")
    assert alone["plain"] == held_mb(model.target, model.proposer("plain"))
    model, together = measured(folder, drafter, "linear", "recycle", "plain")
    assert together["plain"] == pytest.approx(alone["plain"], abs=0.01)
    matrix = matrix_of(model.proposer("recycle"))
    assert matrix is not None
    assert together["recycle"] - together["plain"] == pytest.approx(matrix.nbytes / MIB, abs=0.02)
    own = held_mb(model.drafters.language_model())
    assert own > 0.1
    assert together["linear"] - together["plain"] == pytest.approx(own, abs=0.02)


def test_stock_generate_holds_one_copy(folder: str) -> None:
    """Guards against the copy in higher precision, which classified a difference on the first prompt, in the memory of
    stock generate."""
    model = outpace.load(folder, "plain", dtype="float32", device="cpu", max_num_seqs=1)
    run = BenchRun(model, BenchPlan(("plain", "transformers"), ITEMS, SamplingParams(max_new_tokens=4)))
    own = held_mb(run._reference(model))
    run._references[0] = TransformersReference(folder, "float64", "cpu")
    assert run._memory("transformers") == pytest.approx(own)


def test_bytes_are_counted_once() -> None:
    """Guards against views that count again, packed weights and arrays that count nothing, and circles."""
    weight = torch.zeros(1024, 256)
    assert held_mb([weight, weight.T, weight[5:], nn.Parameter(weight)]) == pytest.approx(1.0, abs=0.001)
    assert held_mb(weight[5:]) == pytest.approx(1.0, abs=0.001)
    assert held_mb([weight, weight.numpy(), weight[5:].numpy()]) == pytest.approx(1.0, abs=0.001)
    if torch.backends.mkldnn.is_available():
        assert held_mb(PackedLinear(weight, None)) == pytest.approx(1.0, abs=0.01)
    assert held_mb({"ends": np.zeros(2**17)}) == pytest.approx(1.0, abs=0.001)
    assert held_mb([[0] * 2**17]) == pytest.approx(1.0, abs=0.001)
    circle: list[object] = [weight]
    circle.append(circle)
    assert held_mb(circle, weight) == pytest.approx(1.0, abs=0.001)
    assert held_mb(torch.empty(2**20, device="meta")) == 0.0


def test_an_installed_copy_is_of_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a drafter whose provenance is the commit of its user's own repository."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "own.py").write_text("")
    (tmp_path / "__init__.py").write_text("")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(tmp_path), "add", "own.py"], check=True)
    subprocess.run(["git", "-C", str(tmp_path), *author, "commit", "--quiet", "-m", "own"], check=True)
    monkeypatch.setattr(environment, "PACKAGE", tmp_path)
    assert environment.git("rev-parse", "HEAD") is None
    subprocess.run(["git", "-C", str(tmp_path), "add", "__init__.py"], check=True)
    assert len(environment.git("rev-parse", "HEAD") or "") == 40
    monkeypatch.setenv("PATH", "")
    assert environment.git("rev-parse", "HEAD") is None


def test_a_record_names_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a run without compiled kernels that is continued with them, as if both were one setting."""
    levels = []
    for switched in ("on", "off"):
        monkeypatch.setenv(VARIABLE, switched)
        levels.append(environment.environment(torch.device("cpu"), torch.float32)["cpu_kernels"])
    assert levels == [build().level or None, None]
