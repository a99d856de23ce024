"""DART's mask rows on slots, against one plain pass over the whole context."""

import torch

from outpace.core.drafting import Frontier
from outpace.core.protocols import PromptChunk
from outpace.drafters.dart.net import DartConfig, DartNet
from outpace.drafters.dart.source import DartSource
from outpace.testing.toy import draft_request
from tests.unit.drafters.net.small import causal
from tests.unit.drafters.source.learned import SIZES, random_net
from tests.unit.models.tiny import VOCAB, random_ids

IDS = random_ids(14, 8)
FEATURES = torch.randn(14, 3 * 48, generator=torch.Generator().manual_seed(4))


@torch.inference_mode()
def test_depths_come_from_the_last_pair_and_the_mask_rows_behind_it() -> None:
    """Guards against depths shifted by one, mask rows at wrong positions, and masks that stay in the slot."""
    net = random_net(DartNet(DartConfig(**SIZES, taps=(0, 1, 2), draft_vocab_size=VOCAB, draft_length=3)))
    table = torch.nn.Embedding(VOCAB, 48)
    source = DartSource(net, table, (0, 1, 2), 256, 2)
    state = source.open(0)
    source.prefill([state], [PromptChunk(torch.tensor(IDS[:5]), None, FEATURES[:5])])
    for end in (6, 7, 10, 14):  # rounds that accept none, two and three drafts
        source.begin([state], [draft_request(IDS[:end], 9, 9)])
        pairs = end - 1
        hidden = net(
            table(torch.tensor(IDS[1:end])),
            net.fuse(FEATURES[:pairs]),
            torch.arange(pairs),
            torch.arange(pairs, pairs + 3),
            torch.arange(pairs - 1, pairs + 3),
            causal,
        )
        expected = net.logits(hidden).log_softmax(dim=-1)
        tokens, above = torch.tensor(IDS[end - 1 : end]), -1
        for depth in range(4):
            found = source.expand([state], Frontier(tokens, [0], [above]), VOCAB)
            assert found.passes == (1 if depth == 0 else 0)
            assert found.log_probs is not None
            scores = torch.empty(VOCAB).scatter_(0, found.tokens[0], found.log_probs[0])
            torch.testing.assert_close(scores, expected[depth], atol=1e-3, rtol=1e-3)
            tokens, above = found.tokens[0, :1], 0
        following = {6: 7, 7: 10, 10: 14}.get(end)
        if following:
            source._keep(state, FEATURES[end - 1 : following - 1])
