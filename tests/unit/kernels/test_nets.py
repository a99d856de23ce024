"""Drafter nets by the compiled kernels draft what their own modules do."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outpace.cache.slots import Rows
from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest
from outpace.core.tree import DraftTree
from outpace.drafters.dflash.kernel import CompiledBlock, compiled_block
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.domino.kernel import head_over
from outpace.drafters.eagle3.kernel import CompiledFusion
from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.drafters.net_slots import NetSlots, Sight
from outpace.drafters.packing import pack_net
from outpace.engine.engine import Engine
from outpace.kernels.domino_head import HeadRows
from outpace.kernels.topk import KeyedDraws
from outpace.models.layers.linear import SIBLINGS, frozen_layers, pack_linears
from outpace.sampling.noise import gumbel, noise_key
from outpace.testing import decode
from tests.unit.drafters.net.block_nets import small_domino
from tests.unit.drafters.source.learned import KINDS, PROMPTS, SIZES, proposer_of, random_net, source_of
from tests.unit.engine.doubles import heard
from tests.unit.models.tiny import drawn, needs_kernels, tiny_config, tiny_target

pytestmark = needs_kernels
DRAFTERS = [kind for kind in KINDS if kind.startswith(("dflash", "domino", "eagle3"))]


def assert_close(have: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(have, want, atol=2e-4, rtol=2e-4)


def slots_of(config: Any) -> NetSlots:
    sizes = {"kv_heads": config.kv_heads, "head_dim": config.head_dim, "capacity": 64}
    return NetSlots(config.layers, 2, dtype=torch.float32, device=torch.device("cpu"), **sizes)


def write_context(net: DFlashNet, slots: NetSlots, features: Tensor, parts: Sequence[Rows]) -> None:
    """A context by the net's own modules, as `CompiledBlock.absorb`."""
    sizes = [part.count for part in parts]
    layers = [
        list(zip(keys.split(sizes), values.split(sizes), strict=True))
        for keys, values in net.context(net.fuse(features), slots.positions(parts))
    ]
    for index, part in enumerate(parts):
        slots.append(part.slot, [layer[index] for layer in layers])


@pytest.mark.parametrize("kind", ["dflash", "dflash-sliding"])
def test_blocks(kind: str) -> None:
    """Guards against keys of the context that are normed or turned otherwise than a block's, layers that see the rest
    of a block where they are causal, windows, and requests of a batch that read each other's context."""
    net = source_of(kind, tiny_target(tiny_config("llama"))).net
    expected, found = slots_of(net.config), slots_of(net.config)
    sights = [Sight(net.config.window(layer), net.config.is_causal(layer)) for layer in range(net.config.layers)]
    contexts = [[Rows(0, torch.arange(7)), Rows(1, torch.arange(3))], [Rows(1, torch.arange(4))]]
    blocks = [Rows(0, torch.arange(6)), Rows(1, torch.arange(6))]
    with torch.inference_mode():
        for step, parts in enumerate(contexts):
            write_context(net, expected, drawn(sum(part.count for part in parts), 96, seed=step), parts)
        rows = drawn(12, 48, seed=9)
        want = net.block(rows, expected.positions(blocks), expected.attention(blocks, sights))
        pack_net(net)
        compiled = CompiledBlock(net, found)
        for step, parts in enumerate(contexts):
            compiled.absorb(drawn(sum(part.count for part in parts), 96, seed=step), parts)
        have = compiled.block(rows, blocks)
    assert found.kv.lengths == expected.kv.lengths == [7, 7]
    assert_close(have, want)


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_fusion(norm_output: bool, norm_before_residual: bool, qk_norm: bool) -> None:
    """Guards against EAGLE-3's variants left out: which rows attention is added to, and which state the next step gets;
    and against levels of a tree that see more than their ancestors."""
    variant = {"norm_output": norm_output, "norm_before_residual": norm_before_residual, "qk_norm": qk_norm}
    net = random_net(Eagle3Net(Eagle3Config(**{**SIZES, **variant}, taps=(0,), draft_vocab_size=SIZES["vocab_size"])))
    expected, found = slots_of(net.config), slots_of(net.config)
    chain = Rows(1, torch.arange(5), torch.ones(5, 5, dtype=torch.bool).tril())
    level = Rows(1, torch.tensor([0, 0]), torch.eye(2, dtype=torch.bool))
    below = Rows(1, torch.tensor([0, 0, 1, 1]), torch.tensor([[1, 0, 1, 0], [1, 0, 0, 1]], dtype=torch.bool), 2)
    passes = [(chain, drawn(5, 48, seed=1), drawn(5, 48, seed=2)), (level, *drawn(2, 2, 48, seed=3).unbind())]
    passes.append((below, *drawn(2, 2, 48, seed=4).unbind()))
    with torch.inference_mode():
        wanted = [
            net(rows, states, expected.positions([part]), expected.attention([part]))
            for part, rows, states in _committing(passes, expected)
        ]
        pack_linears(net, SIBLINGS, kept=("lm_head",), make=frozen_layers(torch.float32))
        compiled = CompiledFusion(net, found)
        have = [compiled.run(rows, states, [part]) for part, rows, states in _committing(passes, found)]
    for own, want in zip(have, wanted, strict=True):
        for left, right in zip(own, want, strict=True):
            assert_close(left, right)


def _committing(passes: Sequence[Any], slots: NetSlots) -> Any:
    """The passes; behind the first one its rows are committed."""
    for number, one in enumerate(passes):
        yield one
        if number == 0:
            slots.kv.commit([one[0].slot], [range(one[0].count)])


