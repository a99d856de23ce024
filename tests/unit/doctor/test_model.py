"""What passes cost and what they compute in: figures of tiny models, and verdicts on figures that are made up."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import outpace
from outpace.doctor import model as doctor
from outpace.doctor.finding import Finding
from outpace.doctor.model import MeasuredPasses, Precision
from outpace.models.exactness import Exactness
from tests.unit.models.tiny import needs_kernels, save_tiny_model, tiny_config, tiny_target

FEWER = "use a GGUF file or --quantize int4 (int8 stays closer to the full weights)"
BANDWIDTH = 20e9
TIMES = MeasuredPasses(one=10.0, many=16.0, weight_bytes=180_000_000)
ZEN = "flags : avx2 avx512f avx512_vnni avx512_bf16"


def test_passes_are_measured_and_leave_nothing_behind() -> None:
    """Guards against figures of something else than passes, and rows left in a slot that the next request begins in."""
    target = tiny_target(tiny_config("llama", intermediate_size=64), max_length=40)
    times = doctor.measured_passes(target, 1, seconds=0.02)
    assert 0 < times.one < 1e3
    assert 0 < times.many < 1e3
    assert target.kv.lengths[1] == 0
    layers = 3 * (48 * (48 + 16 + 16) + 48 * 48 + 3 * 48 * 64) + 48 * target.vocab_size
    assert layers * 4 <= times.weight_bytes <= layers * 4 * 2  # padded to whole panels


def test_a_mixtures_idle_experts_are_not_read() -> None:
    """Guards against a floor that counts experts which a row is not sent to."""
    target = tiny_target(tiny_config("qwen3_moe", mlp_only_layers=[]))
    chosen = [one for one in doctor.products_of_a_row(target) if one.outputs == 80]  # two projections of an expert
    assert len(chosen) == 3 * target.config.num_experts_per_tok


DEAR = replace(TIMES, many=40.0)


@pytest.mark.parametrize(
    ("found", "measured", "remedy"),
    [
        (doctor.reading(TIMES, BANDWIDTH, "do it"), "180 MB of weights are read in 9.0 ms", ""),
        (doctor.reading(replace(TIMES, one=40.0), BANDWIDTH, "do it"), "40.0 ms", "do it"),
        (doctor.reading(MeasuredPasses(1.0, 2.0, 1000), BANDWIDTH, "do it"), "", ""),
        (doctor.rows(TIMES, False, True), "1.6 times", ""),
        (doctor.rows(DEAR, False, True), "4.0 times", f"{FEWER}, or use smaller trees, as --budget 7"),
        (doctor.rows(DEAR, True, True), "", "use smaller trees"),
        (doctor.rows(DEAR, False, False), "", "use smaller trees"),
    ],
)
def test_verdicts_on_passes(found: Finding, measured: str, remedy: str) -> None:
    """Guards against a slow pass that is called fine, and small ones that nothing helps."""
    assert measured in found.measured
    assert found.remedy.startswith(remedy)
    assert found.is_fine is (not remedy)


@needs_kernels
def test_a_decoder_that_runs_by_its_modules() -> None:
    """Guards against a family beyond the kernels, several times as slow, that is not told apart."""
    for family, is_native in (("llama", True), ("gpt2", False)):
        target = tiny_target(tiny_config(family))
        said = doctor.one_call(target.computed_by, family, target.dtype)
        assert said.is_fine is is_native
    assert "runs in one call: Llama" in said.remedy
    assert doctor.pass_remedy(target, ["cores"]) == "see 'one call'"
    native = tiny_target(tiny_config("llama"))
    assert doctor.pass_remedy(native, ["other work"]) == "see 'other work' first"
    assert doctor.pass_remedy(native, []) == FEWER
    assert "float32" in doctor.one_call("Python, because of that", "llama", torch.float64).remedy


def test_without_kernels_everything_points_there(without_kernels: None) -> None:
    """Guards against advice that does not mend what is wrong first."""
    target = tiny_target(tiny_config("llama"))
    assert doctor.measured_passes(target, 0, seconds=0.02).weight_bytes > 0
    assert doctor.pass_remedy(target, ["cores"]) == "unset OUTPACE_KERNELS"
    assert doctor.one_call(target.computed_by, "llama", target.dtype).remedy == "unset OUTPACE_KERNELS"


USUAL = Precision(torch.bfloat16, torch.bfloat16, "none", "cpu", has_bfloat16=True, held_by="", has_kernels=True)
F32: dict[str, object] = {"stored": torch.float32, "computed": torch.float32}
WIDENED: dict[str, object] = {"computed": torch.float32, "has_bfloat16": False}


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, ""),
        ({"quantize": "int8"}, ""),
        (F32, f"use --dtype bfloat16, or {FEWER}: float32 reads"),
        (F32 | {"has_bfloat16": False}, f"use --dtype bfloat16, or {FEWER}: float32 reads"),
        (F32 | {"has_bfloat16": False, "has_kernels": False}, ""),
        (F32 | {"has_bfloat16": False, "held_by": "X"}, f"unset X, or {FEWER}: it hides"),
        ({"stored": torch.float16, "computed": torch.float32}, f"use --dtype auto, or {FEWER}: no CPU"),
        (WIDENED, ""),
        (WIDENED | {"held_by": "X"}, f"unset X, or {FEWER}: it hides"),
        (WIDENED | {"has_kernels": False}, "use --dtype float32, or see 'kernels'"),
        ({"stored": torch.float64, "computed": torch.float64}, "use --dtype auto: float64"),
        ({"stored": torch.float16, "computed": torch.float16, "device": "cuda"}, ""),
    ],
)
def test_a_dtype_without_instructions(changes: dict[str, object], remedy: str) -> None:
    """Guards against numbers that a CPU makes of other instructions, or reads twice the bytes for, without a word."""
    said = doctor.dtype(replace(USUAL, **changes))  # type: ignore[arg-type]
    assert said.remedy.startswith(remedy)
    assert said.is_fine is (not remedy)


@pytest.mark.parametrize("asked", ["bfloat16", "float16", "auto"])
def test_a_model_held_to_avx2(asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a doctor who does not see what the model was loaded in, nor which variable decided it."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(doctor, "cpu_flags", lambda: ZEN)
    model = outpace.load(str(save_tiny_model(tmp_path / "m")), "plain", dtype=asked, device="cpu")
    said = doctor.dtype(doctor.precision_of(model.target))
    assert not said.is_fine
    assert said.figures["computed"] == "float32"
    assert said.remedy.startswith("use --dtype auto" if asked == "float16" else "unset ONEDNN_MAX_CPU_ISA")


@pytest.mark.usefixtures("without_kernels")
def test_how_exact_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rounding without what makes it rarer, or the command that tells ties from bugs."""
    assert doctor.exactness(Exactness("bitwise", "all alike (bfloat16)"), "cpu").is_fine
    monkeypatch.delenv("MKL_CBWR", raising=False)
    on_gpu = doctor.exactness(Exactness("rounding", "kernels of a GPU (bfloat16)"), "cuda")
    assert "--dtype float32" in on_gpu.remedy
    assert "`outpace verify`" in on_gpu.remedy
    rounding = Exactness("rounding", "a product (float32)")
    assert doctor.exactness(rounding, "cpu").remedy.startswith("see 'kernels'")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert doctor.exactness(rounding, "cpu").remedy.startswith("unset MKL_CBWR")
