"""The compiled kernels: right, the same in any company and on any threads, and not missed where they are not."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outpace.kernels import build as compiled
from outpace.kernels.linear import KernelLinear, Kind
from outpace.kernels.topk import largest
from outpace.lib.errors import InvalidRequest
from outpace.models.exactness import probe
from outpace.models.head import LmHead
from outpace.models.layers.linear import frozen_layers
from outpace.models.loading.load import load_target
from outpace.models.loading.precision import choose_quantization
from tests.unit.models.tiny import FAMILIES, drawn, needs_kernels, open_with, save_tiny_model, tiny_config, tiny_target

CPU = torch.device("cpu")
SHAPES = [(33, 40), (100, 129), (160, 576)]
# What a product may be off by, of its largest number: roundings of rows and weights, not of sums.
ROUNDING = {Kind.FLOAT32: 1e-5, Kind.HALVES: 1e-5, Kind.BFLOAT16: 1e-2, Kind.WIDENED: 1e-2, Kind.INT8: 3e-2}
each_kind = pytest.mark.parametrize("kind", Kind)
each_shape = pytest.mark.parametrize(("outputs", "inputs"), SHAPES)


def weight_of(kind: Kind, outputs: int, inputs: int) -> Tensor:
    weight = drawn(outputs, inputs)
    if kind == Kind.HALVES:
        return weight.half()
    return weight.bfloat16() if kind in (Kind.BFLOAT16, Kind.WIDENED) else weight


def test_this_machine_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a build that fails in silence, with every other test here left out: where there is a compiler on
    Linux, there are kernels."""
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    has_compiler = sys.platform == "linux" and any(shutil.which(name) for name in compiled.COMPILERS)
    assert not has_compiler or compiled.loaded_kernels() is not None, compiled.why_none()


@needs_kernels
@each_kind
@each_shape
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_right(kind: Kind, outputs: int, inputs: int, bias: bool) -> None:
    """Guards against panels laid out wrongly, rests of rows or panels left out, and a bias added to another output."""
    weight, shift = weight_of(kind, outputs, inputs), drawn(outputs, seed=1) if bias else None
    layer, rows = KernelLinear(weight, shift, kind, torch.float32), drawn(19, inputs, seed=2)
    expected = torch.nn.functional.linear(
        rows.double(), weight.double(), None if shift is None else shift.double()
    )  # [R, out]
    assert float((layer(rows) - expected).abs().max() / expected.abs().max()) < ROUNDING[kind]


@needs_kernels
@each_kind
@each_shape
@pytest.mark.usefixtures("threads")
def test_a_row_has_its_bits_in_any_company(kind: Kind, outputs: int, inputs: int) -> None:
    """Guards against sums whose order follows the number of rows, of a row's place, or of threads."""
    layer, rows = KernelLinear(weight_of(kind, outputs, inputs), None, kind), drawn(37, inputs, seed=2)
    alone = torch.cat([layer(row[None]) for row in rows])
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for start, end in ((0, 37), (1, 9), (5, 22), (30, 37)):
            assert torch.equal(layer(rows[start:end]), alone[start:end])


@needs_kernels
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="this system has no large pages"
)
def test_weights_lie_in_large_pages() -> None:
    """Guards against products that wait for addresses of small pages, where large ones are given on request."""
    panels = KernelLinear(torch.zeros(2048, 2048), None, Kind.FLOAT32).panels
    middle = panels.data_ptr() + panels.nbytes // 2
    is_own = asked = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        place, _, rest = line.partition(" ")
        if not place.endswith(":"):
            first, _, end = place.partition("-")
            is_own = int(first, 16) <= middle < int(end, 16)
        elif place == "VmFlags:" and is_own:
            asked = "hg" in rest.split()
    assert asked


@needs_kernels
@each_kind
def test_a_row_with_nan_gives_no_number(kind: Kind) -> None:
    """Guards against NaN that is rounded to an integer: a target with such hidden states went on with wrong tokens
    instead of an error."""
    rows = drawn(4, 129, seed=2)
    rows[1, 0] = rows[3, 128] = torch.nan
    found = KernelLinear(weight_of(kind, 33, 129), None, kind, torch.float32)(rows)
    assert found.isnan().all(dim=1).tolist() == [False, True, False, True]


@needs_kernels
def test_sums_of_int8_are_whole_numbers() -> None:
    """Guards against sums that saturate, wrap or round: rows and weights that are whole numbers already, at the ends of
    their range, give the product of whole numbers to the last one."""
    inputs, generator = 1025, torch.Generator().manual_seed(0)  # odd, so that nothing is rotated
    weight, rows = (torch.randint(-127, 128, (35, inputs), generator=generator) for _ in range(2))
    for numbers in (weight, rows):
        numbers[:, 0] = 127  # the scale is then 1
        numbers[0], numbers[1] = 127, -127
    layer = KernelLinear(weight.float(), None, Kind.INT8)
    assert layer.matrix.block == 1
    assert torch.equal(layer(rows.float()).long(), rows @ weight.T)


