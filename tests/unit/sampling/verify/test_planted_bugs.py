"""Planted bugs: each must be caught by the very check that guards against it, which shows that the check has power."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import NodeOutputs, Proposer, Stream
from outpace.core.tree import DraftTree, Topology
from outpace.engine import round as engine_round
from outpace.engine.engine import Engine
from outpace.sampling import draw as draw_module
from outpace.sampling.draw import BatchDraw, RejectionDraw, rejection
from outpace.sampling.noise import Purpose
from outpace.sampling.warp import History, history_of, warp
from outpace.testing import AdversaryDrafter, ToyTarget, assert_lossless
from tests.statistics import chi_square_p
from tests.unit.sampling.verify.enumeration import (
    PENALISED,
    START,
    Conditional,
    Ids,
    Oracle,
    chosen_tree,
    joint_distribution,
    match_round,
    plain_distribution,
    random_topology,
    rejection_round,
    sampled_tree,
    total_variation,
    toy_distribution,
)

Verify = Callable[[DraftTree, Ids, Conditional, Oracle], Ids]

PROMPTS = [[1, 2], [3], [5, 0, 4, 4], [7, 1, 6]]
SAMPLED = [SamplingParams(max_new_tokens=24, temperature=1.0, seed=seed) for seed in range(4)]
NARROWED = [SamplingParams(max_new_tokens=24, temperature=1.0, top_k=2, seed=seed) for seed in range(4)]
GREEDY = [SamplingParams(max_new_tokens=24, seed=0)] * 4


def check_lossless(target_type: type[ToyTarget], params: Sequence[SamplingParams]) -> None:
    def make_proposer(sequences: list[list[int]]) -> Proposer:
        return AdversaryDrafter(8, sequences, seed=1)

    assert_lossless(lambda: Engine(target_type()), make_proposer, PROMPTS, params)


class PositionsByIndex(ToyTarget):
    """Planted: a node stands at committed length + its index, which is right on chains alone."""

    def node_logits(self, slot: int, tree: DraftTree, node: int) -> Tensor:
        ids = self.committed[slot] + tree.tokens[list(tree.topology.path(node))].tolist()
        return self.logits(ids, len(self.committed[slot]) + node + 1)


class CommitsByIndex(ToyTarget):
    """Planted: as many rows as were accepted are kept, but the first ones, not those on the path."""

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        super().commit(slots, [range(len(path)) for path in paths])


class ForgetsRollback(ToyTarget):
    """Planted: rejected rows stay behind the accepted ones."""

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        super().commit(slots, [range(len(self._passes[slot])) for slot in slots])


class SeesSiblings(ToyTarget):
    """Planted: a node's context is the row before it, an ancestor or not: a causal mask on a tree."""

    def node_logits(self, slot: int, tree: DraftTree, node: int) -> Tensor:
        ids = self.committed[slot] + tree.tokens[: node + 1].tolist()
        return self.logits(ids, len(self.committed[slot]) + tree.topology.depths[node] + 1)


@pytest.mark.parametrize("bugged", [PositionsByIndex, CommitsByIndex, ForgetsRollback, SeesSiblings])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_target_that_confuses_nodes_is_caught(bugged: type[ToyTarget], params: list[SamplingParams]) -> None:
    """Guards against an `assert_lossless` that passes wrong positions, paths or masks; the sound target passes it."""
    check_lossless(ToyTarget, params)
    with pytest.raises(AssertionError, match="plain decoding"):
        check_lossless(bugged, params)


class ProcessorsOnlyAtTheRoot(BatchDraw):
    """Planted: the pending token's successor is warped, tokens at drafted positions come from the raw softmax."""

    def __call__(self, queries: list[tuple[int, int]]) -> list[int]:
        drawn = []
        for index, node in queries:
            stream = self._streams[index]
            raw = SamplingParams(temperature=stream.params.temperature)
            params = stream.params if node == 0 else raw
            bare = Stream(params, stream.seed, stream.sample_index, stream.ids)
            tree = self._topologies[index], self._tokens[index]
            drawn += BatchDraw([self._outputs[index]], [tree[0]], [tree[1]], [bare])([(0, node)])
        return drawn


