"""Proposers of which calls and trees are remembered, and a drafter that must not care who drafts beside it."""

from collections.abc import Callable, Sequence
from typing import Any

from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Proposer
from outpace.core.tree import DraftTree
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.testing import decode
from outpace.trees.proposer import EmptyDraft
from tests.unit.drafters.source.learned import proposer_of, source_of
from tests.unit.engine.doubles import heard
from tests.unit.models.tiny import tiny_config, tiny_target

Trees = dict[tuple[int, ...], list[tuple[int, int]]]
"""Parents and tokens of trees, by the ids after which they were drafted."""


class Told:
    """Another proposer, of whose calls names and arguments are remembered."""

    def __init__(self, base: Any) -> None:
        self._base = base
        self.heard: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._base, name)
        if not callable(found):
            return found

        def told(*given: Any) -> Any:
            self.heard.append((name, given))
            return found(*given)

        return told

    @property
    def asked(self) -> list[tuple[Any, DraftRequest]]:
        """State and request of every tree that it was to draft."""
        calls = [given for name, given in self.heard if name == "propose"]
        return [pair for states, requests in calls for pair in zip(states, requests, strict=True)]


def trees_of(proposer: Proposer) -> Trees:
    """What a proposer drafts from now on, without trees of nothing."""
    trees: Trees = {}

    def keep(request: DraftRequest, tree: DraftTree) -> None:
        if len(tree) > 1:
            trees[tuple(request.ids)] = list(zip(tree.topology.parents, tree.tokens.tolist(), strict=True))

    heard(proposer, keep)
    return trees


def trees_in_company(
    kind: str,
    temperature: float,
    prompts: Sequence[list[int]],
    join: Callable[[Proposer, Sequence[Session]], Proposer],
) -> tuple[Trees, Trees, list[Session]]:
    """Decode two prompts with a trained drafter alone, and with `join`, which puts another one around it and knows the
    answers. Assert that these stay, and that the drafter's trees after the same ids do too.

    Returns:
        The drafter's trees in company, those of them that it drafted alone as well, and the sessions.
    """
    target = tiny_target(tiny_config("llama"))
    params = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=seed) for seed in (1, 2)]
    plain = decode(Engine(target), prompts, params, [EmptyDraft()] * 2)
    alone, drafter = (proposer_of("beam", source_of(kind, target)) for _ in range(2))
    expected, trees = trees_of(alone), trees_of(drafter)
    for proposer in (alone, join(drafter, plain)):
        sessions = decode(Engine(target), prompts, params, [proposer] * 2)
        assert [session.ids for session in sessions] == [session.ids for session in plain]
    assert sum(session.metrics.accepted for session in sessions) > 8
    common = {ids: tree for ids, tree in trees.items() if ids in expected}
    assert common == {ids: expected[ids] for ids in common}
    return trees, common, sessions
