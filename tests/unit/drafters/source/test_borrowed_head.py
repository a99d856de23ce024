"""Drafters without a head of their own score with the target's: its bias, its cap and its ids."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outpace.core.drafting import Frontier
from outpace.core.protocols import PromptChunk
from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.drafters.eagle3.source import EagleSource
from outpace.drafters.medusa.net import MedusaConfig, MedusaNet
from outpace.drafters.medusa.source import MedusaSource
from outpace.models.head import LmHead
from outpace.testing.toy import draft_request
from tests.unit.drafters.source.learned import SIZES, SUBSET, random_net
from tests.unit.models.tiny import VOCAB, random_ids

IDS = random_ids(9, 4)
FEATURES = torch.randn(9, 3 * 48, generator=torch.Generator().manual_seed(6))


Case = Callable[[LmHead, Tensor | None], tuple[Any, Tensor, list[Tensor]]]
"""A source, features of the prompt [9, *], and a list of the rows [1, H] that its head reads."""


def eagle_case(head: LmHead, vocabulary: Tensor | None) -> tuple[Any, Tensor, list[Tensor]]:
    net = random_net(Eagle3Net(Eagle3Config(**SIZES, taps=(0, 1, 2), draft_vocab_size=VOCAB, own_head=False)))
    table = torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(7))
    read: list[Tensor] = []
    net.norm.register_forward_hook(lambda module, given, out: read.append(out[-1:]))
    target: Any = SimpleNamespace(
        config=SimpleNamespace(num_hidden_layers=3), vocab_size=VOCAB, max_length=64, max_slots=2, head=head
    )
    target.embedding = table.__getitem__
    return EagleSource(net, target, vocabulary=vocabulary), FEATURES, read


def medusa_case(head: LmHead, vocabulary: Tensor | None) -> tuple[Any, Tensor, list[Tensor]]:
    net = random_net(MedusaNet(MedusaConfig(hidden_size=48, vocab_size=VOCAB, heads=2, head="target")))
    read: list[Tensor] = []
    net.heads[0].register_forward_hook(lambda module, given, out: read.append(out[-1:]))
    return MedusaSource(net, head, 3, vocabulary=vocabulary), FEATURES[:, :48], read


@pytest.mark.parametrize("vocabulary", [None, SUBSET], ids=["full", "restricted"])
@pytest.mark.parametrize("case", [eagle_case, medusa_case], ids=["eagle3", "medusa"])
@torch.inference_mode()
def test_a_borrowed_head_says_what_the_targets_says(case: Case, vocabulary: Tensor | None) -> None:
    """Guards against q without the cap on logits that p has (Gemma 2): the same row must get the same log-probs."""
    layer = nn.Linear(48, VOCAB, bias=False)
    layer.weight.copy_(torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(8)))
    head = LmHead(layer, softcap=3.0)
    source, features, read = case(head, vocabulary)
    state = source.open(0)
    source.prefill([state], [PromptChunk(torch.tensor(IDS[:-1]), None, features[:-1])])
    source.begin([state], [draft_request(IDS, 8, 4)])
    found = source.expand([state], Frontier(torch.tensor(IDS[-1:]), [0], [-1]), VOCAB)
    scores = torch.full((VOCAB,), -torch.inf).scatter_(0, found.tokens[0], found.log_probs[0])
    ids = torch.arange(VOCAB) if vocabulary is None else vocabulary
    raw = read[-1] @ layer.weight.T  # [1, V]
    expected = (torch.tanh(raw[0, ids] / 3.0) * 3.0).log_softmax(dim=-1)
    torch.testing.assert_close(scores[ids], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(scores[ids], head.scores(read[-1])[0, ids].log_softmax(dim=-1), atol=1e-4, rtol=0)
    assert (scores[ids] - raw[0, ids].log_softmax(dim=-1)).abs().max() > 1, "the case must tell the two apart"
    assert int(scores.isfinite().sum()) == len(ids)
