"""The kernels of ARM under qemu: right, and the same bits in any company, as its processors would compute them."""

import shutil
from pathlib import Path

import pytest

from outpace.kernels.levels import LEVELS
from tests.native.libraries import ARM_ROOT, compiler_named, driver_by, failures, kernels_by

pytestmark = pytest.mark.slow
GCC = "aarch64-linux-gnu-g++"


@pytest.mark.parametrize("compiler", [GCC, "aarch64-linux-gnu"])
@pytest.mark.parametrize(("name", "cpu"), [("neon", "cortex-a53"), ("dotprod", "neoverse-n1"), ("i8mm", "max")])
def test_arm(name: str, cpu: str, compiler: str, folder: Path, scripts: list[Path]) -> None:
    """Guards against wrong lanes, pairs of rows or outputs that change places, sums that overflow 16 bits where there
    is no dot product, an order of sums that follows the number of rows, and an instruction that the level lacks."""
    qemu = shutil.which("qemu-aarch64")
    if qemu is None:
        pytest.skip("needs qemu-aarch64 (`apt install qemu-user`)")
    if not ARM_ROOT.exists():
        pytest.skip("needs the C library of ARM (`apt install libstdc++6-arm64-cross`)")
    driver = driver_by(compiler_named(GCC), folder)
    (level,) = (one for one in LEVELS if one.name == name)
    library = kernels_by(compiler_named(compiler), level, folder)
    assert failures((qemu, "-L", str(ARM_ROOT), "-cpu", cpu), driver, library, scripts) == []
