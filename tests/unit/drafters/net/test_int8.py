"""Drafters stored in 8 bits: codes of the int8 kernels, read without rounding again, and plain weights from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace.drafters.convert import convert
from outpace.drafters.load import load_net
from outpace.drafters.packing import pack_net
from outpace.kernels.linear import KernelLinear, Kind
from outpace.lib.checkpoint import WEIGHTS
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.int8 import SCALE, int8_of, quantized
from outpace.methods.stores import computed_by
from outpace.models.layers.linear import SiblingLinear
from outpace.models.loading.shipped import size_of
from tests.unit.api.shipment import load, ship
from tests.unit.drafters.source.learned import PROMPTS
from tests.unit.models.tiny import needs_kernels

KINDS = {"domino": None, "dflash": None, "eagle3": "speculators"}
"""Kinds of drafters, and their layouts: None for the first."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    ship(root)
    for kind, layout in KINDS.items():
        convert(str(root / "drafters" / "tiny" / kind), root / kind, layout, weights="int8")
    return root


@needs_kernels
@pytest.mark.parametrize("shape", [(64, 96), (100, 1536), (33, 40), (32, 8960), (32, 31)])
def test_codes_are_those_that_the_kernels_compute(shape: tuple[int, int]) -> None:
    """Guards against a file that drafts otherwise than the same weights rounded at load."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    computed = KernelLinear(weight, None, Kind.INT8)
    stored = KernelLinear(weight, None, Kind.BFLOAT16, int8=quantized(weight))
    assert torch.equal(computed.panels, stored.panels)
    assert torch.equal(computed.scales, stored.scales)  # type: ignore[arg-type]
    rows = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(2))
    assert torch.equal(computed.wide(rows), stored.wide(rows))
    error = quantized(weight).dequantized(torch.float32) - weight
    assert float(error.norm() / weight.norm()) < 0.012


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_net_multiplies_the_codes_of_its_file(root: Path, kind: str) -> None:
    """Guards against codes that are widened, cast and rounded a second time, and siblings joined without theirs."""
    plain, net = (load_net(str(folder)) for folder in (root / "drafters" / "tiny" / kind, root / kind))
    net = net.to(torch.float32)
    pack_net(net)
    name, attention = next((name, one) for name, one in net.named_modules() if name.endswith("self_attn"))
    assert isinstance(attention.q_proj, SiblingLinear)
    parts: list[Any] = [plain.get_submodule(f"{name}.{part}_proj").weight for part in "qkv"]
    expected = KernelLinear(torch.cat(parts), None, Kind.INT8)
    together = attention.q_proj.together
    assert isinstance(together, KernelLinear)
    assert together.kind == Kind.INT8
    assert torch.equal(together.panels, expected.panels)
    assert torch.equal(together.scales, expected.scales)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_in_8_bits_drafts(root: Path, kind: str) -> None:
    """Guards against answers that a rounded drafter changes, and one that computes in Python where its plain form is
    compiled."""
    folder = str(root / "home" / "models" / "tiny")
    drafters = root / kind, root / "drafters" / "tiny" / kind
    model, plain = (load(folder, kind, drafter=str(where)) for where in drafters)
    for prompt in PROMPTS:
        answer = model.generate(prompt, max_new_tokens=16, budget=4)
        assert answer.token_ids == model.generate(prompt, max_new_tokens=16, method="plain").token_ids
        assert answer.metrics.drafted > 0
    both = [one.proposer(kind) for one in (model, plain)]
    assert computed_by(both[0]) == computed_by(both[1])


@pytest.mark.parametrize("kind", KINDS)
def test_plain_weights_come_back(root: Path, kind: str, tmp_path: Path) -> None:
    """Guards against codes in a file for other engines, a size that is not smaller, and codes that are not counted."""
    source = root / "drafters" / "tiny" / kind
    done = convert(str(root / kind), tmp_path / "plain", KINDS[kind], dtype="bfloat16")
    assert done.is_equal
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config
    stored, found, before = (load_file(one / WEIGHTS) for one in (root / kind, tmp_path / "plain", source))
    codes = [name for name, tensor in stored.items() if tensor.dtype == torch.int8]
    assert codes
    for name in codes:
        expected = quantized(before[name])
        assert torch.equal(stored[name], expected.codes)
        assert torch.equal(found[name], expected.dequantized(torch.float32).bfloat16())
    assert not any(name.endswith(SCALE) or tensor.dtype == torch.int8 for name, tensor in found.items())
    assert size_of(root / kind).parameters == size_of(source).parameters
    assert size_of(root / kind).megabytes < 0.45 * size_of(source).megabytes, "these are in float32"
    net = load_net(str(root / kind))
    assert any(int8_of(weight) is not None for weight in net.parameters())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists what is mapped here")
def test_a_file_that_is_replaced_is_not_mapped(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `outpace convert --weights int8` that always fails on Windows, which replaces no mapped file."""
    stock = Path.replace

    def replace(self: Path, target: Path) -> Path:
        assert str(target) not in Path("/proc/self/maps").read_text()
        return stock(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    convert(str(root / "drafters" / "tiny" / "dflash"), tmp_path / "out", weights="int8")


def test_bad_files_are_refused(root: Path, tmp_path: Path) -> None:
    """Guards against codes that are taken for weights, or that get another row's scale."""
    with pytest.raises(InvalidRequest, match="weights='int5': choose one of plain, int8"):
        convert(str(root / "dflash"), tmp_path / "out", weights="int5")
    folder, name = tmp_path / "bad", "fc.weight"
    convert(str(root / "drafters" / "tiny" / "dflash"), folder, weights="int8")
    tensors = load_file(folder / WEIGHTS)
    scales = tensors.pop(name + SCALE)
    bad = {"missing": {}, "short": {name + SCALE: scales[1:]}, "half": {name + SCALE: scales.half()}}
    for changes in bad.values():
        save_file(tensors | changes, folder / WEIGHTS)
        with pytest.raises(ModelError, match=r"fc.weight is int8 and needs fc.weight_scale, a float32 for each row"):
            load_net(str(folder))
    save_file(tensors | {name + SCALE: scales, "other_scale": scales.clone()}, folder / WEIGHTS)
    with pytest.raises(ModelError, match="other_scale: scales without codes"):
        load_net(str(folder))
    scales[0] = torch.inf
    save_file(tensors | {name + SCALE: scales}, folder / WEIGHTS)
    with pytest.raises(ModelError, match=r"fc.weight_scale has values that are NaN or infinite"):
        load_net(str(folder))
