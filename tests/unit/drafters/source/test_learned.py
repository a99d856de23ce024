"""Learned drafters on tiny random nets: counted in passes, cached as if computed afresh.

That they change no answer is for `tests/lossless/test_matrix.py`.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core.drafting import Frontier
from outpace.core.params import SamplingParams
from outpace.core.protocols import Chunk, DraftRequest, PromptChunk
from outpace.core.tree import DraftTree, Topology
from outpace.drafters.build_context import BuildContext
from outpace.drafters.dart.source import DartSource
from outpace.drafters.eagle3.source import EagleSource
from outpace.drafters.medusa.source import MedusaSource
from outpace.engine.engine import Engine
from outpace.methods.catalog import build_proposer, parse_method
from outpace.models.target import PackedTarget
from outpace.testing import decode
from outpace.testing.toy import draft_request, no_draft_model
from outpace.trees.proposer import EmptyDraft, StaticProposer
from outpace.trees.shapes.rank_paths import Chain
from tests.unit.drafters.source.learned import KINDS, PROMPTS, SUBSET, proposer_of, source_of
from tests.unit.models.tiny import VOCAB, random_ids, tiny_config, tiny_target


def prefilled(source: Any, target: PackedTarget, slot: int, ids: Sequence[int]) -> Any:
    """A state that has seen all ids but the last."""
    state = source.open(slot)
    target.rewind_slot(slot, 0)
    (output,) = target.run_pass([Chunk(slot, torch.tensor(ids[:-1]), False, False, source.needs.taps)], (), ())[0]
    source.prefill([state], [PromptChunk(torch.tensor(ids[:-1]), None, output.features)])
    return state


class Led(StaticProposer):
    """Drafts as ever, and proposes what the target will say, behind a wrong token: random nets are never right."""

    answer: Sequence[int]

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        super().propose(states, requests)
        trees = []
        for request in requests:
            right = list(self.answer[len(request.ids) :][:3])
            tokens = [request.ids[-1], (right[0] + 1) % VOCAB, *right]
            trees.append(DraftTree(torch.tensor(tokens), Topology.of((-1, 0, 0, 2, 3)[: len(tokens)])))
        return trees


@pytest.mark.parametrize("is_led", [False, True], ids=["rejected", "accepted"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_after_many_rounds_are_those_of_a_fresh_start(kind: str, is_led: bool) -> None:
    """Guards against stale or shifted context: features of rejected nodes, or of others than the accepted path's."""
    target = tiny_target(tiny_config("llama"))
    source = source_of(kind, target)
    engine, proposer = Engine(target, prefill_chunk=8), proposer_of("dynatree", source)
    params = SamplingParams(max_new_tokens=70)
    if is_led:
        (plain,) = decode(Engine(target), [PROMPTS[1]], [params], [EmptyDraft()])
        proposer = Led(source, Chain(), 8, torch.device("cpu"))
        proposer.answer = plain.ids
    (session,) = engine.add(PROMPTS[1], params, proposer)
    for _ in range(16):
        engine.step()
    assert not is_led or session.metrics.accepted >= 30
    assert session.finish_reason is None
    ids, found = list(session.ids), []
    for state in (session.state.of_source, prefilled(source, target, 1, ids)):
        source.begin([state], [draft_request(ids, 20, 4)])
        root = source.expand([state], Frontier(torch.tensor(ids[-1:]), [0], [-1]), 3)
        below = source.expand([state], Frontier(root.tokens[0], [0] * 3, [0] * 3), 2)
        found.append(torch.cat([root.log_probs.flatten(), below.log_probs.flatten()]))  # type: ignore[union-attr]
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_in_a_batch_are_those_made_alone(kind: str) -> None:
    """Guards against rows of one request that see a neighbour's, or are read as a neighbour's: it costs only drafts."""
    target = tiny_target(tiny_config("llama"), max_slots=6)
    source = source_of(kind, target)
    alone, together = (
        [prefilled(source, target, first + at, ids) for at, ids in enumerate(PROMPTS)] for first in (0, 3)
    )
    found = []
    for state, ids in zip(alone, PROMPTS, strict=True):
        source.begin([state], [draft_request(ids, 20, 4)])
        root = source.expand([state], Frontier(torch.tensor(ids[-1:]), [0], [-1]), 3)
        below = source.expand([state], Frontier(root.tokens[0, :2], [0] * 2, [0] * 2), 3)
        found.append((root, below))
    source.begin(together, [draft_request(ids, 20, 4) for ids in PROMPTS])
    roots = source.expand(together, Frontier(torch.tensor([ids[-1] for ids in PROMPTS]), [0, 1, 2], [-1] * 3), 3)
    owners = [0, 0, 1, 1, 2, 2]
    below = source.expand(together, Frontier(roots.tokens[:, :2].flatten(), owners, owners), 3)
    for rows, place in ((roots, 0), (below, 1)):
        torch.testing.assert_close(rows.tokens, torch.cat([pair[place].tokens for pair in found]))
        alone_scores = torch.cat([pair[place].log_probs for pair in found])
        torch.testing.assert_close(rows.log_probs, alone_scores, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["medusa", "dflash", "domino-shifted", "dspark", "eagle3", "dart"])
