"""Fills: what followed the longest match, several fills in order, and the options that choose them."""

import random
from collections.abc import Sequence

import pytest
import torch

from outpace.core.drafting import UNKNOWN, Retrieved
from outpace.core.tree import DraftTree, Topology
from outpace.drafters.model_options import ModelOptions
from outpace.methods.retrieval import with_retrieval
from outpace.methods.stores import matrix_of
from outpace.testing import draft_request, toy_context
from outpace.trees.grafting import GraftedProposer, MatrixRetriever, Offer, SuffixRetriever, graft
from outpace.trees.proposer import EmptyDraft
from outpace.trees.retrieval.suffix import TextMatch

CPU = torch.device("cpu")
AROUND = toy_context(50)


def longest_match(ids: Sequence[int], drafted: Sequence[int], count: int) -> list[int]:
    """By definition: the longest end of ids and drafts that stands in the ids before their own end, at its earliest
    place, and what follows there, drafts included, repeated from the end on."""
    text = [*ids, *drafted]
    for length in range(len(text), 0, -1):
        suffix = text[len(text) - length :]
        for end in range(length, len(ids)):
            if list(ids[end - length : end]) == suffix:
                return [text[end + place % (len(text) - end)] for place in range(count)]
    return []


@pytest.mark.parametrize("alphabet", [2, 3, 8])
def test_what_is_retrieved_followed_the_longest_match(alphabet: int) -> None:
    """Guards against matches that drafted tokens do not shorten or move, and ones that end in the drafts themselves."""
    draw = random.Random(alphabet)
    fill = SuffixRetriever(CPU)
    found = 0
    for _ in range(200):
        ids = [draw.randrange(alphabet) for _ in range(draw.randint(1, 30))]
        drafted = [draw.randrange(alphabet) for _ in range(draw.randint(0, 4))]
        path = torch.tensor([ids[-1], *drafted])
        (retrieved,) = fill.prepare([TextMatch()], [draft_request(ids, 6, 20)], [path])
        wanted = longest_match(ids, drafted, 6)
        assert retrieved.tokens.tolist()[1:] == wanted
        assert len(retrieved.topology) == 1 + len(wanted)
        assert retrieved.topology.is_chain
        found += bool(wanted)
    assert found > 100


def test_a_text_that_repeats_goes_on_repeating_after_drafts() -> None:
    """Guards against drafted tokens that are left out of the period which is repeated."""
    fill, ids = SuffixRetriever(CPU), [1, 2, 3, 4, 1, 2, 3, 4]
    (retrieved,) = fill.prepare([TextMatch()], [draft_request(ids, 6, 20)], [torch.tensor([4, 1, 2, 3])])
    assert retrieved.tokens.tolist()[1:] == [4, 1, 2, 3, 4, 1]


def test_a_match_follows_its_request() -> None:
    """Guards against a fill that forgets what a request said since, or keeps what was taken back."""
    fill = SuffixRetriever(CPU)
    state = fill.open(0)
    for ids in ([1, 2, 3, 1], [1, 2, 3, 1, 2]):
        (retrieved,) = fill.prepare([state], [draft_request(ids, 2, 20)], [torch.tensor(ids[-1:])])
        assert retrieved.tokens.tolist()[1:] == longest_match(ids, [], 2)
    fill.rewind(state, 2)
    (retrieved,) = fill.prepare([state], [draft_request([1, 2, 9], 2, 20)], [torch.tensor([9])])
    assert len(retrieved.tokens) == 1


def test_fills_take_turns() -> None:
    """Guards against nodes of the second fill below nodes of the first."""
    chain = Retrieved(torch.tensor([7, 1, 2, 3, 8]), Topology.chain(5))
    fork = Retrieved(torch.tensor([7, 4, 5, 6]), Topology.of([-1, 0, 0, 1]))
    empty, request = DraftTree.chain(torch.tensor([7])), draft_request([7], 60, 20)
    (both,) = graft([empty], [[Offer(0, chain), Offer(0, fork)]], [request])
    assert both.tokens.tolist() == [7, 1, 4, 2, 5, 3, 6, 8]
    assert both.topology.parents == (-1, 0, 0, 1, 0, 3, 2, 5)
    nothing = Retrieved(torch.tensor([UNKNOWN]), Topology.chain(1))
    (alone,) = graft([empty], [[Offer(0, nothing), Offer(0, fork)]], [request])
    assert (alone.tokens.tolist()[1:], alone.topology.parents) == ([4, 5, 6], (-1, 0, 0, 1))


def test_options_choose_the_fill() -> None:
    """Guards against options of a fill that are read and then forgotten."""

    def made(**options: object) -> GraftedProposer:
        proposer = with_retrieval(EmptyDraft(), ModelOptions.model_validate(options), AROUND)
        assert isinstance(proposer, GraftedProposer)
        return proposer

    base = EmptyDraft()
    assert with_retrieval(base, ModelOptions(), AROUND) is base
    assert isinstance(made(retrieve="suffix").retrievers[0], SuffixRetriever)
    proposer = made(retrieve="both")
    assert [type(fill) for fill in proposer.retrievers] == [SuffixRetriever, MatrixRetriever]
    assert proposer.needs.top_k == 8
    assert matrix_of(proposer) is proposer.retrievers[1].matrix  # type: ignore[attr-defined]
    assert matrix_of(made(retrieve="matrix", matrix="private")) is None
    chosen: tuple[tuple[dict[str, object], int, int], ...] = (
        ({}, 9, 80),
        ({"retrieve_depth": 2}, 2, 24),
        ({"place": "tail"}, 16, 16),
        ({"place": "tail", "retrieve_depth": 12}, 12, 12),
    )
    for options, levels, nodes in chosen:
        (fill,) = made(retrieve="matrix", **options).retrievers
        (retrieved,) = fill.prepare([fill.open(0)], [draft_request([1], 60, 20)], [torch.tensor([1])])
        assert (retrieved.topology.max_depth, len(retrieved.topology) - 1) == (levels, nodes)
    (narrow,) = made(retrieve="matrix", retrieve_breadth=1).retrievers
    (retrieved,) = narrow.prepare([narrow.open(0)], [draft_request([1], 60, 20)], [torch.tensor([1])])
    assert retrieved.topology.is_chain
