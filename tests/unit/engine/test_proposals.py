"""What a proposer hands over is checked where it would change what is said, or break a round for others."""

from collections.abc import Sequence

import pytest
import torch

from outpace.core.bases import BaseProposer
from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest
from outpace.core.tree import DraftTree
from outpace.testing import decode
from tests.unit.engine.doubles import toy_engine


class Stray(BaseProposer):
    """Its trees begin with another token than the pending one."""

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [DraftTree.chain(torch.tensor([(request.ids[-1] + 1) % 4, 1])) for request in requests]


class Short(BaseProposer):
    """It forgets a request."""

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return []


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