def test_a_restricted_vocabulary_is_the_full_one_without_the_others(kind: str) -> None:
    """Guards against rows of a restricted head that stand for other ids, and corrections that miss them."""
    target = tiny_target(tiny_config("llama"))
    ids = PROMPTS[1]
    found: list[Tensor] = []
    subset = {"domino-shifted": "domino-subset", "dflash": "dflash-subset", "dspark": "dspark-subset"}.get(kind, kind)
    for name in (kind, subset):
        source = source_of(name, target)
        if kind == "medusa":  # the kinds differ in more than the subset
            source = MedusaSource(source.net, target.head, 3, vocabulary=SUBSET if found else None)
        if kind == "dart" and found:
            source = DartSource(source.net, target, vocabulary=SUBSET)
        if kind == "eagle3" and found:
            source = EagleSource(source.net, target, vocabulary=SUBSET)
        state = prefilled(source, target, 0, ids)
        source.begin([state], [draft_request(ids, 20, 4)])
        root = source.expand([state], Frontier(torch.tensor(ids[-1:]), [0], [-1]), VOCAB)
        below = source.expand([state], Frontier(torch.tensor([3, 6]), [0] * 2, [0] * 2), VOCAB)
        scores = torch.full((3, VOCAB), -torch.inf).scatter_(
            1, torch.cat([root.tokens, below.tokens]), torch.cat([root.log_probs, below.log_probs])
        )
        found.append(scores)
    full, restricted = found
    torch.testing.assert_close(restricted[:, SUBSET], full[:, SUBSET].log_softmax(dim=-1), atol=1e-3, rtol=1e-3)
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, SUBSET, False)
    assert bool(torch.isneginf(restricted[:, others]).all())


@pytest.mark.parametrize("kind", ["domino", "domino-shifted", "dspark"])
def test_a_pool_of_all_ids_is_the_full_correction(kind: str) -> None:
    """Guards against a pool that moves the wrong logits; a small pool still drafts."""
    target = tiny_target(tiny_config("llama"))
    answers = []
    for pool in (None, VOCAB, 10):
        proposer = proposer_of("fixed", source_of(kind, target, pool=pool))
        (session,) = decode(Engine(target), [PROMPTS[0]], [SamplingParams(max_new_tokens=30)], [proposer])
        answers.append((session.generated, session.metrics.accepted, session.metrics.steps))
    assert answers[0] == answers[1]
    assert answers[2][0] == answers[0][0]


