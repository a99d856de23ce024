"""Medusa's alignment and its template."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from outpace.core.drafting import Frontier
from outpace.core.protocols import Chunk, PromptChunk
from outpace.drafters.medusa.net import MedusaConfig, MedusaNet
from outpace.drafters.medusa.source import MedusaSource
from outpace.models.head import LmHead
from outpace.testing.toy import draft_request
from outpace.trees.shapes.rank_paths import MEDUSA_NODES, MEDUSA_RANKS, MedusaTemplate, medusa_paths
from tests.unit.drafters.source.learned import random_net
from tests.unit.models.tiny import VOCAB, random_ids, tiny_config, tiny_target


@torch.inference_mode()
def test_head_k_guesses_depth_k_plus_one_from_what_the_lm_head_read() -> None:
    """Guards against heads off by one depth, and against a state of another position or before the final norm."""
    target = tiny_target(tiny_config("llama"))
    prompt = random_ids(12, 3)
    net = MedusaNet(MedusaConfig(hidden_size=48, vocab_size=VOCAB, heads=3))
    for weight in net.parameters():
        weight.zero_()
    for index, head in enumerate(net.heads):
        head.lm_head.weight.copy_(target.head.weight.roll(index, 0))  # type: ignore[operator, union-attr]
    source = MedusaSource(net, target.head, 3)
    (output,) = target.run_pass([Chunk(0, torch.tensor(prompt), False, True, source.needs.taps)], (), ())[0]
    assert output.last is not None
    state = source.open(0)
    source.prefill([state], [PromptChunk(torch.tensor(prompt), None, output.features)])
    pending = int(output.last.top_ids[0, 0])
    assert source.begin([state], [draft_request([*prompt, pending], 8, 9)]) == [3]
    tokens, drafted = torch.tensor([pending]), []
    for depth in range(3):
        found = source.expand([state], Frontier(tokens, [0], [-1 if depth == 0 else 0]), 1)
        tokens = found.tokens[0]
        drafted.append(int(tokens))
        assert found.passes == (1 if depth == 0 else 0)
    assert drafted == [(pending + depth) % VOCAB for depth in range(3)]
    source.rewind(state, 5)
    assert source.begin([state], [draft_request(prompt, 8, 9)]) == [0]


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_heads_with_vocabulary_layers_leave_the_targets_head_as_it_is(kind: Any) -> None:
    """Guards against a GGUF file's LM head that is dequantised, and kept so, to learn its device: 0.9 GB in float32 for
    152k ids and width 1536."""
    head = LmHead(nn.Linear(48, VOCAB, bias=False))
    net = random_net(MedusaNet(MedusaConfig(hidden_size=48, vocab_size=VOCAB, heads=2, head=kind)))
    MedusaSource(net, head, 3)
    assert "weight" not in vars(head)


@pytest.mark.parametrize("max_depth", [0, 1, 3, 5])
def test_the_template_is_nested_and_prefix_closed(max_depth: int) -> None:
    """Guards against a tree with orphans, beyond the heads there are, or of other size than the authors'."""
    before: list[tuple[int, ...]] = []
    for budget in (*range(12), MEDUSA_NODES):
        chosen = medusa_paths(budget, max_depth)
        assert chosen[: len(before)] == before
        assert all(not path[:-1] or path[:-1] in chosen for path in chosen)
        assert all(len(path) <= max_depth and max(path) < MEDUSA_RANKS for path in chosen)
        before = chosen
    full = min(MEDUSA_NODES, (0, MEDUSA_RANKS)[max_depth] if max_depth < 2 else MEDUSA_NODES)
    assert len(before) == full == len(MedusaTemplate().plan(MEDUSA_NODES, max_depth).topology) - 1
    if max_depth == 5:
        levels = Counter(len(path) for path in before)
        assert levels[1] >= levels[5]
        assert before[:2] == [(0,), (0, 0)]
