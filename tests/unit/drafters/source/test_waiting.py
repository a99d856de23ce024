"""Features of requests that nothing is drafted for: they wait, some at a time, and drafts are what they ever were."""

from typing import Any

import pytest
import torch

from outpace.core.drafting import Frontier
from outpace.core.protocols import NodeOutputs, Observation, PromptChunk, Verdict
from outpace.core.tree import DraftTree
from outpace.drafters import pairs
from outpace.drafters.dflash import source as block_context
from outpace.testing.toy import draft_request
from tests.unit.drafters.source.learned import proposer_of, source_of
from tests.unit.models.tiny import random_ids, tiny_config, tiny_target

ROUNDS, HIDDEN = 150, 48


def drafted(kind: str, budgets: list[int], rewound: int = 0) -> tuple[Any, list[Any], list[int]]:
    """The last tree after rounds that gain a token each, what is committed by then, and what waited in each round."""
    source = source_of(kind, tiny_target(tiny_config("llama")))
    proposer, ids = proposer_of("beam", source), random_ids(ROUNDS + 9, 3)
    state, generator, waited = proposer.open(0), torch.Generator().manual_seed(1), []
    width = len(source.needs.taps) * HIDDEN
    features = torch.randn(ROUNDS + 9, width, generator=generator)
    proposer.prefill([state], [PromptChunk(torch.tensor(ids[:8]), None, features[:8])])
    trees: list[DraftTree] = []
    for place, budget in enumerate(budgets, start=8):
        if rewound and place == 8 + rewound:
            proposer.rewind(state, place)
        trees = proposer.propose([state], [draft_request(ids[: place + 1], budget, 6 if budget else 0)])
        own = state.of_source  # type: ignore[attr-defined]
        waited.append(own.waiting_rows if hasattr(own, "waiting") else len(own.features))
        logits, verdict = torch.zeros(len(trees[0]), 4), Verdict((0,), ids[place + 1])
        rows = features[place].expand(len(trees[0]), -1)
        outputs = NodeOutputs(logits, torch.zeros(len(trees[0]), 1, dtype=torch.int64), logits[:, :1], rows)
        proposer.observe([state], [Observation(trees[0], verdict, outputs)])
    return trees[0].tokens.tolist(), [trees[0].topology.parents, source.slots.kv.lengths[0]], waited


def test_rows_that_wait_keep_no_others_alive() -> None:
    """Guards against the features of rejected nodes, many times as large, held for as long as the accepted one's."""
    source = source_of("dflash", tiny_target(tiny_config("llama")))
    state, tree = source.open(0), DraftTree.chain(torch.tensor([1, 2, 3, 4]))
    logits, features = torch.zeros(4, 8), torch.zeros(4, len(source.needs.taps) * HIDDEN)
    outputs = NodeOutputs(logits, torch.zeros(4, 1, dtype=torch.int64), logits[:, :1], features)
    source.observe([state], [Observation(tree, Verdict((0,), 5), outputs)])
    (rows,) = state.waiting
    assert rows.untyped_storage().nbytes() == rows.nbytes


@pytest.mark.parametrize("kind", ["eagle3", "dart"])
def test_features_wait_some_at_a_time_where_no_round_begins(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against features of a whole answer, copied in every round: the union leaves its draft out of rounds."""
    monkeypatch.setattr(pairs, "_WAITING", 16)
    source, ids = source_of(kind, tiny_target(tiny_config("llama"))), random_ids(60, 3)
    features = torch.randn(60, len(source.needs.taps) * HIDDEN, generator=torch.Generator().manual_seed(1))
    written = []
    for rounds in (True, False):
        state = source.open(0)
        count = 8 if rounds else 59
        source.prefill([state], [PromptChunk(torch.tensor(ids[:count]), None, features[:count])])
        for place in range(count, 59):
            tree, verdict = DraftTree.chain(torch.tensor(ids[place : place + 1])), Verdict((0,), ids[place + 1])
            outputs = NodeOutputs(torch.zeros(1, 4), torch.zeros(1, 1), torch.zeros(1, 1), features[place : place + 1])
            source.observe([state], [Observation(tree, verdict, outputs)])
            assert len(state.features) < 16
        source.begin([state], [draft_request(ids, 1, 1)])
        source.expand([state], Frontier(torch.tensor(ids[-1:]), [0], [-1]), 1)
        written.append(source.slots.kv.keys[:, 0, :, : source.slots.kv.lengths[0]].clone())
    torch.testing.assert_close(*written)


@pytest.mark.parametrize("kind", ["eagle3", "dart"])
def test_a_prompt_after_accepted_drafts_is_written_as_it_comes(kind: str) -> None:
    """Guards against a conversation's next prompt of which no pair is written before its first round, and then all in
    one pass, because drafts were accepted in the last round of the turn before."""
    source, ids = source_of(kind, tiny_target(tiny_config("llama"))), random_ids(60, 3)
    features = torch.randn(60, len(source.needs.taps) * HIDDEN, generator=torch.Generator().manual_seed(1))
    state = source.open(0)
    source.prefill([state], [PromptChunk(torch.tensor(ids[:20]), None, features[:20])])
    source.begin([state], [draft_request(ids[:21], 3, 3)])
    source.expand([state], Frontier(torch.tensor(ids[20:21]), [0], [-1]), 1)
    tree, verdict = DraftTree.chain(torch.tensor(ids[20:24])), Verdict((0, 1, 2, 3), ids[24])
    outputs = NodeOutputs(torch.zeros(4, 4), torch.zeros(4, 1), torch.zeros(4, 1), features[20:24])
    source.observe([state], [Observation(tree, verdict, outputs)])
    forked, fresh = source.fork(state, 1, 23), source.open(2)
    for chunk in (slice(23, 31), slice(31, 40)):
        source.prefill([forked], [PromptChunk(torch.tensor(ids[chunk]), None, features[chunk])])
        assert len(forked.features) == 1
    source.prefill([fresh], [PromptChunk(torch.tensor(ids[:40]), None, features[:40])])
    kv = source.slots.kv
    assert kv.lengths[1] == kv.lengths[2] == 39
    torch.testing.assert_close(kv.keys[:, 1, :, :39], kv.keys[:, 2, :, :39])
    assert (len(state.features), state.tokens) == (4, ids[21:24]), "what is forked is only read"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_waits_until_something_is_drafted_after_it(depth: int) -> None:
    """Guards against a drafter that reads the prompt for the last token of an answer, where it drafts nothing."""
    source = source_of("dflash", tiny_target(tiny_config("llama")))
    state, features = source.open(0), torch.zeros(8, len(source.needs.taps) * HIDDEN)
    source.prefill([state], [PromptChunk(torch.arange(8), None, features)])
    assert source.begin([state], [draft_request(range(9), 10, depth)]) == [depth]
    assert source.slots.kv.lengths[0] == (8 if depth else 0)


@pytest.mark.parametrize("rewound", [0, 100])
@pytest.mark.parametrize("kind", ["dflash", "domino", "eagle3", "dart"])
def test_drafts_behind_what_waited(kind: str, rewound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against features that are dropped, taken in twice or in another order while nothing is drafted."""
    for module in (block_context, pairs):
        monkeypatch.setattr(module, "_WAITING", 64)
    always, (shape, _), _ = drafted(kind, [10] * ROUNDS, rewound)
    rarely, (same, length), waited = drafted(kind, [0] * (ROUNDS - 3) + [10] * 3, rewound)
    assert len(rarely) > 1
    assert (rarely, same) == (always, shape)
    assert max(waited) <= 64
    assert waited[5] > 3, "each was taken in at once"
    assert length >= ROUNDS