@pytest.mark.parametrize("shape", ["template", "beam"])
@pytest.mark.parametrize("kind", ["dflash2", "lattice"])
def test_a_shape_may_ask_for_more_ids_than_the_head_scores(kind: str, shape: str) -> None:
    """Guards against a static tree whose ranks lie beyond the ids that a head of few ids scores: an IndexError."""
    target = tiny_target(tiny_config("llama"))
    source = source_of(kind, target)
    proposer = proposer_of(shape, source)
    (session,) = decode(Engine(target), [PROMPTS[0]], [SamplingParams(max_new_tokens=6)], [proposer])
    assert session.metrics.drafted > 0
    state = prefilled(source, target, 1, PROMPTS[1])
    source.begin([state], [draft_request(PROMPTS[1], 20, 4)])
    pending = Frontier(torch.tensor(PROMPTS[1][-1:]), [0], [-1])
    assert source.expand([state], pending, 9).tokens.shape == (1, 9)  # more than the 6 of its config


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_of_candidates_add_up_to_the_confidence(temperature: float) -> None:
    """Guards against a confidence head that is read and changes nothing, or of another token or depth."""
    target = tiny_target(tiny_config("llama"))
    source = source_of("dspark-confident", target)
    state = prefilled(source, target, 0, PROMPTS[1])
    source.begin([state], [draft_request(PROMPTS[1], 20, 4, temperature=temperature)])
    pending = torch.tensor(PROMPTS[1][-1:])
    levels = [Frontier(pending, [0], [-1]), Frontier(torch.tensor([3, 6]), [0] * 2, [0] * 2)]
    for depth, frontier in enumerate(levels):
        found = source.expand([state], frontier, VOCAB)
        hidden = state.hidden[depth].expand(len(frontier.tokens), -1)
        head = source.net.head
        confidence = head.confidence(head.predecessors[frontier.tokens], hidden).sigmoid()
        torch.testing.assert_close(found.log_probs.exp().sum(dim=1), confidence, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_go_on_in_their_slot(kind: str) -> None:
    """Guards against features that are missing or doubled where a conversation goes on."""
    target = tiny_target(tiny_config("llama"))
    source = source_of(kind, target)
    engine, proposer = Engine(target, prefill_chunk=8), proposer_of("beam", source)
    prompt = list(PROMPTS[1])
    for turn in range(3):
        params = SamplingParams(max_new_tokens=9 + turn)
        (session,) = engine.add(prompt, params, proposer)
        while session.finish_reason is None:
            engine.step()
        (plain,) = decode(Engine(target), [prompt], [params], [EmptyDraft()])
        assert session.generated == plain.generated
        assert session.metrics.drafted
        assert bool(session.metrics.reused_tokens) == bool(turn)
        prompt = [*session.ids, *random_ids(7, turn)]
    assert engine.free_slots == target.max_slots


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "dart"])
def test_a_context_longer_than_the_nets(kind: str) -> None:
    """Guards against positions that the net never learned, and against a request that fails when it grows past them."""
    target = tiny_target(tiny_config("llama"))
    source = source_of(kind, target)
    source._limit = 35
    proposer = proposer_of("chain", source)
    for prompt in (PROMPTS[1], random_ids(50, 9)):
        params = SamplingParams(max_new_tokens=20)
        (session,) = decode(Engine(target, prefill_chunk=8), [prompt], [params], [proposer])
        (plain,) = decode(Engine(target), [prompt], [params], [EmptyDraft()])
        assert session.generated == plain.generated
        assert (session.metrics.drafted > 0) == (len(prompt) < 35)


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "dart"])
def test_a_context_cut_back_below_the_nets_limit(kind: str) -> None:
    """Guards against features of later positions that take the place of those that were left out beyond the limit."""
    source = source_of(kind, tiny_target(tiny_config("llama")))
    source._limit = 35
    ids = torch.tensor(random_ids(46, 9))
    features = torch.randn(45, len(source.needs.taps) * 48)
    state = source.open(0)
    for chunk in (slice(0, 20), slice(20, 40), slice(40, 45)):
        source.prefill([state], [PromptChunk(ids[chunk], None, features[chunk])])
    source.rewind(state, 22)
    assert source.begin([state], [draft_request(ids[:23].tolist(), 4, 4)]) == [0]


@pytest.mark.parametrize("method", ["eagle3", "graft", "domino:shape=beam", "dflash:shape=beam", "lattice"])
def test_trees_have_seven_nodes_on_a_cpu(method: str) -> None:
    """Guards against the 15 nodes of before, which made these methods 1.2 to 1.4 times slower."""
    target = tiny_target(tiny_config("llama"))
    spec = parse_method(method)
    net = source_of(spec.drafter or "", target).net
    around = BuildContext(target.vocab_size, target.device, no_draft_model, target, lambda: net)
    assert build_proposer(spec, around).budget == 7
    assert build_proposer(parse_method(f"{method}{',' if ':' in method else ':'}budget=15"), around).budget == 15
