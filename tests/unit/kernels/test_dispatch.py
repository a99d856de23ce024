"""A compiled kernel runs for exactly the classes that it was written for; anything else runs its own Python."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.domino.net import DominoHead, DominoNet
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.fusion import FusionLayer
from outpace.drafters.packing import pack_net
from outpace.kernels.dispatch import COMPILED
from outpace.models.attention import ATTENTION_NAME
from outpace.models.compiled_decoder import CompiledDecoder
from outpace.models.target import PackedTarget
from tests.unit.drafters.source.learned import source_of
from tests.unit.drafters.source.test_domino_cost import propose
from tests.unit.models.tiny import needs_kernels, stock_model, tiny_config, tiny_target

pytestmark = needs_kernels
Change = Callable[[Any, pytest.MonkeyPatch], None]


class OtherHead(DominoHead):
    def step(self, state: Tensor, embeddings: Tensor) -> Tensor:
        return torch.ones_like(state)


class OtherDFlash(DFlashNet):
    def block(self, embeddings: Tensor, positions: Tensor, attend: Any) -> Tensor:
        return super().block(embeddings, positions, attend).flip(-1)


class OtherEagle(Eagle3Net):
    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        states, hidden = super().forward(*inputs)
        return states, hidden.flip(-1)


def head_class(net: DominoNet, patch: pytest.MonkeyPatch) -> None:
    net.head.__class__ = OtherHead


def head_method(net: DominoNet, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DominoHead, "step", lambda self, state, embeddings: torch.zeros_like(state))
    patch.setattr(DominoHead, "follow", lambda self, state, gates: torch.zeros_like(state))


def head_instance(net: DominoNet, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(net.head, "correction", lambda rows, state: net.head.vocabulary_weight.sum(1).expand(len(state), -1))


def edited_head(net: DominoNet, patch: pytest.MonkeyPatch) -> None:
    """The method as an edited source file would define it."""

    def step(self: DominoHead, state: Tensor, embeddings: Tensor) -> Tensor:
        return torch.zeros_like(state)

    step.__module__, step.__qualname__ = DominoHead.__module__, "DominoHead.step"
    patch.setattr(DominoHead, "step", step)


def block_class(net: DFlashNet, patch: pytest.MonkeyPatch) -> None:
    net.__class__ = OtherDFlash


def layer_hook(net: DFlashNet, patch: pytest.MonkeyPatch) -> None:
    next(iter(net.each_layer()))[1].mlp.register_forward_hook(lambda module, inputs, output: -output)


def layer_class(net: DFlashNet, patch: pytest.MonkeyPatch) -> None:
    class Negated(type(net.norm)):  # type: ignore[misc]
        def forward(self, rows: Tensor) -> Tensor:
            out: Tensor = super().forward(rows).flip(-1)
            return out

    net.norm.__class__ = Negated


def eagle_class(net: Eagle3Net, patch: pytest.MonkeyPatch) -> None:
    net.__class__ = OtherEagle


def eagle_layer(net: Eagle3Net, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FusionLayer, "finish", lambda self, rows: rows.flip(-1))


CHANGES: list[tuple[str, str, Change, str]] = [
    ("domino", "head", head_class, "OtherHead is none of the classes that the kernel computes: DominoHead"),
    ("domino", "head", head_method, "DominoHead.step was replaced"),
    ("domino", "head", head_instance, "DominoHead.correction was replaced on an instance"),
    ("domino", "head", edited_head, "the kernel computes other results than DominoHead.step"),
    ("dflash", "block", block_class, "OtherDFlash is none of the classes that the kernel computes"),
    ("dflash", "block", layer_hook, "a hook is registered on PlainMLP"),
    ("domino", "block", layer_class, "Negated is none of the classes that the kernel computes"),
    ("eagle3", "layer", eagle_class, "OtherEagle is none of the classes that the kernel computes"),
    ("eagle3", "layer", eagle_layer, "FusionLayer.finish was replaced"),
]


def drafted(kind: str, monkeypatch: pytest.MonkeyPatch, change: Change | None, kernels: str) -> tuple[Any, list[Any]]:
    """A source over a net that may be changed, and what it drafts."""

    def packed(net: nn.Module) -> None:
        pack_net(net)
        if change is not None:
            change(net, patch)

    with monkeypatch.context() as patch:
        patch.setenv("OUTPACE_KERNELS", kernels)
        patch.setattr("tests.unit.drafters.source.learned.pack_net", packed)
        source = source_of(kind, tiny_target(tiny_config("llama")), pack=True)
        trees = propose("beam", source, 3, temperature=0.0)
    return source, [(tree.topology.parents, tree.tokens.tolist()) for tree in trees]


@pytest.mark.parametrize(("kind", "part", "change", "reason"), CHANGES, ids=[each[2].__name__ for each in CHANGES])
def test_a_changed_net_drafts_by_its_own_python(
    kind: str, part: str, change: Change, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against kernels that silently ignore a subclass, a replaced method, a hook or edited source: the drafts
    are those of the changed Python, which differ from those of the kernel."""
    stock, of_kernel = drafted(kind, monkeypatch, None, "on")
    changed, found = drafted(kind, monkeypatch, change, "on")
    _, expected = drafted(kind, monkeypatch, change, "off")
    assert stock.computed_by[part] == COMPILED
    assert changed.computed_by[part].startswith(f"Python, because {reason}")
    assert found == expected
    assert found != of_kernel


