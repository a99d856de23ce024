"""Planted bugs: each must be caught by the very check that guards against it, which shows that the check has power."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer, SamplingContext
from outpace.core.tree import DraftTree, Topology
from outpace.engine import round as engine_round
from outpace.engine.engine import Engine
from outpace.sampling import verification
from outpace.sampling.verification import BatchDraw
from outpace.sampling.warp import History, history_of, warp
from outpace.testing import AdversaryDrafter, ToyTarget, assert_lossless
from tests.unit.sampling.verify.enumeration import (
    PENALISED,
    START,
    Conditional,
    Ids,
    Oracle,
    Verify,
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

PROMPTS = [[1, 2], [3], [5, 0, 4, 4], [7, 1, 6]]
SAMPLED = [SamplingParams(max_new_tokens=24, temperature=1.0, seed=seed) for seed in range(4)]
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


PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 0.9},
    # The last token alone does not tell what is banned: it is the node itself, which no planted bug below mistakes.
    "bad_words": {"bad_words_ids": [list(word) for word in product(range(8), repeat=3) if sum(word) % 2]},
}


def root_history(context: SamplingContext, path_tokens: Sequence[int] = ()) -> History:
    """Planted: every node is penalised by what the root knows."""
    return history_of(context)


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
        planted.setattr(verification, "history_of", root_history)
        with pytest.raises(AssertionError, match="plain decoding"):
            check_lossless(ToyTarget, params)
    monkeypatch.setattr(engine_round, "BatchDraw", HistoryByIndex)
    with pytest.raises(AssertionError, match="plain decoding"):
        check_lossless(ToyTarget, params)


@pytest.mark.parametrize("verify_round", [match_round, rejection_round])
@pytest.mark.parametrize("bugged", ["root", "siblings"])
def test_another_nodes_history_breaks_the_distribution(verify_round: Verify, bugged: str) -> None:
    """Guards against an enumeration that cannot see a history gone astray.

    The planted distributions look at the right logits and apply the options by the root's history, or below the root by
    all drafted tokens.
    """
    for seed in range(4):
        target, toy = toy_distribution(seed, PENALISED), ToyTarget(4, seed)

        def decode_round(ids: Ids, oracle: Oracle, seed: int = seed, toy: Any = toy) -> Ids:
            tree = chosen_tree(ids, random_topology(ids, seed, "random", most=6), seed)
            drafted = tuple(tree.tokens[1:].tolist())

            def astray(at: Ids) -> Tensor:
                path = at[len(ids) :]
                before = drafted if path and bugged == "siblings" else ()
                history = History(START, (ids + before)[len(START) :], (3,))
                return warp(toy.probs(at).log()[None], PENALISED, [history])[0].exp()

            return verify_round(tree, ids, astray, oracle)

        distribution = joint_distribution(START, 3, decode_round)
        assert total_variation(distribution, plain_distribution(START, 3, target)) > 1e-3


def test_probabilities_that_were_not_sampled_from_break_the_distribution() -> None:
    """Guards against an enumeration that cannot tell q from what was sampled (here the same q at temperature 0.5)."""
    for seed in range(4):
        target, claimed = toy_distribution(seed), toy_distribution(seed + 1000)
        sampled = toy_distribution(seed + 1000, SamplingParams(temperature=0.5))

        def decode_round(
            ids: Ids, oracle: Oracle, p: Conditional = target, q: Conditional = claimed, used: Conditional = sampled
        ) -> Ids:
            tree = sampled_tree(ids, Topology.of([-1, 0, 0]), used, oracle)
            return rejection_round(DraftTree(tree.tokens, tree.topology, {0: q(ids)}), ids, p, oracle)

        distribution = joint_distribution(START, 3, decode_round)
        assert total_variation(distribution, plain_distribution(START, 3, target)) > 1e-3


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