def test_a_processor_missing_at_drafted_positions_is_caught_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an `assert_lossless` that never reaches a token which only a missing top-k could let in."""
    check_lossless(ToyTarget, NARROWED)
    monkeypatch.setattr(engine_round, "BatchDraw", ProcessorsOnlyAtTheRoot)
    with pytest.raises(AssertionError, match="plain decoding"):
        check_lossless(ToyTarget, NARROWED)


@pytest.mark.parametrize("verify_round", [match_round, rejection_round])
@pytest.mark.parametrize("bugged", [False, True])
def test_a_processor_missing_at_drafted_positions_breaks_the_distribution(verify_round: Verify, bugged: bool) -> None:
    """Guards against an enumeration that cannot see a processor left out; the control arm stays within 1e-9."""
    for seed in range(4):
        narrowed = toy_distribution(seed, SamplingParams(temperature=1.0, top_k=2))
        raw = toy_distribution(seed)

        def decode_round(
            ids: Ids, oracle: Oracle, seed: int = seed, p: Conditional = narrowed, raw: Conditional = raw
        ) -> Ids:
            tree = chosen_tree(ids, random_topology(ids, seed, "random", most=6), seed)
            return verify_round(tree, ids, lambda at: raw(at) if bugged and at != ids else p(at), oracle)

        distance = total_variation(joint_distribution(START, 3, decode_round), plain_distribution(START, 3, narrowed))
        assert distance > 1e-3 if bugged else distance <= 1e-9


PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 0.9},
    # The last token alone does not tell what is banned: it is the node itself, which no planted bug below mistakes.
    "bad_words": {"bad_words_ids": [list(word) for word in product(range(8), repeat=3) if sum(word) % 2]},
}


def root_history(stream: Stream, path_tokens: Sequence[int] = ()) -> History:
    """Planted: every node is penalised by what the root knows."""
    return history_of(stream)


class HistoryByIndex(BatchDraw):
    """Planted: a node's history is the rows before it, as many as it is deep, rejected siblings among them."""

    def _path(self, index: int, node: int) -> list[int]:
        depth = self._topologies[index].depths[node]
        return list(self._tokens[index][node + 1 - depth : node + 1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("option", PENALTIES)
def test_another_nodes_history_is_caught(option: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an `assert_lossless` that passes penalties by the root's history, or by rejected siblings'."""
    params = [
        SamplingParams.from_options(max_new_tokens=24, temperature=temperature, seed=seed, **PENALTIES[option])
        for seed in range(4)
    ]
    check_lossless(ToyTarget, params)
    with monkeypatch.context() as planted:
        planted.setattr(draw_module, "history_of", root_history)
        with pytest.raises(AssertionError, match="plain decoding"):
            check_lossless(ToyTarget, params)
    monkeypatch.setattr(engine_round, "BatchDraw", HistoryByIndex)
    with pytest.raises(AssertionError, match="plain decoding"):
        check_lossless(ToyTarget, params)


@pytest.mark.parametrize("verify_round", [match_round, rejection_round])
@pytest.mark.parametrize("bugged", ["", "root", "siblings"])
def test_another_nodes_history_breaks_the_distribution(verify_round: Verify, bugged: str) -> None:
    """Guards against an enumeration that cannot see a history gone astray; the control arm stays within 1e-9.

    The planted distributions look at the right logits and apply the options by the root's history, or below the root by
    all drafted tokens.
    """
    for seed in range(4):
        target, toy = toy_distribution(seed, PENALISED), ToyTarget(4, seed)

        def decode_round(ids: Ids, oracle: Oracle, seed: int = seed, p: Conditional = target, toy: Any = toy) -> Ids:
            tree = chosen_tree(ids, random_topology(ids, seed, "random", most=6), seed)
            drafted = tuple(tree.tokens[1:].tolist())

            def astray(at: Ids) -> Tensor:
                path = at[len(ids) :]
                before = drafted if path and bugged == "siblings" else ()
                history = History(START, (ids + before)[len(START) :], (3,))
                return warp(toy.probs(at).log()[None], PENALISED, [history])[0].exp()

            return verify_round(tree, ids, astray if bugged else p, oracle)

        distance = total_variation(joint_distribution(START, 3, decode_round), plain_distribution(START, 3, target))
        assert distance > 1e-3 if bugged else distance <= 1e-9


@pytest.mark.parametrize("bugged", [False, True])
def test_probabilities_that_were_not_sampled_from_break_the_distribution(bugged: bool) -> None:
    """Guards against an enumeration that cannot tell q from what was sampled (here the same q at temperature 0.5)."""
    for seed in range(4):
        target, claimed = toy_distribution(seed), toy_distribution(seed + 1000)
        sampled = toy_distribution(seed + 1000, SamplingParams(temperature=0.5)) if bugged else claimed

        def decode_round(
            ids: Ids, oracle: Oracle, p: Conditional = target, q: Conditional = claimed, used: Conditional = sampled
        ) -> Ids:
            tree = sampled_tree(ids, Topology.of([-1, 0, 0]), used, oracle)
            return rejection_round(DraftTree(tree.tokens, tree.topology, {0: q(ids)}), ids, p, oracle)

        distance = total_variation(joint_distribution(START, 3, decode_round), plain_distribution(START, 3, target))
        assert distance > 1e-3 if bugged else distance <= 1e-9


def test_siblings_verified_as_if_each_were_drawn_from_the_whole_law_break_it() -> None:
    """Guards against an enumeration blind to q that is not renewed: the second of two siblings, drawn from what the
    first one left, judged by the distribution that the first one was drawn from."""

    def decode_round(ids: Ids, oracle: Oracle, p: Conditional, q: Conditional) -> Ids:
        tree = sampled_tree(ids, Topology.of([-1, 0, 0]), q, oracle)
        left, distribution = p(ids), q(ids)
        for node in (1, 2):
            token = int(tree.tokens[node])
            if oracle.bernoulli(min(1.0, float(left[token] / distribution[token])), node):
                return (token,)
            left = (left - distribution).clamp(min=0)
            left /= left.sum()
        return (oracle.categorical(left, 0),)

    for seed in range(4):
        target, draft = toy_distribution(seed), toy_distribution(seed + 1000)
        distribution = joint_distribution(START, 1, partial(decode_round, p=target, q=draft))
        assert total_variation(distribution, plain_distribution(START, 1, target)) > 1e-3


def test_a_residual_that_keeps_the_rejected_token_breaks_the_distribution() -> None:
    """Guards against an enumeration blind to the classic slip: after a rejection, drawing from p and not from p - q."""
    for seed in range(4):
        target, draft = toy_distribution(seed), toy_distribution(seed + 1000)

        def decode_round(ids: Ids, oracle: Oracle, p: Conditional = target, q: Conditional = draft) -> Ids:
            tree = sampled_tree(ids, Topology.chain(2), q, oracle)
            drafted = int(tree.tokens[1])
            if oracle.bernoulli(min(1.0, float(p(ids)[drafted] / q(ids)[drafted])), 1):
                return (drafted,)
            return (oracle.choose(p(ids).tolist()),)

        assert total_variation(joint_distribution(START, 1, decode_round), plain_distribution(START, 1, target)) > 1e-3


class SharedNoise(RejectionDraw):
    """Planted: acceptance and residual use one noise, as if it had no purpose in its key."""

    def _key(self, depth: int, purpose: Purpose) -> tuple[int, int]:
        return super()._key(depth, Purpose.RESIDUAL)


def rejection_p_value(draw_type: type[RejectionDraw], seeds: int) -> float:
    """P-value of the first emitted token under rejection with one chosen draft, one run per seed."""
    params = SamplingParams(temperature=1.0, verification="rejection")
    logits = torch.tensor([[0.3, 1.0, 0.0, 0.6], [0.0, 0.0, 0.0, 0.0]])
    tree = DraftTree(torch.tensor([2, 3]), Topology.chain(2))
    top = logits.topk(4)
    outputs = NodeOutputs(logits, top.indices, top.values)
    counts = [0] * 4
    for seed in range(seeds):
        draw = draw_type(outputs, tree.topology, [2, 3], Stream(params, seed, 0, [0] * 6))
        verdict = rejection(tree, [2, 3], draw.target_probs, draw.categorical, draw.bernoulli)
        counts[3 if verdict.accepted_drafts else verdict.next_token] += 1
    return chi_square_p(counts, warp(logits[:1], params)[0].double().exp().tolist())


def test_noise_shared_by_acceptance_and_residual_is_caught() -> None:
    """Guards against a statistical test too weak to see re-used noise. False alarm of the control arm: 1e-6.

    The bias of the planted arm shifts token 1 by several percent, so its p-value is below 1e-20 at this many seeds.
    """
    assert rejection_p_value(RejectionDraw, 4000) > 1e-6
    assert rejection_p_value(SharedNoise, 4000) < 1e-12