def test_a_part_that_was_not_changed_stays_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a block without its kernel because the head has another class."""
    source, _ = drafted("domino", monkeypatch, head_class, "on")
    assert source.computed_by["block"] == COMPILED
    _, reason = drafted("domino", monkeypatch, None, "off")[0].computed_by["head"].split(", ", 1)
    assert reason == "because there are no compiled kernels: OUTPACE_KERNELS=off is set"


def test_a_head_that_corrects_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a kernel that is called wrong because both results are zero, as where training begins."""
    source, _ = drafted("domino", monkeypatch, lambda net, patch: net.head.vocabulary_weight.zero_(), "on")
    assert source.computed_by["head"] == COMPILED


@pytest.mark.parametrize(
    ("row", "factor", "is_compiled"),
    [(0, 1.4, True), (0, 0.0, False), (5, 3.0, False), (0, torch.nan, False), (5, torch.inf, False)],
)
def test_one_row_may_be_rounded_and_not_be_wrong(
    row: int, factor: float, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against SmolLM2 in Python, at 33 ms per token for 9.5, because the modules in bfloat16 round the huge
    activations of its first token more coarsely than kernels do; and against kernels that compute one row wrongly."""
    run = CompiledDecoder.run

    def off(self: CompiledDecoder, *inputs: Any) -> tuple[Tensor, dict[int, Tensor]]:
        hidden, taps = run(self, *inputs)
        taps[2][row] *= factor
        return hidden, taps

    monkeypatch.setattr(CompiledDecoder, "run", off)
    target = PackedTarget(stock_model(tiny_config("llama"), ATTENTION_NAME).bfloat16(), 256, 2, ())
    assert (target.compiled is not None) == is_compiled


def changed_target(change: str, monkeypatch: pytest.MonkeyPatch) -> PackedTarget:
    model: Any = stock_model(tiny_config("llama"), ATTENTION_NAME)
    layer = model.model.layers[1]
    own = type(layer).forward

    class Layer(type(layer)):  # type: ignore[misc]
        def forward(self, *inputs: Any, **options: Any) -> Any:
            Layer.calls += 1
            return super().forward(*inputs, **options)

    Layer.calls = 0
    if change == "subclass":
        layer.__class__ = Layer
    elif change == "method":
        monkeypatch.setattr(type(layer), "forward", lambda self, *inputs, **options: own(self, *inputs, **options))
    elif change == "instance":
        layer.forward = lambda *inputs, **options: own(layer, *inputs, **options)
    return PackedTarget(model, 256, 2, ())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("subclass", "Layer of tests.unit.kernels.test_dispatch is none of the classes that kernels compute"),
        ("method", "LlamaDecoderLayer.forward was replaced"),
        ("instance", "LlamaDecoderLayer.forward was replaced on an instance"),
    ],
    ids=["subclass", "method", "instance"],
)
def test_changed_layers_of_a_target_run(change: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a layer of the user's that computes the same numbers and is never called: the comparison at load
    cannot see it."""
    target = changed_target(change, monkeypatch)
    assert target.compiled is None
    assert "Python, because " in target.computed_by
    assert reason in target.computed_by
    stock = changed_target("none", monkeypatch) if change != "method" else None
    assert stock is None or stock.computed_by == COMPILED
