"""Exact enumeration: run a random procedure once per possible outcome of its draws, with the outcome's probability."""

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import Verdict
from outpace.core.tree import DraftTree, Topology
from outpace.sampling.verification import match, rejection
from outpace.sampling.warp import History, warp
from outpace.testing import ToyTarget

VOCAB = 4
START = (1, 2)

Ids = tuple[int, ...]
Probabilities = dict[Ids, float]
Conditional = Callable[[Ids], Tensor]
"""The float64 distribution [V] of the token after these ids."""
Round = Callable[[Ids, "Oracle"], Ids]
"""One round of decoding after these ids, the last of them pending; returns the tokens it emits."""
Verify = Callable[[DraftTree, Ids, Conditional, "Oracle"], Ids]
"""Verify a tree drafted after these ids; returns the tokens it emits."""


class Oracle:
    """Stands in for all randomness: replays a script of choices, then always takes the first possible one."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = list(script)
        self.taken: list[int] = []
        self.probability = 1.0
        self.untried: list[list[int]] = []

    def choose(self, probs: Sequence[float]) -> int:
        possible = [index for index, probability in enumerate(probs) if probability > 0.0]
        place = len(self.taken)
        if place < len(self._script):
            choice = self._script[place]
        else:
            choice = possible[0]
            self.untried += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(choice)
        self.probability *= probs[choice]
        return choice

    def categorical(self, probs: Tensor, node: int) -> int:
        return self.choose(probs.tolist())

    def bernoulli(self, probability: float, node: int) -> bool:
        return self.choose([probability, 1.0 - probability]) == 0


def enumerate_outcomes(run: Callable[[Oracle], Ids]) -> Iterator[tuple[Ids, float]]:
    """Every outcome of `run`, depth-first over its choices. The probabilities sum to 1."""
    scripts: list[list[int]] = [[]]
    while scripts:
        oracle = Oracle(scripts.pop())
        outcome = run(oracle)
        scripts += oracle.untried
        yield outcome, oracle.probability


def joint_distribution(context: Ids, count: int, decode_round: Round) -> Probabilities:
    """The exact distribution of the first `count` tokens emitted by rounds, what a round emits beyond them cut off."""
    rounds: dict[Ids, Probabilities] = {}

    def after(ids: Ids, wanted: int) -> Probabilities:
        if ids not in rounds:
            rounds[ids] = {}
            for emitted, probability in enumerate_outcomes(lambda oracle: decode_round(ids, oracle)):
                rounds[ids][emitted] = rounds[ids].get(emitted, 0.0) + probability
        distribution: Probabilities = {}
        for emitted, probability in rounds[ids].items():
            rest = {(): 1.0} if len(emitted) >= wanted else after(ids + emitted, wanted - len(emitted))
            for tail, share in rest.items():
                tokens = emitted[:wanted] + tail
                distribution[tokens] = distribution.get(tokens, 0.0) + probability * share
        return distribution

    return after(context, count)


def plain_distribution(context: Ids, count: int, target: Conditional) -> Probabilities:
    """The same distribution by plain sampling, one token after the other."""
    distribution: Probabilities = {(): 1.0}
    for _ in range(count):
        distribution = {
            (*tokens, token): probability * share
            for tokens, probability in distribution.items()
            for token, share in enumerate(target(context + tokens).tolist())
        }
    return distribution


def total_variation(first: Probabilities, second: Probabilities) -> float:
    return 0.5 * sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in first.keys() | second.keys())


def toy_distribution(seed: int, params: SamplingParams | None = None) -> Conditional:
    """A target's (or drafter's) exact distribution, warped, remembered by ids. The same seed gives the same
    distribution.

    Penalties and bans see START as the prompt and what follows it as the answer; 3 is the EOS id.
    """
    toy, wanted = ToyTarget(VOCAB, seed), params or SamplingParams(temperature=1.0)
    known: dict[Ids, Tensor] = {}

    def distribution(ids: Ids) -> Tensor:
        if ids not in known:
            history = History(START, ids[len(START) :], (3,))
            known[ids] = warp(toy.probs(ids).log()[None], wanted, [history])[0].exp()
        return known[ids]

    return distribution


PENALISED = SamplingParams.from_options(
    temperature=0.9, repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.8, logit_bias={0: -0.5},
    bad_words_ids=[[2, 1], [0, 3, 0]], min_new_tokens=2,
)  # fmt: skip
"""Options whose distribution depends on everything said before, not on the last tokens alone."""


def random_topology(ids: Ids, seed: int, kind: str, most: int) -> Topology:
    """A chain, star or random tree of at most `most` drafted nodes; always the same after the same ids."""
    dice = random.Random(f"{seed} {ids}")
    size = dice.randint(1, most)
    if kind == "chain":
        return Topology.chain(size + 1)
    return Topology.of([-1] + [0 if kind == "star" else dice.randrange(node) for node in range(1, size + 1)])


def tokens_down_to(tree: DraftTree, context: Ids, node: int) -> Ids:
    """The ids that a node's successor follows: the context (which ends in the pending token) and the node's path."""
    return context + tuple(tree.tokens[list(tree.topology.path(node)[1:])].tolist())


def chosen_tree(ids: Ids, topology: Topology, seed: int) -> DraftTree:
    """A point-mass draft: tokens by no distribution at all, equal siblings included."""
    dice = random.Random(f"tokens {seed} {ids}")
    tokens = [ids[-1]] + [dice.randrange(VOCAB) for _ in topology.parents[1:]]
    return DraftTree(torch.tensor(tokens), topology)


def sampled_tree(ids: Ids, topology: Topology, draft: Conditional, oracle: Oracle) -> DraftTree:
    """Children of a node drawn from the draft's distribution there, each from what the ones before it left of it, and
    every draw enumerated. Where nothing is left there is an arbitrary token, which was not drawn."""
    tokens = [ids[-1]]
    distributions: dict[int, Tensor] = {}
    left: dict[int, Tensor] = {}  # not normalised
    for parent in topology.parents[1:]:
        if parent not in distributions:
            path = [tokens[above] for above in topology.path(parent)[1:]]
            distributions[parent] = draft(ids + tuple(path))
            left[parent] = distributions[parent].clone()
        total = left[parent].sum()
        tokens.append(oracle.choose((left[parent] / total).tolist()) if total else VOCAB - 1)
        left[parent][tokens[-1]] = 0.0
    return DraftTree(torch.tensor(tokens), topology, distributions)


def emitted(tree: DraftTree, verdict: Verdict) -> Ids:
    return (*tree.tokens[list(verdict.path[1:])].tolist(), verdict.next_token)


def match_round(tree: DraftTree, ids: Ids, target: Conditional, oracle: Oracle) -> Ids:
    """Verify one tree by matching, every target draw enumerated."""

    def draw(queries: list[tuple[int, int]]) -> list[int]:
        return [oracle.choose(target(tokens_down_to(tree, ids, node)).tolist()) for _, node in queries]

    return emitted(tree, match([tree.topology], [tree.tokens.tolist()], draw)[0])


def rejection_round(tree: DraftTree, ids: Ids, target: Conditional, oracle: Oracle) -> Ids:
    """Verify one tree by rejection, every acceptance and every residual draw enumerated."""

    def target_probs(node: int) -> Tensor:
        return target(tokens_down_to(tree, ids, node))

    verdict = rejection(tree, tree.tokens.tolist(), target_probs, oracle.categorical, oracle.bernoulli)
    return emitted(tree, verdict)
