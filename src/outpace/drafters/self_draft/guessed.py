"""The target as its own drafter whose passes draft several tokens: a cheaper source guesses them first."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core.drafting import UNKNOWN, Retrieved, Retriever
from outpace.core.protocols import DraftRequest, Observation
from outpace.drafters.draft_lm.source import DraftLM
from outpace.drafters.self_draft.selectors import RowSelector
from outpace.drafters.self_draft.source import SelfDraft, SelfState
from outpace.models.draft import DraftRows
from outpace.models.packed import PackedModel
from outpace.trees.proposer import Nested, StaticProposer
from outpace.trees.shapes.rank_paths import Chain

GUESSES = 3
"""Tokens that a pass computes beyond the drafted one: on a CPU each row costs a good part of a pass."""
_WINDOW = 256  # last ids that a draft model sees while it guesses, as in the paper


@dataclass(eq=False)
class GuessedState(SelfState):
    """`scored`: the tokens of this round's chain that have rows, each with the scores [V or K] of what follows it;
    the last ones may be guesses."""

    of_guesser: Any = None
    scored: list[tuple[int, Tensor]] = field(default_factory=list)


class GuessedSelfDraft(Nested, SelfDraft):
    """TriForce's hierarchy (arXiv 2404.11912): the full target verifies a chain that the target has drafted through a
    view, and a pass of that view computes rows of guessed tokens, too. A level whose token was guessed needs no pass.

    So the drafts are those of `SelfDraft`, whatever is guessed, and any verification stays exact. The authors' middle
    level resamples from the view's distribution instead of the residual, which is biased at temperature > 0.

    Args:
        guesser: retrieves a chain of tokens that may follow the drafts.
    """

    parts: ClassVar = {"of_guesser": "guesser"}

    def __init__(
        self,
        model: PackedModel,
        selector: RowSelector | None,
        guesser: Retriever,
        noise: bool = True,
        vocabulary: Tensor | None = None,
        drafts_whole: bool = False,
    ) -> None:
        super().__init__(model, selector, noise, vocabulary, drafts_whole)
        self.guesser, self.needs = guesser, guesser.needs

    def open(self, slot: int, alone: bool = False) -> GuessedState:
        return GuessedState(slot, of_guesser=self.guesser.open(slot, alone))

    def fork(self, state: GuessedState | None, slot: int, length: int) -> GuessedState:
        known = None if state is None else state.of_guesser
        return GuessedState(slot, of_guesser=self.guesser.fork(known, slot, length))

    def rewind(self, state: GuessedState, length: int) -> None:
        super().rewind(state, length)
        SelfDraft.rewind(self, state, length)

    def _scores(self, states: Sequence[GuessedState], growths: Sequence[DraftRows]) -> tuple[Tensor, int]:
        pairs = list(zip(states, growths, strict=True))
        if lacking := [pair for pair in pairs if not _has_row(*pair)]:
            self._compute(*zip(*lacking, strict=True))
        return torch.stack([state.scored[growth.scratch][1] for state, growth in pairs]), min(len(lacking), 1)

    def _compute(self, states: Sequence[GuessedState], growths: Sequence[DraftRows]) -> None:
        """One pass over the drafted tokens and guesses of what follows them; rows of wrong guesses are overwritten."""
        requests, paths = [], []
        for state, growth in zip(states, growths, strict=True):
            asked, above = state.asked, growth.scratch
            below = min(asked.budget, asked.max_depth) - above - 1  # levels below that will need a row
            requests.append(replace(asked, budget=min(GUESSES, below)))
            paths.append(torch.tensor([*(token for token, _ in state.scored[:above]), *growth.tokens.tolist()]))
        found = self.guesser.prepare([state.of_guesser for state in states], requests, paths)
        passes = []
        for growth, request, one in zip(growths, requests, found, strict=True):
            guesses = one.tokens[1 : 1 + request.budget].tolist()
            known = guesses.index(UNKNOWN) if UNKNOWN in guesses else len(guesses)
            tokens = torch.cat([growth.tokens, one.tokens[1 : 1 + known]])
            count, rows = len(tokens), growth.scratch + len(tokens)
            visible = torch.ones(rows, rows, dtype=torch.bool).tril()[-count:]
            passes.append(replace(growth, tokens=tokens, offsets=torch.arange(rows), visible=visible, wanted=count))
        scores, _ = super()._scores(states, passes)
        for state, growth, own in zip(states, passes, scores.split([one.wanted for one in passes]), strict=True):
            state.scored[growth.scratch :] = zip(growth.tokens.tolist(), own, strict=True)


def _has_row(state: GuessedState, growth: DraftRows) -> bool:
    """Whether the token of a level was guessed: then an earlier pass of this round has computed its row."""
    assert len(growth.tokens) == 1, "guesses continue chains, not trees"
    row = growth.scratch
    return 0 < row < len(state.scored) and state.scored[row][0] == int(growth.tokens[0])


class ModelGuesser(StaticProposer):
    """A draft model as a retriever of chains. It sees the last ids alone, as in the paper."""

    def __init__(self, source: DraftLM, device: torch.device) -> None:
        super().__init__(source, Chain(), GUESSES, device)
        self._model = source.model
        source.window = _WINDOW

    def prepare(
        self, states: Sequence[Any], requests: Sequence[DraftRequest], paths: Sequence[Tensor]
    ) -> list[Retrieved]:
        """Chains below the paths. Their rows follow tokens that the target has not verified yet, so they are dropped;
        those of accepted tokens are computed again with the next round's ids."""
        contexts = [
            replace(request.sampling, ids=[*request.ids[:-1], *path.tolist()])
            for request, path in zip(requests, paths, strict=True)
        ]
        ahead = [replace(request, sampling=context) for request, context in zip(requests, contexts, strict=True)]
        trees = self.propose(states, ahead)
        for state, request in zip(states, requests, strict=True):
            self._model.rewind_slot(state.of_source.slot, len(request.ids))
        return [Retrieved(tree.tokens, tree.topology) for tree in trees]

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None:
        """Do nothing: the rows of the tree were dropped already."""
