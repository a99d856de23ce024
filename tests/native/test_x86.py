"""The kernels of this machine without Python, as compiled for it and for each level of x86 that it has."""

from pathlib import Path

import pytest

from outpace.kernels.build import build
from outpace.kernels.instructions import cpu_flags, has_tiles
from tests.native.libraries import compiler_named, driver_by, failures, kernels_by
from tests.unit.models.tiny import needs_kernels

LEVELS = {
    ("-march=x86-64",): "sse2",
    ("-march=x86-64-v3",): "avx2 fma f16c movbe",
    ("-march=x86-64-v3", "-mavxvnni"): "avx2 fma avx_vnni",
    ("-march=x86-64-v4",): "avx512f avx512bw avx512dq avx512vl",
    ("-march=x86-64-v4", "-mavx512vnni"): "avx512vl avx512_vnni",
    ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"): "avx512vl avx512_vnni avx512_bf16",
}
"""Flags, and what a processor must have."""


@needs_kernels
def test_this_machine(folder: Path, scripts: list[Path]) -> None:
    """Guards against a driver or a script that no longer fits the kernels: others run them where Python cannot."""
    fitting = [script for script in scripts if script.stem != "attention" or not has_tiles()]
    assert failures((), driver_by(compiler_named("g++"), folder), build().path, fitting) == []


@pytest.mark.thorough
@pytest.mark.parametrize("march", LEVELS, ids=" ".join)
def test_level(march: tuple[str, ...], folder: Path, scripts: list[Path]) -> None:
    """Guards against code for lower levels, which no test on a machine of a higher one runs."""
    if missing := set(LEVELS[march].split()) - set(cpu_flags().split()):
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    compiler = compiler_named("g++")
    assert failures((), driver_by(compiler, folder), kernels_by(compiler, march, folder), scripts) == []
