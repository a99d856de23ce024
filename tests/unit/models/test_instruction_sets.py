"""Lesser CPUs on the CPU that is there: libraries held to older instruction sets, each in a process of its own.

A name beyond what the CPU has holds it to nothing. `make test` as a whole passes under these too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import outpace
from outpace.kernels import build as compiled
from outpace.kernels.build import loaded_kernels
from outpace.kernels.instructions import has_tiles, multiplies_bfloat16
from outpace.models.layers.linear import can_pack
from outpace.models.loading import precision
from outpace.models.loading.load import load_target
from outpace.models.loading.precision import choose_dtype, choose_quantization, compute_dtype
from outpace.models.reference import TransformersReference
from outpace.train.run import training_precision
from tests.unit.models.at_instruction_set import FAMILIES, PARAMS, PROMPTS
from tests.unit.models.tiny import needs_kernels, save_tiny_model, tiny_config, tiny_target

CPU = torch.device("cpu")
WITHOUT_BFLOAT16 = ("AVX2", "AVX512_CORE", "AVX512_CORE_VNNI")
# ONEDNN_MAX_CPU_ISA, and ATEN_CPU_CAPABILITY where that is held down too. VNNI's are for 8 bits, which these models do
# not have, and what may use AMX is held down nowhere.
SETS = [
    ("AVX2", "default"),
    ("AVX2", "avx2"),
    ("AVX512_CORE", None),
    ("AVX512_CORE_BF16", None),
]


@pytest.mark.costly
@pytest.mark.parametrize(("allowed", "capability"), SETS)
def test_drafts_change_nothing_but_what_the_probe_says(allowed: str, capability: str | None) -> None:
    """Guards against a promise that held on the two machines where it was measured: without instructions for bfloat16
    its products of one row were summed otherwise than those of many."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": allowed}
    environment |= {} if capability is None else {"ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-m", "tests.unit.models.at_instruction_set"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(report["family"], report["asked"]) for report in reports] == [
        (family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")
    ]
    for report in reports:
        if report["kind"] == "bitwise":
            assert report["equal"] == len(PARAMS) * len(PROMPTS), report
        if allowed in WITHOUT_BFLOAT16:
            assert report["computed"] == "float32", report


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
@pytest.mark.parametrize("allowed", ["avx2", *WITHOUT_BFLOAT16])
def test_bfloat16_without_instructions_keeps_its_weights_and_computes_in_float32(
    allowed: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against bfloat16 made of other instructions, which is slow and depends on company, against weights that
    are not the rounded ones, against a yardstick of other weights, and against twice the bytes by default where
    kernels would read half of them."""
    folder = str(save_tiny_model(tmp_path / "m"))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv(variable, allowed)
    assert not multiplies_bfloat16()
    assert not can_pack(torch.bfloat16, CPU)
    assert choose_dtype("auto", CPU) == (torch.float32 if loaded_kernels() is None else torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(precision, "loaded_kernels", lambda: None)
        assert choose_dtype("auto", CPU) == torch.float32
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16
    target, _ = load_target(folder, "bfloat16", "cpu", None, 1)
    whole, _ = load_target(folder, "float32", "cpu", None, 1)
    assert (target.dtype, target.rounded_to, whole.rounded_to) == (torch.float32, torch.bfloat16, torch.float32)
    assert torch.equal(target.head.weight, whole.head.weight.bfloat16().float())
    assert not torch.equal(target.head.weight, whole.head.weight), "nothing was rounded"
    yardstick = TransformersReference(folder, "bfloat16", "cpu")._model
    assert yardstick.dtype == torch.float32
    assert torch.equal(yardstick.get_output_embeddings().weight, target.head.weight)
    model = outpace.load(folder, "plain", dtype="bfloat16", device="cpu")
    assert "float32, weights rounded to bfloat16, which this CPU has no instructions for" in model.exactness.reason


def test_halves_compute_as_the_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against float32 where bfloat16 has instructions or a GPU computes, and float16 left to stock layers."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr("outpace.kernels.instructions.architecture", lambda: "x86_64")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    assert multiplies_bfloat16()
    assert not has_tiles()
    if torch.backends.mkldnn.is_available():
        assert compute_dtype(torch.bfloat16, CPU) == choose_dtype("auto", CPU) == torch.bfloat16
    assert compute_dtype(torch.float16, CPU) == torch.float32
    assert compute_dtype(torch.float64, CPU) == torch.float64
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert compute_dtype(dtype, torch.device("cuda")) == dtype
        assert not can_pack(dtype, torch.device("cuda")), "oneDNN's products are for CPUs"


@needs_kernels
def test_kernels_do_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against kernels that a torch without oneDNN, as on macOS, leaves unused, formats that it refuses although
    the kernels have them, and a question to oneDNN that ends `outpace doctor`."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert tiny_target(tiny_config("llama")).compiled is not None
    assert choose_quantization("int8", torch.float32, CPU, is_gguf=False) == "int8"
    assert choose_quantization("auto", torch.float32, CPU, is_gguf=True) == "file"
    assert compute_dtype(torch.bfloat16, CPU) == torch.float32
    monkeypatch.setattr("outpace.kernels.instructions.architecture", lambda: "aarch64")
    assert not multiplies_bfloat16()
    monkeypatch.setenv(compiled.VARIABLE, "off")
    assert not can_pack(torch.float32, CPU)


def test_tiles_are_used_where_they_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against products cut for AMX where oneDNN must not use it, and whole ones where it does."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for allowed, expected in (("AVX512_CORE_AMX", True), ("", True), ("AVX512_CORE_BF16", False), ("AVX2", False)):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", allowed)
        assert has_tiles() is expected, allowed


def test_training_computes_in_what_the_hardware_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against training in bfloat16 made of other instructions, on CPUs where only our kernels read it."""
    monkeypatch.setattr(precision, "can_pack", lambda dtype, device: dtype == torch.float32)
    assert training_precision("auto", CPU) == "float32"
    monkeypatch.setattr(precision, "can_pack", lambda dtype, device: True)
    assert training_precision("auto", CPU) == "bfloat16"
    assert training_precision("float32", CPU) == "float32"
