"""Rows keyed by two tokens: a hash table of fixed size, read alike by device and host, and backed off from."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outpace.core.drafting import UNKNOWN, Frontier
from outpace.core.params import SamplingParams
from outpace.core.protocols import NO_TOKEN
from outpace.engine.engine import Engine
from outpace.methods.catalog import build_proposer, parse_method
from outpace.methods.stores import matrix_of
from outpace.testing import decode, draft_request, toy_context
from outpace.trees.grafting import MatrixRetriever
from outpace.trees.retrieval import transition_matrix
from outpace.trees.retrieval.transition_matrix import SUCCESSORS, PairRows, TokenRecycling, TransitionMatrix
from outpace.trees.retrieval.warm_file import load_matrix, save_matrix
from tests.unit.trees.retrieval.test_lookahead import LoopTarget

CPU = torch.device("cpu")
VOCAB = 40
Pair = tuple[int, int]


def _row(first: int) -> list[int]:
    """Eight ids that are told apart by their first."""
    return [(first + step) % VOCAB for step in range(SUCCESSORS)]


def _known(matrix: TransitionMatrix) -> dict[Pair, list[int]]:
    rows = matrix.rows()
    return {(a, b): row for (a, b), row in zip(rows.pairs.tolist(), rows.pair_successors.tolist(), strict=True)}


def _taught(pairs: dict[Pair, int], tokens: dict[int, int] | None = None) -> TransitionMatrix:
    matrix = TransitionMatrix(VOCAB, CPU, context=2)
    for token, first in (tokens or {}).items():
        matrix.update(torch.tensor([token]), torch.tensor([_row(first)]))
    for (before, token), first in pairs.items():
        assert matrix.pairs is not None
        matrix.pairs.update(torch.tensor([before]), torch.tensor([token]), torch.tensor([_row(first)]))
    return matrix


@pytest.mark.parametrize("places", [2**17, 2**4])
def test_a_table_is_a_dictionary_that_forgets(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rows of another pair where two share a place, the earlier of two kept, keys that the device and
    the host place differently, and the token before a text's first lost."""
    monkeypatch.setattr(transition_matrix, "PLACES", places)
    monkeypatch.setattr(transition_matrix, "PLACE_BITS", places.bit_length() - 1)
    table, source = PairRows(VOCAB, SUCCESSORS, CPU), random.Random(3)
    kept: dict[int, tuple[Pair, list[int]]] = {}  # by place
    for _ in range(30):
        pairs = [(source.randrange(-1, VOCAB), source.randrange(VOCAB)) for _ in range(20)]
        rows = [_row(source.randrange(VOCAB)) for _ in pairs]
        before, tokens = torch.tensor(pairs).unbind(1)
        table.update(before, tokens, torch.tensor(rows))
        for (above, token), row in zip(pairs, rows, strict=True):
            product = (above * VOCAB + token) * 0x9E3779B97F4A7C15 % 2**64
            kept[product // (2**64 // places)] = (above, token), row
    expected = dict(kept.values())
    assert len(expected) > (10 if places == 2**4 else 400)
    every = torch.cartesian_prod(torch.arange(-1, VOCAB), torch.arange(VOCAB))
    read = table.read(every[:, 0], every[:, 1], torch.zeros(len(every), SUCCESSORS, dtype=torch.int64)).tolist()
    for (above, token), row in zip(every.tolist(), read, strict=True):
        assert table.row(above, token) == expected.get((above, token))
        assert row == expected.get((above, token), [0] * SUCCESSORS)
    found, rows_of = table.known()
    assert [tuple(pair) for pair in found.tolist()] == sorted(expected)
    assert rows_of.tolist() == [expected[pair] for pair in sorted(expected)]


@pytest.mark.parametrize("method", ["recycle:context=2,budget=20", "outpace:draft=none,budget=9"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_are_what_the_target_said_after_two_tokens(method: str, temperature: float) -> None:
    """Guards against the engine showing a wrong token before a chunk or a tree, in batches and across chunks."""
    target = LoopTarget(VOCAB, seed=5, max_slots=3)
    proposer = build_proposer(parse_method(method), toy_context(VOCAB))
    prompts = [[1, 2, 3], [4, 4, 5, 1, 2], [9], [0, 11, 7, 6, 30, 31]]
    params = [SamplingParams(max_new_tokens=12, temperature=temperature, seed=seed) for seed in range(4)]
    decode(Engine(target, prefill_chunk=2), prompts, params, [proposer] * 4)
    matrix = matrix_of(proposer)
    assert matrix is not None
    known = _known(matrix)
    assert len(known) > 30
    for (before, token), row in known.items():
        ids = [token] if before == NO_TOKEN else [before, token]
        assert row == target.logits(ids, 0).topk(SUCCESSORS).indices.tolist()


@pytest.mark.parametrize("private", [False, True])
def test_a_source_reads_the_token_before_each_node(private: bool) -> None:
    """Guards against a level read behind its neighbours instead of its parents, or in another request's matrix."""
    source = TokenRecycling(_taught({(1, 2): 10, (2, 10): 20, (2, 11): 30}, {2: 5, 10: 6}), private)
    states = [source.open(0), source.open(1)]
    frontier = Frontier(torch.tensor([2, 2]), [0, 1], [-1, -1], before=torch.tensor([1, 3]))
    assert source.expand(states, frontier, 2).tokens.tolist() == [_row(10)[:2], _row(5)[:2]]
    below = Frontier(torch.tensor([10, 11, 10]), [0, 0, 1], [0, 0, 1], before=torch.tensor([2, 2, 9]))
    assert source.expand(states, below, 2).tokens.tolist() == [_row(20)[:2], _row(30)[:2], _row(6)[:2]]


def test_a_fill_reads_the_token_before_each_node() -> None:
    """Guards against pairs of a template's neighbours, of a tail without the drafted token before it, of another
    request, and against continuations below a node that is unknown."""
    matrix = _taught({(1, 2): 10, (2, 10): 20, (10, 20): 25, (7, 2): 30}, {11: 15, 3: 12})
    fill = MatrixRetriever(matrix, [(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
    requests = [draft_request([1, 2], 9, 9), draft_request([7, 2], 9, 9), draft_request([3], 9, 9)]
    paths = [torch.tensor([2]), torch.tensor([2]), torch.tensor([3])]
    first, second, third = fill.prepare([matrix] * 3, requests, paths)
    assert first.tokens.tolist() == [2, 10, 11, 20, 15, 25]
    assert second.tokens.tolist()[:3] == [2, 30, 31]
    assert third.tokens.tolist()[:3] == [3, 12, 13]
    assert second.tokens.tolist()[3:5] == third.tokens.tolist()[3:5] == [UNKNOWN] * 2
    tails = [torch.tensor([8, 1, 2]), torch.tensor([2, 7, 2]), torch.tensor([8, 9, 3])]
    assert [one.tokens.tolist()[1] for one in fill.prepare([matrix] * 3, requests, tails)] == [10, 30, 12]


@pytest.mark.parametrize("context", [1, 2])
def test_files_keep_pairs(tmp_path: Path, context: int) -> None:
    """Guards against pairs lost on the way to a file, a reset that forgets them, copies that share them, and files of
    one context that the other cannot begin with."""
    matrix, file = _taught({(1, 2): 10, (NO_TOKEN, 5): 20}, {2: 30}), tmp_path / "warm.safetensors"
    assert save_matrix(file, matrix) == 1
    content = load_file(file)
    assert content["pairs"].tolist() == [[NO_TOKEN, 5], [1, 2]]
    assert sum(tensor.nbytes for tensor in content.values()) == 36 + 2 * 40
    loaded = load_matrix(file, VOCAB, CPU, context)
    expected = {(1, 2): _row(10), (NO_TOKEN, 5): _row(20)} if context == 2 else {}
    assert _known(loaded) == expected
    assert loaded.successors[2].tolist() == _row(30)
    copied = loaded.copy()
    copied.update(torch.tensor([7]), torch.tensor([_row(1)]), torch.tensor([6]))
    assert _known(copied) == expected | ({(6, 7): _row(1)} if context == 2 else {})
    assert _known(loaded) == expected
    copied.reset()
    assert _known(copied) == expected
    old = tmp_path / "old.safetensors"
    single = TransitionMatrix(VOCAB, CPU)
    single.update(torch.tensor([2]), torch.tensor([_row(3)]))
    save_matrix(old, single)
    assert set(load_file(old)) == {"tokens", "successors"}
    begun = load_matrix(old, VOCAB, CPU, context)
    assert (begun.successors[2].tolist(), _known(begun)) == (_row(3), {})