@pytest.mark.parametrize("is_corrected", [False, True])
def test_head(is_corrected: bool) -> None:
    """Guards against gates in another order, a correction where base logits are to stay, parents' states mixed up, and
    best ids that are not those of the logits, and noise of another row's draw or where there is none."""
    net = source_of("domino", tiny_target(tiny_config("llama"))).net
    head, ids = net.head, torch.arange(5, 60)
    states, hidden, base = drawn(3, 12, seed=1), drawn(4, 48, seed=2), drawn(2, 55, seed=3)
    embeddings, parents = drawn(5, 48, seed=4), [2, 0, 0, 1, 2]
    with torch.inference_mode():
        after = head.step(states[parents], embeddings)
        want = base[[0, 0, 1, 1, 1]]
        if is_corrected:
            want = want + head.correction(hidden[[3, 3, 1, 1, 1]], after)[:, ids]
        weight = head.vocabulary_weight[ids]
        pack_net(net)
        compiled = head_over(head, frozen_layers(torch.float32)(weight, None))
        outputs = [(hidden, [3, 3]), (hidden, [1] * 3)] if is_corrected else None
        rows = HeadRows(embeddings, [(states, parents)], outputs, [(base, [0, 0]), (base, [1] * 3)])
        whole, best = compiled.correct(rows, None), compiled.correct(rows, 4)
    assert_close(whole.states, after)
    assert whole.logits is not None
    assert best.log_probs is not None
    assert_close(whole.logits, want)
    top = torch.log_softmax(whole.logits, dim=-1).topk(4)
    torch.testing.assert_close(best.log_probs, top.values, atol=1e-5, rtol=1e-5)
    assert torch.equal(best.columns, top.indices)  # type: ignore[arg-type]
    assert torch.equal(best.states, whole.states)
    keys, warmth = [noise_key(1, 0, 9), noise_key(2, 0, 9)], [0.7, 0.7, 0.0, 1.0, 1.0]
    draws = KeyedDraws(keys, [ids, ids], [0, 0, -1, 1, 1], warmth)
    with torch.inference_mode():
        heard = compiled.correct(dataclasses.replace(rows, draws=draws), 4)
    noise, cold = gumbel(keys, ids)[[0, 0, 0, 1, 1]], torch.tensor(warmth)[:, None] == 0
    scores = torch.where(cold, whole.logits, whole.logits / torch.tensor(warmth)[:, None].clamp(min=0.1) + noise)
    top = torch.log_softmax(scores, dim=-1).topk(4)
    assert heard.log_probs is not None
    torch.testing.assert_close(heard.log_probs, top.values, atol=2e-5, rtol=1e-5)
    assert torch.equal(heard.columns, top.indices)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_trees(kind: str, temperature: float) -> None:
    """Guards against a source that drafts something else once its net runs on the kernels: rows of another depth or
    request, ids of another vocabulary, scores without the noise of sampled requests."""
    target = tiny_target(tiny_config("llama"))
    drafted = []
    for pack in (False, True):
        source = source_of(kind, target, pack=pack)
        has_kernel = pack and not kind.startswith("dflash2")  # whose convolutions no kernel computes
        assert (source._compiled is not None) == has_kernel
        trees: list[list[int]] = []

        def hear(request: DraftRequest, tree: DraftTree, trees: list[list[int]] = trees) -> None:
            trees.append(tree.tokens.tolist())

        proposer = heard(proposer_of("beam", source), hear)
        params = [SamplingParams(max_new_tokens=12, temperature=temperature, seed=seed) for seed in range(len(PROMPTS))]
        sessions = decode(Engine(target), PROMPTS, params, [proposer] * len(PROMPTS))
        drafted.append((trees, [session.ids for session in sessions]))
    assert drafted[0] == drafted[1]


def test_a_net_of_another_layout_keeps_its_modules() -> None:
    """Guards against keys read from the middle of a panel: six heads of eight end where no panel begins."""
    sizes = {**SIZES, "heads": 6, "kv_heads": 2, "layers": 1, "target_layers": 3, "block_size": 4}
    source = source_of("dflash", tiny_target(tiny_config("llama")))
    config = source.net.config.model_copy(update={key: sizes[key] for key in ("heads", "kv_heads", "layers")})
    net: nn.Module = random_net(DFlashNet(config.model_copy(update={"layer_types": ()})))
    pack_net(net)
    block, path = compiled_block(net, slots_of(config))  # type: ignore[arg-type]
    assert block is None
    assert path == "Python, because heads=6 times head_dim=8 is not a multiple of 32"


def test_a_head_whose_rank_is_its_largest_size() -> None:
    """Guards against rows that are written behind their memory, and into that of their neighbours' threads."""
    net = small_domino(torch.float32, emb_dim=320)
    config, count = net.config, 37
    head, ids = net.head, torch.arange(config.vocab_size)
    states, hidden = drawn(count, config.gru_hidden_dim, seed=1), drawn(count, config.hidden_size, seed=2)
    base, embeddings = drawn(count, len(ids), seed=3), drawn(count, config.target_hidden_size, seed=4)
    rows = list(range(count))
    with torch.inference_mode():
        after = head.step(states, embeddings)
        want = base + head.correction(hidden, after)
        weight = head.vocabulary_weight[ids]
        pack_net(net)
        compiled = head_over(head, frozen_layers(torch.float32)(weight, None))
        found = compiled.correct(HeadRows(embeddings, [(states, rows)], [(hidden, rows)], [(base, rows)]), None)
    assert found.logits is not None
    assert_close(found.logits, want)
