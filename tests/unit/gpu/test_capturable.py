"""What is captured, run where no tensor has any numbers: whatever the host reads of one, or copies to the device from
its own memory, would break a recording or freeze what it read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.cache.passes import Tables
from outpace.cache.slots import Segment
from outpace.drafters import net_slots
from outpace.drafters.dflash.source import BlockSource
from outpace.drafters.eagle3.source import EagleSource
from outpace.gpu.capture import Bucket
from outpace.models import attention
from outpace.models.attention import ATTENTION_NAME
from outpace.models.target import PackedTarget
from tests.unit.drafters.source.learned import source_of
from tests.unit.models.tiny import FAMILIES, stock_model, tiny_config

META = torch.device("meta")
READS = {"_local_scalar_dense", "is_nonzero", "equal", "lift_fresh"}
READS |= {"nonzero", "_unique2", "unique_dim", "masked_select"}  # whose sizes the host must know


class OnTheDevice(TorchDispatchMode):
    """Fails where the host reads a tensor, makes one of numbers of its own, or copies one to the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in READS, f"{name} waits for the device, or copies to it"
        result = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            assert source.device == result.device, f"{name} from {source.device} to {result.device}"
        return result


def attended(query: Tensor, *others: Any) -> Tensor:
    return query.transpose(0, 1).contiguous()  # kernels are Triton's, which read nothing


@pytest.fixture
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PackedTarget:
    for module in (attention, net_slots):
        monkeypatch.setattr(module, "attend_plan", attended)
    model = stock_model(tiny_config(request.param), ATTENTION_NAME).to("meta")  # type: ignore[arg-type]
    return PackedTarget(model, 64, 2, (), tiled=True)


def tables_of(kv: Any, count: int) -> tuple[Bucket, Tensor]:
    """A bucket and its buffer, of two requests."""
    segments = [Segment(kv, slot, slot * count, torch.arange(count)) for slot in range(2)]
    bucket = Bucket.of(Tables.of(segments))
    assert bucket is not None
    return bucket, torch.empty(bucket.size, dtype=torch.int32, device=META)


@pytest.mark.parametrize("target", [name for name in FAMILIES if name != "qwen3_moe"], indirect=True)
@torch.inference_mode()
def test_the_targets_pass(target: PackedTarget) -> None:
    """Guards against a family whose modules read a position, a length or a mask on the host, or bring constants."""
    bucket, buffer = tables_of(target.kv, 3)
    ids = torch.empty(bucket.rows, dtype=torch.int64, device=META)
    with OnTheDevice():
        hidden, _, _ = target._run_plan([bucket.plan(buffer)], ids, taps=(0, 2))
        outputs = target._head_outputs(hidden)
    assert [len(each) for each in outputs] == [bucket.rows] * 3


@pytest.mark.parametrize("target", ["llama"], indirect=True)
@pytest.mark.parametrize("kind", ["eagle3", "eagle3-ranked", "dflash", "dflash-sliding", "domino"])
@torch.inference_mode()
def test_passes_of_drafters(target: PackedTarget, kind: str) -> None:
    """Guards against nets whose levels and blocks wait for the device, as a mask or an angle made on the host does."""
    source: EagleSource | BlockSource = source_of(kind, target)
    bucket, buffer = tables_of(source.slots.kv, 3)
    rows = [torch.empty(bucket.rows, 48, device=META) for _ in range(2 if kind.startswith("eagle3") else 1)]
    with OnTheDevice():
        plans = [bucket.plan(buffer)] * (2 if "sliding" in kind else 1)
        *_, hidden = source._pass._tiled(plans, *rows)
        assert len(source._scores(hidden)) == bucket.rows


def test_the_guard_sees_reads_and_copies() -> None:
    """Guards against a test that sees nothing."""
    rows = torch.empty(3, device=META)
    faults: list[Callable[[], Tensor]] = [
        lambda: torch.tensor([1.0]), lambda: rows.nonzero(), lambda: torch.ones(3).to(META)
    ]  # fmt: skip
    for fault in faults:
        with pytest.raises((AssertionError, NotImplementedError)), OnTheDevice():
            fault()