@needs_kernels
def test_rotations_keep_outliers_from_costing_the_others() -> None:
    """Guards against inputs that are rotated otherwise than the weights, and against no rotation at all: one input of
    a hundred times the others' size costs eight-bit rows nearly all that the others have."""
    weight, rows = drawn(64, 512), drawn(8, 512, seed=1)
    rows[:, 7] *= 100
    expected = rows @ weight.T
    expected -= rows[:, 7, None] * weight[:, 7]  # what the others have
    layer = KernelLinear(weight, None, Kind.INT8)
    assert layer.matrix.block == 512
    found = layer(rows) - rows[:, 7, None] * weight[:, 7]
    without = (rows / (rows.abs().amax(-1, keepdim=True) / 127)).round() * rows.abs().amax(-1, keepdim=True) / 127
    unrotated = without @ weight.T - rows[:, 7, None] * weight[:, 7]
    assert float((found - expected).norm()) < 0.3 * float((unrotated - expected).norm())


@needs_kernels
@each_shape
@pytest.mark.parametrize("kind", [kind for kind in Kind if kind != Kind.INT8])
def test_what_was_packed_comes_back(kind: Kind, outputs: int, inputs: int) -> None:
    """Guards against weights that a drafter made of a target's layers would start from wrongly."""
    weight = weight_of(kind, outputs, inputs)
    assert torch.equal(KernelLinear(weight, None, kind).unpacked(), weight)


@needs_kernels
def test_quantised_weights_do_not_come_back() -> None:
    """Guards against rotated eight-bit numbers handed out as weights."""
    with pytest.raises(InvalidRequest, match="quantize='int8': the full weights are gone"):
        KernelLinear(drawn(8, 16), None, Kind.INT8).unpacked()


@needs_kernels
def test_the_largest_logits_come_in_order() -> None:
    """Guards against a search that drops equals, turns their order, or leaves out the ends of a row."""
    weight = drawn(203, 16)
    weight[50] = weight[7]
    weight[202] = 3 * weight[7]
    layer = torch.nn.Linear(16, 203, bias=False)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    head = LmHead(layer, make=frozen_layers(torch.float32))
    hidden = torch.cat([weight[7:8], drawn(4, 16, seed=1)])
    found = head(hidden)
    values, _ = found.logits.topk(16, dim=-1)
    assert torch.equal(found.top_logits, values)
    assert torch.equal(found.logits.gather(1, found.top_ids), values)
    assert found.top_ids[0, 0] == 202
    ranked = found.top_ids[0].tolist()
    assert ranked.index(50) == ranked.index(7) + 1, "the lower id first"


@needs_kernels
@pytest.mark.parametrize("place", [0, 3, 9, 100, 202])
def test_nan_comes_before_the_largest_logits(place: int) -> None:
    """Guards against NaN that nothing passes: behind one among the first ids, the largest logits were not found, and a
    target's answer went on with a wrong token instead of an error."""
    logits = drawn(1, 203)
    logits[0, place] = torch.nan
    values, ids = largest(logits, 8)
    expected = logits.topk(8)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(values, expected.values, atol=0, rtol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_model_says_in_trees_what_it_says_plainly(family: str) -> None:
    """Guards against eight-bit rows whose scale depends on company, in every family, by the probe that all models pass
    at load; and against families that leave the kernels without notice."""
    target = tiny_target(tiny_config(family), quantize="int8")
    exactness = probe(target)
    assert exactness.is_bitwise, exactness.reason
    assert (target.compiled is not None) == (family not in ("gpt2", "gpt_neox", "qwen3_moe"))


@needs_kernels
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.usefixtures("threads")
def test_threads_of_a_parent_are_not_waited_for() -> None:
    """Guards against a child process that waits for ever for threads that only its parent has."""
    layer, rows = KernelLinear(drawn(640, 64), None, Kind.FLOAT32), drawn(4, 64, seed=1)
    torch.set_num_threads(2)
    expected = layer(rows)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(layer(rows), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_without_a_compiler_models_run_and_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a machine without a compiler on which nothing loads, or int8 is asked for and something else is
    done."""
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    monkeypatch.setattr(compiled, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(compiled, "user_cache_path", lambda name: tmp_path)
    built = compiled.build.__wrapped__()
    assert built.handle is None
    assert "no C++ compiler (no-such-compiler) on the path" in built.reason
    monkeypatch.setattr(compiled, "build", lambda: built)
    folder = str(save_tiny_model(tmp_path / "m"))
    target, _ = load_target(folder, "float32", "cpu", None, 1)
    assert target.compiled is None
    _, last = open_with(target, range(1, 10))
    assert bool(last.logits.isfinite().all())
    with pytest.raises(InvalidRequest, match=r"quantize='int8': its kernels are not there: no C\+\+ compiler"):
        load_target(folder, "float32", "cpu", None, 1, quantize="int8")


@pytest.mark.parametrize(
    ("quantize", "dtype", "device", "reason"),
    [
        ("int3", torch.float32, CPU, "quantize='int3': use one of 'auto', 'file', 'none', 'int8', 'int4'"),
        ("int4", torch.float32, torch.device("cuda"), "quantize='int4': its kernels are for CPUs"),
        ("file", torch.float32, CPU, "quantize='file': is for a GGUF file"),
        ("int8", torch.float64, CPU, "quantize='int8': not with torch.float64"),
    ],
)
def test_other_quantisations_are_refused(quantize: str, dtype: torch.dtype, device: torch.device, reason: str) -> None:
    """Guards against a way to quantise that is silently another."""
    with pytest.raises(InvalidRequest, match=reason):
        choose_quantization(quantize, dtype, device, is_gguf=False)
