"""SAM-Decoding: who drafts, from which match, and what the other drafter is told."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Proposer
from outpace.core.tree import DraftTree
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.methods.catalog import build_proposer, parse_method
from outpace.testing import OracleDrafter, ToyTarget, decode, draft_request, toy_context
from outpace.trees.retrieval.samd import KIND, SamDecoding, load_corpus, save_corpus
from outpace.trees.retrieval.suffix import BORDER, SuffixAutomaton
from tests.unit.trees.recorded import trees_in_company

OTHER = 7


class Recorder(OracleDrafter):
    """Drafts one known token wherever it may, and remembers the budgets it was given."""

    def __init__(self) -> None:
        super().__init__([])
        self.budgets: list[int] = []

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.budgets = [request.budget for request in requests]
        drafts = [[one.ids[-1], *[OTHER] * min(one.budget, one.max_depth, 1)] for one in requests]
        return [DraftTree.chain(torch.tensor(tokens)) for tokens in drafts]


def routed(ids: list[int], corpus: list[int] | None = None, budget: int = 4, **options: Any) -> list[int]:
    """What is drafted after some ids."""
    automaton = None if corpus is None else SuffixAutomaton([*corpus, BORDER])
    proposer = SamDecoding(Recorder(), 4, automaton, options.get("min_match", 5), options.get("corpus_bias", 5))
    (tree,) = proposer.propose([proposer.open(0)], [draft_request(ids, budget, options.get("depth", 9))])
    assert int(tree.tokens[0]) == ids[-1]
    assert tree.topology.is_chain
    drafted: list[int] = tree.tokens[1:].tolist()
    return drafted


def test_a_match_drafts_from_the_threshold_on() -> None:
    """Guards against a router that is off by one, or asks for the wrong length."""
    repeated = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert routed([*repeated, *repeated[:4]]) == [OTHER]
    assert routed([*repeated, *repeated[:5]]) == [6, 7, 8, 9]
    assert routed([*repeated, *repeated[:4]], min_match=4) == [5, 6, 7, 8]
    assert routed([1, 2, 3], min_match=1) == [OTHER]


def test_a_match_in_the_corpus_counts_less_by_the_bias() -> None:
    """Guards against a corpus_bias on the wrong side, and one that the min_match does not see."""
    corpus = list(range(20, 40))
    assert routed(corpus[:10], corpus) == [30, 31, 32, 33], "10 - 5 reaches the min_match"
    assert routed(corpus[:9], corpus) == [OTHER], "9 - 5 does not"
    assert routed(corpus[:9], corpus, corpus_bias=4) == [29, 30, 31, 32]
    # Both match: 6 tokens in the text, where 77 followed, and 11 or 12 in the corpus.
    both = [*corpus[6:12], 77, 50, *corpus[:12]]
    assert routed(both, corpus, corpus_bias=5) == [32, 33, 34, 35], "12 - 5 is more than 6"
    assert routed(both[:8] + corpus[1:12], corpus, corpus_bias=5) == [77, 50, 21, 22], "11 - 5 is not"
    assert routed(corpus[-12:], corpus) == [OTHER], "nothing follows the end of a text"
    assert routed(corpus[-12:], [*corpus, BORDER, *corpus, 9, 8]) == [9, 8], "but it does in another one"


def test_chains_keep_to_budget_depth_and_forty() -> None:
    """Guards against chains beyond what a request may still emit, and beyond the published length."""
    ids = [1, 2, 3] * 10
    for budget, depth, expected in ((4, 9, 4), (9, 2, 2), (100, 100, 40), (9, 0, 0), (0, 9, 0)):
        assert len(routed(ids, budget=budget, depth=depth)) == expected


def test_the_other_drafter_is_asked_every_time_and_told_of_everything() -> None:
    """Guards against a drafter that misses rounds which a match has drafted, and drafts (or pays) for nothing there."""
    other = Recorder()
    proposer = SamDecoding(other, 6, None, 5, 5)
    states = [proposer.open(0), proposer.open(1)]
    requests = [draft_request([1, 2, 3] * 4, 6, 9), draft_request([1, 2, 3, 4], 6, 9)]
    chain, tree = proposer.propose(states, requests)
    assert chain.tokens.tolist() == [3, 1, 2, 3, 1, 2, 3]
    assert tree.tokens.tolist() == [4, OTHER]
    assert other.budgets == [0, 6]
    target = ToyTarget(8, seed=1)
    (session,) = decode(Engine(target), [[1, 2, 1, 2, 1, 2, 1]], [SamplingParams(max_new_tokens=9)], [proposer])
    assert len(other.observations) == session.metrics.steps


def test_a_rewound_conversation_drafts_from_what_is_kept() -> None:
    """Guards against matches in ids that were taken back, and against the other drafter not being told."""
    corpus = SuffixAutomaton([*range(20, 40), BORDER])
    proposer = SamDecoding(Recorder(), 6, corpus, 2, 1)
    state = proposer.open(0)
    proposer.propose([state], [draft_request([1, 2, 3, 20, 21, 22], 6, 9)])
    proposer.rewind(state, 2)
    (tree,) = proposer.propose([state], [draft_request([1, 2, 7, 1, 2], 6, 9)])
    assert tree.tokens.tolist() == [2, 7, 1, 2, 7, 1, 2]
    proposer.rewind(state, 1)
    (tree,) = proposer.propose([state], [draft_request([1, 30, 31, 32], 6, 9)])
    assert tree.tokens.tolist() == [32, 33, 34, 35, 36, 37, 38]


def test_a_corpus_speeds_up_what_it_knows(tmp_path: Path) -> None:
    """Guards against a corpus that is read and never matched: an answer it holds must be accepted."""
    target = ToyTarget(12, seed=2, sharpness=4.0)
    params = SamplingParams(max_new_tokens=40)
    (plain,) = decode(Engine(target), [[1, 2]], [params], [OracleDrafter([])])
    save_corpus(tmp_path / "corpus", [[3, 3, 3], plain.ids], 12)
    steps = []
    for method in ("samd:min_match=3", f"samd:min_match=3,corpus_bias=0,corpus={tmp_path / 'corpus'}"):
        (session,) = decode(Engine(target), [[1, 2]], [params], [build_proposer(parse_method(method), toy_context(12))])
        assert session.ids == plain.ids
        steps.append(session.metrics.steps)
    assert steps[1] <= 8 < steps[0]


@pytest.mark.parametrize("kind", ["eagle3", "dart", "dflash", "domino", "medusa"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_trained_drafter_keeps_up_with_rounds_it_did_not_draft(kind: str, temperature: float) -> None:
    """Guards against features, rows or scratch of a net that go astray where a match has drafted in its place: its own
    trees must be those that it drafts after the same ids when it drafts alone."""
    prompts = [[5, 6, 7, 8, 9, 10] * 3, [20, 21]]

    def join(drafter: Proposer, plain: Sequence[Session]) -> SamDecoding:
        corpus = SuffixAutomaton([token for session in plain for token in [*session.generated[:12], BORDER]])
        return SamDecoding(drafter, 10, corpus, 4, 0)

    _, common, _ = trees_in_company(kind, temperature, prompts, join)
    for prompt in prompts:  # the corpus ends after 12 tokens of an answer
        late = [ids for ids in common if list(ids[: len(prompt)]) == prompt and len(ids) > len(prompt) + 12]
        assert late, "no trees after rounds that a match has drafted"


def test_files_of_corpora(tmp_path: Path) -> None:
    """Guards against texts that run into one another, and files that are read as something they are not."""
    file = tmp_path / "corpus"
    assert save_corpus(file, [[1, 2], [], [3]], 5) == 3
    assert load_corpus(file, 5).ids == [1, 2, BORDER, 3, BORDER]
    with pytest.raises(ModelError, match="made for 5 ids, and the target has 9"):
        load_corpus(file, 9)
    with pytest.raises(InvalidRequest, match="no tokens in these texts"):
        save_corpus(tmp_path / "none", [[]], 5)
    with pytest.raises(InvalidRequest, match="the vocabulary ends at 5"):
        save_corpus(tmp_path / "none", [[1], [5]], 5)
    about = {"format": KIND.format, "vocab_size": "5"}
    for number, (ids, lengths, complaint) in enumerate(
        (
            (torch.tensor([1, 7]), torch.tensor([2]), "from 0 to 4"),
            (torch.tensor([1.0]), torch.tensor([1]), "int64 ids"),
            (torch.tensor([1, 2]), torch.tensor([1]), "must add up to 2"),
            (torch.tensor([1, 2]), torch.tensor([2, 0]), "each at least 1"),
        )
    ):
        save_file({"ids": ids, "lengths": lengths}, tmp_path / f"wrong{number}", about)
        with pytest.raises(ModelError, match=complaint):
            load_corpus(tmp_path / f"wrong{number}", 5)
