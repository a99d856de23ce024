"""What a proposer hands over is checked where it would change what is said, or break a round for others."""

from collections.abc import Sequence

import pytest
import torch

from outpace.core.bases import BaseProposer
from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest
from outpace.core.tree import DraftTree
from outpace.testing import decode
from tests.unit.engine.doubles import VOCAB, toy_engine


class Stray(BaseProposer):
    """Its trees begin with another token than the pending one."""

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [DraftTree.chain(torch.tensor([(request.ids[-1] + 1) % 4, 1])) for request in requests]


class Short(BaseProposer):
    """It forgets a request."""

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return []


class Outside(BaseProposer):
    """It drafts an id that the target does not have."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self._token = token

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        drafts = [[request.ids[-1], self._token][: request.max_depth + 1] for request in requests]
        return [DraftTree.chain(torch.tensor(tokens)) for tokens in drafts]


@pytest.mark.parametrize(
    ("proposer", "said"),
    [
        (Stray(), r"Stray proposed a tree of \d+; node 0 must be the pending token \d+, or the answer would change"),
        (Short(), "Short proposed 0 trees for 1 requests"),
    ],
)
def test_a_tree_that_would_change_what_is_said_is_refused(proposer: BaseProposer, said: str) -> None:
    """Guards against a method of somebody else's that silently changes the answer: what is verified behind a token that
    was never said is another text's."""
    with pytest.raises(ValueError, match=said):
        decode(toy_engine(), [[1, 2, 3]], [SamplingParams(max_new_tokens=5)], [proposer])


@pytest.mark.parametrize("token", [-1, VOCAB, 10**6])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    """Guards against a library's error from deep inside a pass, or a lookup from the end of a table, where a method of
    somebody else's drafts an id that there is not; and against a vocabulary's last id refused."""
    said = f"Outside proposed token id {token}; ids must be from 0 to {VOCAB - 1}, those of the target's vocabulary"
    with pytest.raises(ValueError, match=said):
        decode(toy_engine(), [[1, 2, 3]], [SamplingParams(max_new_tokens=5)], [Outside(token)])
    for inside in (0, VOCAB - 1):
        (session,) = decode(toy_engine(), [[1, 2, 3]], [SamplingParams(max_new_tokens=5)], [Outside(inside)])
        assert len(session.generated) == 5
