"""Compilers against each other: the kernels of a level have the same bits under each of them."""

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

from outpace.cache.slots import AttentionSettings, Segment, SlotKV
from outpace.core.protocols import NodeOutputs
from outpace.core.tree import Topology
from outpace.kernels import build as compiled
from outpace.kernels.attention import attend
from outpace.kernels.blocks import FORMATS, BlockLinear
from outpace.kernels.build import Build
from outpace.kernels.draw import draw_natively
from outpace.kernels.instructions import cpu_flags
from outpace.kernels.levels import FLAGS, LEVELS, SOURCES, InstructionLevel, architecture
from outpace.kernels.linear import KernelLinear, Kind
from outpace.kernels.quantize import quantize
from outpace.kernels.topk import KeyedDraws, largest
from outpace.models.packed import PassPart
from outpace.sampling.noise import noise_key
from tests.unit.drafters.source.learned import source_of
from tests.unit.drafters.source.test_domino_cost import propose
from tests.unit.kernels.test_attention import DTYPES, TREE, WIDTHS, World
from tests.unit.kernels.test_blocks import random_weight
from tests.unit.kernels.test_quantize import BOUNDS
from tests.unit.models.tiny import drawn, random_ids, tiny_config, tiny_target

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


def attended() -> Tensor:
    """Rows of a tree, with a window and capped scores."""
    kv = SlotKV(1, 1, 2, 64, 8, torch.float32, torch.float32, torch.device("cpu"))
    kv.keys.copy_(drawn(*kv.keys.shape, seed=1))
    kv.values.copy_(drawn(*kv.values.shape, seed=2))
    kv.lengths[0] = 11
    tree = Topology.of((-1, 0, 0, 1))
    segments = [Segment(kv, 0, 0, tree.depth_tensor + 11, tree.ancestor_mask)]
    return attend(drawn(4, 4, 8, seed=3), segments, AttentionSettings(0, 0.3, 6, 2.0))


def whole_pass() -> Tensor:
    """Of a target with taps."""
    target = tiny_target(tiny_config("qwen3"))
    assert target.compiled is not None
    ids = torch.tensor(random_ids(9, seed=1))
    segments, _ = target._segments([PassPart.of(0, ids)])
    hidden, taps = target.compiled.run(ids, segments, (0, 2))
    return torch.stack([hidden, taps[0], taps[2]])


def drafted(kind: str) -> Tensor:
    source = source_of(kind, tiny_target(tiny_config("llama")), pack=True)
    trees = propose("beam", source, 3, temperature=0.0)
    return torch.cat([tree.scores for tree in trees if tree.scores is not None])


def best() -> Tensor:
    """The largest logits, and the largest scores under noise."""
    logits, keys = drawn(3, 99, seed=1), [noise_key(seed, 0, 5) for seed in range(3)]
    draws = KeyedDraws(keys, None, range(3), [0.7] * 3)
    found = [*largest(logits, 4), *largest(logits, 4, normalised=True, draws=draws)]
    return torch.stack([each.float() for each in found])


def drawn_tokens() -> Tensor:
    logits = drawn(6, 500, seed=1) * 2
    top = logits.topk(8)
    outputs = NodeOutputs(logits, top.indices, top.values)
    keys = [noise_key(seed, 0, 4) for seed in range(6)]
    return torch.tensor(draw_natively([(outputs, node) for node in range(6)], [0.8] * 6, keys))


def results() -> Iterator[tuple[str, Tensor]]:
    """What the kernels compute, kernel by kernel."""
    yield "attend", attended()
    yield "run", whole_pass()
    yield "context", drafted("dflash-sliding")
    yield "correct", drafted("domino")
    yield "top", best()
    yield "draw", drawn_tokens()
    for count in ROWS:
        for kind in Kind:
            layer = KernelLinear(drawn(70, 192, seed=1), drawn(70, seed=2), kind)
            yield f"{kind.name} of {count}", layer(drawn(count, 192, seed=3))
        for one in FORMATS:
            panels = BlockLinear([random_weight(one, 70, 3)], None, torch.float32)
            yield f"{one.name} of {count}", panels(drawn(count, panels.inputs, seed=4))
    for one in BOUNDS:
        yield f"quantized to {one.name}", torch.from_numpy(quantize(drawn(9, 512, seed=5).numpy(), one))
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
            found[name] = dict(results())
    first, *others = found
    for other in others:
        differing = [name for name, own in found[first].items() if not torch.equal(own, found[other][name])]
        assert differing == [], f"{first} and {other} differ"
