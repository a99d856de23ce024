"""The probe at load: right where rows keep their bits, and where anything of a pass does not."""

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outpace.models import attention
from outpace.models import exactness as exactness_module
from outpace.models.compiled_decoder import CompiledDecoder
from outpace.models.exactness import _ROWS, differing_products, probe
from outpace.models.head import LmHead
from outpace.models.layers.experts import PackedExperts
from outpace.models.layers.linear import PackedLinear, can_pack
from outpace.models.layers.prepare import RowwiseActivation
from outpace.models.loading.precision import compute_dtype
from tests.unit.models.tiny import FAMILIES, WINDOWS, needs_kernels, needs_onednn, tiny_config, tiny_target

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def rows_of(rows: Tensor) -> int:
    return rows.shape[:-1].numel()


def in_halves(layer: PackedLinear, rows: Tensor) -> Tensor:
    """The product summed in another order: the second half of the inputs first, in float32."""
    half = rows.shape[-1] // 2
    weight: Tensor = layer.packed.to_dense().float()
    total: Tensor = rows[..., half:].float() @ weight[:, half:].T + rows[..., :half].float() @ weight[:, :half].T
    if layer.bias is not None:
        total += layer.bias.float()
    return total.to(rows.dtype)


def shows(layer: PackedLinear, differs: Callable[[int], bool]) -> bool:
    """Whether a row alone and with others run in kernels of which one differs. On AMX one row is computed as two, and
    many rows in pieces, so that some kernels never run."""

    def sizes(count: int) -> list[int]:
        most = layer.most_rows or count
        pieces = [min(most, count - start) for start in range(0, count, most)]
        return [2 if size == 1 and layer.pads_single_rows else size for size in pieces]

    (alone,) = sizes(1)
    return any(differs(size) != differs(alone) for count in _ROWS for size in sizes(count))


def plant(patch: pytest.MonkeyPatch, holder: Any, name: str, differs: Callable[..., bool], steps: float = 8.0) -> None:
    """Make some results of a function larger, by a few of the least steps that their dtype can tell."""
    stock = getattr(holder, name)

    def planted(*args: Any) -> Tensor:
        result: Tensor = stock(*args)
        return result * (1 + steps * torch.finfo(result.dtype).eps) if differs(*args) else result

    patch.setattr(holder, name, planted)


@each_dtype
def test_a_probe_explains_its_result(dtype: str) -> None:
    """Guards against a probe that gives no reason or uses the target's slots. The contract tests probe all families."""
    target = tiny_target(tiny_config("llama"), DTYPES[dtype])
    exactness = probe(target)
    assert exactness.kind in ("bitwise", "rounding")
    assert exactness.milliseconds > 0
    assert str(target.dtype).removeprefix("torch.") in exactness.reason
    assert str(exactness).startswith(f"exactness: {exactness.kind} - every method's tokens are plain decoding's")
    assert str(exactness).endswith(f"; found at load: {exactness.reason}")
    assert "\n" not in str(exactness)
    assert not any(target.kv.lengths)


