"""Whether two drafter nets say the same: in outputs for the same random inputs, in weights and in settings."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outpace.drafters.dart.net import DartNet
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.medusa.net import MedusaNet

ROWS = 7


@torch.inference_mode()
def largest_difference(net: nn.Module, other: nn.Module) -> float:
    """Largest difference between the outputs of two nets, in units of the largest output of the first.

    Args:
        net: any drafter net.
        other: a net of the same kind and sizes; DFlash's for a Domino net that lost its head.

    Returns:
        0.0 for equal bits; infinity where outputs are missing, of other shapes or not numbers.
    """
    found, again = (FORWARDS[type(one)](one, _Random(one)) for one in (net, other))
    if isinstance(net, DominoNet) and not isinstance(other, DominoNet):
        found = found[: len(again)]  # the head is what was taken off
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in again]:
        return float("inf")
    differences = [_relative(one.double(), two.double()) for one, two in zip(found, again, strict=True)]
    return max(differences, default=float("inf"))


def changed_weights(net: nn.Module, other: nn.Module) -> list[str]:
    """Weights and maps of the other net whose bits are not those of the first; rounding may hide one from a forward."""
    ours = net.state_dict()
    return [
        f"{name} has other values"
        for name, tensor in other.state_dict().items()
        if name not in ours or ours[name].dtype != tensor.dtype or not torch.equal(ours[name], tensor)
    ]


def changed_settings(net: nn.Module, other: nn.Module) -> list[str]:
    """Settings that both nets have and that differ: taps, mask tokens and block sizes move no weight, but decide.

    What the other's file does not say is no difference.
    """
    ours, theirs = _settings(net), _settings(other)
    return [
        f"{name}={theirs[name]!r} instead of {ours[name]!r}"
        for name in ours.keys() & theirs.keys()
        if theirs[name] is not None and theirs[name] != ours[name]
    ]


def _settings(net: nn.Module) -> dict[str, Any]:
    values: dict[str, Any] = net.config.model_dump()  # type: ignore[operator, union-attr]
    if values.get("layer_types") == ():
        values["layer_types"] = ("full_attention",) * values["layers"]
    return values


def _relative(found: Tensor, again: Tensor) -> float:
    if not bool(found.isfinite().all() & again.isfinite().all()):
        return float("inf")
    difference = float((found - again).abs().max())
    return difference / max(float(found.abs().max()), torch.finfo(torch.float64).tiny)


class _Random:
    """Rows of normal numbers, the same for every net of a dtype."""

    def __init__(self, net: nn.Module) -> None:
        self._dtype = next(net.parameters()).dtype
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64).to(self._dtype)


def _eagle3(net: Eagle3Net, random: _Random) -> list[Tensor]:
    config = net.config
    embeddings = random(ROWS, config.hidden_size)
    features = random(ROWS, config.tap_count * config.target_hidden_size)
    if net.embed_tokens is not None:
        embeddings = net.embed(torch.arange(ROWS) % config.vocab_size, embeddings)
    state, hidden = net(embeddings, net.fuse(features), torch.arange(ROWS), _causal)
    outputs = [state, hidden, net.target_ids(torch.arange(config.draft_vocab_size))]
    return outputs if net.lm_head is None else [*outputs, net.logits(hidden)]


def _dart(net: DartNet, random: _Random) -> list[Tensor]:
    config = net.config
    masks, wanted = ROWS + torch.arange(config.draft_length), torch.arange(ROWS + config.draft_length)
    embeddings = random(ROWS, config.hidden_size)
    features = random(ROWS, config.tap_count * config.target_hidden_size)
    hidden = net(embeddings, net.fuse(features), torch.arange(ROWS), masks, wanted, _causal)
    return [hidden, net.logits(hidden), net.target_ids(torch.arange(config.draft_vocab_size))]


def _medusa(net: MedusaNet, random: _Random) -> list[Tensor]:
    hidden = net(random(ROWS, net.config.hidden_size))
    outputs = [hidden, net.target_ids(torch.arange(net.config.draft_vocab_size))]
    return outputs if net.config.head == "target" else [*outputs, net.logits(hidden)]


def _dflash(net: DFlashNet, random: _Random) -> list[Tensor]:
    config = net.config
    features = random(ROWS, len(config.target_layer_ids) * config.target_hidden_size)
    context = net.context(features, torch.arange(ROWS))
    rows = random(config.block_size, config.hidden_size)
    positions = ROWS + torch.arange(config.block_size)
    seen = torch.arange(ROWS + config.block_size)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        visible = torch.ones(config.block_size, len(seen), dtype=torch.bool)
        if config.is_causal(layer):
            visible &= seen <= positions[:, None]
        if (window := config.window(layer)) is not None:
            visible &= seen > positions[:, None] - window
        before, values = context[layer]
        return _attention(query, torch.cat((before, key)), torch.cat((values, value)), visible)

    outputs = net.block(rows, positions, attend)
    return [*(tensor for pair in context for tensor in pair), outputs]


def _domino(net: DominoNet, random: _Random) -> list[Tensor]:
    backbone = _dflash(net, random)
    tokens = random(net.config.block_size, net.config.target_hidden_size)
    state = net.head.step(net.head.start(tokens), tokens.flip(0))
    return [*backbone, state, net.head.correction(backbone[-1], state)]


def _causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _attention(query, key, value, torch.ones(len(query), len(key), dtype=torch.bool).tril())


def _attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """[T, heads, D] of T rows over S ones, of which each sees those that are visible [T, S]."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))  # [1, heads, T or S, D]
    out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
    return out[0].transpose(0, 1)


FORWARDS: dict[type[nn.Module], Callable[[Any, _Random], list[Tensor]]] = {
    Eagle3Net: _eagle3,
    DartNet: _dart,
    MedusaNet: _medusa,
    DFlashNet: _dflash,
    DominoNet: _domino,
}
