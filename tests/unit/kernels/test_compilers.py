"""Compilers against each other: the kernels of a level have the same bits, whoever compiled them."""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outpace.kernels import build as compiled
from outpace.kernels.blocks import FORMATS, BlockLinear
from outpace.kernels.build import Build
from outpace.kernels.formats import BlockFormat
from outpace.kernels.instructions import cpu_flags
from outpace.kernels.levels import FLAGS, LEVELS, SOURCES, InstructionLevel, architecture
from outpace.kernels.linear import KernelLinear, Kind
from outpace.kernels.quantize import quantize
from tests.unit.kernels.test_attention import DTYPES, TREE, WIDTHS, World
from tests.unit.kernels.test_blocks import random_weight
from tests.unit.kernels.test_quantize import BOUNDS
from tests.unit.kernels.test_reference import KERNELS
from tests.unit.models.tiny import drawn

OWN = [one for one in LEVELS if one.architecture == architecture() and one.needed <= set(cpu_flags().split())]
ROWS = (1, 2, 5, 8, 37)


def compilers(level: InstructionLevel) -> dict[str, list[str]]:
    """Those that are here, with their flags for a level."""
    found = {name: [path, *level.flags] for name in ("g++", "clang++") if (path := shutil.which(name))}
    if find_spec("ziglang") is not None:
        base, *added = level.flags
        cpu = base.removeprefix("-march=").replace("-", "_")
        features = [one.removeprefix("-m").replace("-", "_") for one in added]
        found["zig"] = [sys.executable, "-m", "ziglang", "c++", f"-mcpu={'+'.join((cpu, *features))}"]
    return found


def results(switch: pytest.MonkeyPatch) -> Iterator[tuple[str, Tensor]]:
    """What the kernels compute, kernel by kernel."""
    for name, (_, compare) in KERNELS.items():
        if not isinstance(compare, str):
            yield name, compare(switch)[0]
    for count in ROWS:
        for kind in Kind:
            layer = KernelLinear(drawn(70, 192, seed=1), drawn(70, seed=2), kind)
            yield f"{kind.name} of {count}", layer(drawn(count, 192, seed=3))
        for one in FORMATS:
            panels = BlockLinear([random_weight(one, 70, 3)], None, torch.float32)
            yield f"{one.name} of {count}", panels(drawn(count, panels.inputs, seed=4))
    for one in BOUNDS:
        rows = drawn(9, 512, seed=5).numpy().view("uint8")
        yield f"quantized to {one.name}", torch.from_numpy(quantize(rows, BlockFormat.F32, one))
    for dtype in DTYPES:
        for width, group in WIDTHS:
            world = World(width, group, dtype, 600)
            yield f"text in {dtype}, {width}", world.text(570)
            path = [*range(600), *(600 + node for node in TREE.path(12))]
            yield f"path in {dtype}, {width}", torch.stack([world.alone(path), world.alone(path, 100)])


@pytest.mark.slow
@pytest.mark.parametrize("level", OWN, ids=[one.name for one in OWN])
def test_compilers_give_the_same_bits(level: InstructionLevel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against tokens that depend on who compiled the kernels: a fused product, a sum in another order, and ties
    that a library sorts otherwise."""
    found = {}
    if len(compilers(level)) < 2:
        pytest.skip("one compiler alone")
    for name, command in compilers(level).items():
        path = tmp_path / f"{name}.so"
        subprocess.run([*command, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(path)], check=True)
        built = Build(ctypes.CDLL(str(path)), "", path)
        monkeypatch.setattr(compiled, "build", lambda built=built: built)
        with torch.inference_mode():
            found[name] = dict(results(monkeypatch))
    first, *others = found
    for other in others:
        differing = [name for name, own in found[first].items() if not torch.equal(own, found[other][name])]
        assert differing == [], f"{first} and {other} differ"