@needs_onednn
@pytest.mark.usefixtures("without_kernels")
@each_dtype
@pytest.mark.parametrize(
    "differs",
    [
        pytest.param(lambda count: count == 1, id="one row"),
        pytest.param(lambda count: count > 1, id="several rows"),
        pytest.param(lambda count: count >= 12, id="12 rows or more"),
        pytest.param(lambda count: count > 32, id="more than 32"),
        pytest.param(lambda count: count % 4 != 0, id="rows that fill no block of four"),
    ],
)
@torch.inference_mode()
def test_a_product_that_sums_in_another_order_is_caught(
    dtype: str, differs: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a probe that sees no planted kernel, in bfloat16 above all: there rounding hides all but one in
    thousands of such differences. Every shape is caught by itself."""
    kind = compute_dtype(DTYPES[dtype], CPU)
    generator = torch.Generator().manual_seed(3)
    layers = [
        PackedLinear(torch.randn(outputs, inputs, generator=generator).to(kind), None)
        for outputs, inputs in ((48, 40), (96, 48), (64, 1100))
    ]
    assert not list(differing_products(layers))
    stock = PackedLinear._multiply
    monkeypatch.setattr(
        PackedLinear,
        "_multiply",
        lambda self, rows: in_halves(self, rows) if differs(rows_of(rows)) else stock(self, rows),
    )
    for layer in layers:
        if shows(layer, differs):
            (fault,) = differing_products([layer])
            assert "sums otherwise" in fault
    target = tiny_target(tiny_config("llama"), DTYPES[dtype])
    packed = [layer for layer in target.decoder.modules() if isinstance(layer, PackedLinear)]
    if any(shows(layer, differs) for layer in packed):
        assert probe(target).kind == "rounding"


@needs_onednn
@each_dtype
@pytest.mark.parametrize(("outputs", "inputs"), [(80, 64), (960, 576), (576, 1536), (64, 1100)])
@torch.inference_mode()
def test_a_bias_of_zero_changes_no_bit(dtype: str, outputs: int, inputs: int) -> None:
    """Guards against a probe whose bias calls for other kernels than the layer's own, which has none."""
    kind = compute_dtype(DTYPES[dtype], CPU)
    generator = torch.Generator().manual_seed(inputs)
    layer = PackedLinear(torch.randn(outputs, inputs, generator=generator).to(kind), None)
    for count in (1, 2, 5, 17, 33, 64):
        rows = torch.randn(count, inputs, generator=generator).to(kind)
        layer.bias = None
        bare = layer(rows)
        layer.bias = torch.zeros(outputs)
        assert torch.equal(layer(rows), bare), count


@needs_onednn
@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(
    "differs",
    [
        pytest.param(lambda nodes, keys: nodes > 4 * 3, id="many rows"),
        pytest.param(lambda nodes, keys: keys % 48 in range(1, 12), id="a short last piece of keys"),
    ],
)
def test_differing_scores_are_caught(differs: Callable[[int, int], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a probe that looks at layers alone: attention multiplies too, and threads cut its products."""
    stock = attention.products

    def products(rows: Tensor, keys: Tensor, length: int) -> Tensor:
        half = rows.shape[-1] // 2
        if not differs(rows.shape[1], length):
            return stock(rows, keys, length)
        return stock(rows[..., half:], keys[..., half:], length) + stock(rows[..., :half], keys[..., :half], length)

    for module in (attention, exactness_module):
        monkeypatch.setattr(module, "products", products)
    exactness = probe(tiny_target(tiny_config("llama")))
    assert exactness.kind == "rounding"
    assert "scores" in exactness.reason


@needs_onednn
@pytest.mark.usefixtures("without_kernels")
@each_dtype
@pytest.mark.parametrize("module", [RowwiseActivation, LlamaRMSNorm])
def test_other_differing_operations_are_caught(module: type, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a probe of products alone: an activation that threads cut rounds otherwise, too."""
    plant(monkeypatch, module, "forward", lambda layer, rows: rows_of(rows) > 50, steps=1)
    exactness = probe(tiny_target(tiny_config("llama"), DTYPES[dtype]))
    assert exactness.kind == "rounding"
    assert "pass of 61 rows" in exactness.reason


@needs_onednn
@pytest.mark.usefixtures("without_kernels")
def test_a_fault_of_a_later_kind_of_layer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a probe of the first layer alone: in this model only the third one sees everything."""
    config = tiny_config("gemma3_text", **(WINDOWS["gemma3_text"] | {"sliding_window_pattern": 3}))
    target = tiny_target(config)
    assert exactness_module._until_every_kind(target.decoder) == 3
    assert exactness_module._until_every_kind(tiny_target(tiny_config("llama")).decoder) == 1
    plant(
        monkeypatch, attention, "reference_attention", lambda _, segment, how: how.window is None and segment.count > 1
    )
    assert "pass of 9 rows" in probe(target).reason


@needs_kernels
@each_dtype
@pytest.mark.parametrize(("rows", "reason"), [(2, "pass of 9 rows"), (10, "pass of 61 rows")])
def test_differing_kernels_are_caught(rows: int, reason: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against trust in compiled kernels: they are asked as all others are."""
    stock = CompiledDecoder.run

    def run(self: CompiledDecoder, ids: Tensor, *args: Any) -> Any:
        hidden, taps = stock(self, ids, *args)
        wrong = len(ids) >= rows and len(ids) not in (18, 16, 54)  # prompts are right
        return hidden * (1 + wrong * torch.finfo(hidden.dtype).eps), taps

    target = tiny_target(tiny_config("llama"), DTYPES[dtype])
    assert target.compiled is not None
    monkeypatch.setattr(CompiledDecoder, "run", run)
    assert reason in probe(target).reason


@needs_kernels
@each_dtype
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_of_compiled_kernels_are_bitwise(family: str, dtype: str) -> None:
    """Guards against kernels whose numbers depend on company: the contract's tests ask the probe first, and would call
    them rounding."""
    target = tiny_target(tiny_config(family), DTYPES[dtype])
    exactness = probe(target)
    assert exactness.is_bitwise or target.compiled is None, exactness.reason


def test_experts_that_are_summed_together_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a router or experts whose numbers follow how many neighbours chose the same."""
    plant(monkeypatch, PackedExperts, "forward", lambda layer, hidden, *args: len(hidden) > 1)
    assert probe(tiny_target(tiny_config("qwen3_moe"))).kind == "rounding"


def test_a_head_that_depends_on_company_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a probe that ends before the logits, whose cap is computed after the product."""
    plant(monkeypatch, LmHead, "_capped", lambda head, logits: len(logits) > 1)
    exactness = probe(tiny_target(tiny_config("llama")))
    assert exactness.kind == "rounding"
    assert "LM head" in exactness.reason


@needs_onednn
@pytest.mark.usefixtures("without_kernels")
def test_batches_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against attention whose bits depend on the other requests of a pass."""
    plant(monkeypatch, attention, "attend_segments", lambda query, segments, settings: len(segments) > 1)
    assert "batch" in probe(tiny_target(tiny_config("llama"))).reason


@pytest.mark.parametrize("limit", [1, 20])
def test_a_context_shorter_than_the_probes_is_enough(limit: int) -> None:
    """Guards against positions that a model has not, in a probe that is longer than any of its requests."""
    config = tiny_config("gpt2", max_position_embeddings=limit)
    assert probe(tiny_target(config, max_length=limit)).milliseconds > 0


def test_what_is_not_packed_is_not_called_exact() -> None:
    """Guards against a promise for stock layers, for float64, which has no packed ones, and for other devices."""
    config = tiny_config("llama")
    for target in (tiny_target(config, pack=False), tiny_target(config, torch.float64)):
        exactness = probe(target)
        assert (exactness.kind, exactness.milliseconds) == ("rounding", 0.0)
        assert "not packed" in exactness.reason
    half = torch.bfloat16
    on_gpu: Any = SimpleNamespace(tiled=True, exact=False, dtype=half, rounded_to=half)
    said = str(probe(on_gpu))
    assert said.startswith("exactness: rounding - ")
    assert "except where two tokens have almost the same score" in said
    assert "found at load: kernels of a GPU" in said


def test_rounded_weights_are_named_where_16_bits_have_no_instructions() -> None:
    """Guards against float32 in silence where another dtype was asked for."""
    exactness = probe(tiny_target(tiny_config("llama"), torch.float16))
    assert "float32, weights rounded to float16" in exactness.reason
    exactness = probe(tiny_target(tiny_config("llama"), torch.bfloat16))
    assert ("weights rounded to bfloat16" in exactness.reason) != can_pack(torch.bfloat16, CPU)


@needs_onednn
@pytest.mark.usefixtures("without_kernels")
@pytest.mark.thorough
def test_a_library_told_to_be_compatible_is_caught() -> None:
    """Guards against a probe that knows planted faults only: held to MKL_CBWR=COMPATIBLE, MKL's own products of
    attention depend on the number of rows (where it is MKL that computes them)."""
    script = (
        "from outpace.models.exactness import probe\n"
        "from tests.unit.models.tiny import tiny_config, tiny_target\n"
        "print(probe(tiny_target(tiny_config('llama'))).kind)"
    )
    environment = os.environ | {"MKL_CBWR": "COMPATIBLE"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split()[-1] == ("rounding" if torch.backends.mkl.is_available() else "bitwise")
