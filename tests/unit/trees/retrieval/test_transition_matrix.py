"""The transition matrix: its rows are the target's last word on a token; shared, private, as a file, of texts."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace.core.params import SamplingParams
from outpace.core.protocols import NO_TOKEN, Observation, PromptChunk, Proposer
from outpace.engine.engine import Engine
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.methods.catalog import build_proposer, parse_method
from outpace.methods.stores import matrix_of
from outpace.testing import ToyTarget, decode, draft_request, toy_context
from outpace.trees.proposer import StaticProposer
from outpace.trees.retrieval import transition_matrix, warm_file
from outpace.trees.retrieval.transition_matrix import SUCCESSORS, TokenRecycling, TransitionMatrix
from outpace.trees.retrieval.warm_file import KIND, TransitionRanks, load_matrix, save_matrix
from outpace.trees.shapes.rank_paths import RecyclingTemplate

CPU = torch.device("cpu")
VOCAB = 12
PROMPTS = [[1, 2, 3], [4, 4, 5, 1, 2], [9], [0, 11, 7, 6], [2, 1]]


def _rows(*firsts: int) -> torch.Tensor:
    """Rows of 8 ids, told apart by their first."""
    return torch.stack([torch.arange(first, first + SUCCESSORS) for first in firsts])


def _recycle(options: str = "") -> Proposer:
    return build_proposer(parse_method(f"recycle:budget=20{options}"), toy_context(VOCAB))


def _kept(proposer: Proposer) -> TransitionMatrix:
    matrix = matrix_of(proposer)
    assert matrix is not None
    return matrix


class Recorder(TokenRecycling):
    """Token Recycling that writes down, beside its matrix, the best ids of every distribution it is shown."""

    def __init__(self, target: ToyTarget) -> None:
        super().__init__(TransitionMatrix(VOCAB, CPU))
        self.target, self.last, self.most = target, dict[int, list[int]](), 0

    def prefill(self, states: Sequence[Any], chunks: Sequence[PromptChunk]) -> None:
        super().prefill(states, chunks)
        for chunk in chunks:  # a toy's committed ids tell where the chunk stands
            committed = next(
                ids for ids in self.target.committed.values() if ids[-len(chunk.tokens) :] == chunk.tokens.tolist()
            )
            start = len(committed) - len(chunk.tokens)
            for place in range(start, len(committed)):
                ids = committed[: place + 1]
                self._see(ids[-1], self.target.logits(ids, len(ids)))

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None:
        super().observe(states, observations)
        self.most = max(self.most, len(observations))
        for observation in observations:
            for token, logits in zip(observation.tree.tokens.tolist(), observation.outputs.logits, strict=True):
                self._see(token, logits)

    def _see(self, token: int, logits: torch.Tensor) -> None:
        self.last[token] = logits.topk(SUCCESSORS).indices.tolist()


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "repetition_penalty": 5.0, "bad_words_ids": ((3,), (8,))}]
)
def test_a_row_is_the_top_of_the_last_distribution_seen_at_its_token(options: dict[str, Any]) -> None:
    """Guards against rows of an earlier round or another request, and logits after penalties and bans, a path's own."""
    target = ToyTarget(VOCAB, seed=5, max_slots=3)
    source = Recorder(target)
    proposer = StaticProposer(source, RecyclingTemplate(), 20, CPU)
    params = [SamplingParams(max_new_tokens=9, seed=seed, **options) for seed in range(len(PROMPTS))]
    decode(Engine(target, prefill_chunk=2), PROMPTS, params, [proposer] * len(PROMPTS))
    assert source.most == 3, "requests shared rounds"
    assert len(source.last) == VOCAB
    assert {token: source.matrix.successors[token].tolist() for token in source.last} == source.last


def test_the_last_of_equal_tokens_wins() -> None:
    """Guards against a result that depends on how threads interleave when one token is verified twice in a round."""
    matrix = TransitionMatrix(50, CPU)
    for _ in range(20):
        matrix.reset()
        tokens = torch.tensor([3, 7, 3, 3, 9, 7] * 200)
        matrix.update(tokens, torch.cat([_rows(1, 2, 3, 4, 5, 6)] * 199 + [_rows(11, 12, 13, 14, 15, 16)]))
        assert matrix.successors[3].tolist() == list(range(14, 22))
        assert matrix.successors[7].tolist() == list(range(16, 24))
        assert matrix.successors[9].tolist() == list(range(15, 23))
    assert matrix.successors[0].eq(0).all()


def test_vocabularies_too_small_are_refused() -> None:
    """Guards against an index error deep in a round: eight successors need eight tokens."""
    with pytest.raises(InvalidRequest, match="at least 8 tokens, not 5"):
        TransitionMatrix(5, CPU)


def test_private_matrices_learn_from_their_own_request_and_are_forgotten() -> None:
    """Guards against requests that teach each other or an engine's matrix, and what a matrix costs being told wrong."""
    proposer = _recycle(",matrix=private")
    assert isinstance(proposer, StaticProposer)
    assert matrix_of(proposer) is None, "nothing is kept from request to request"
    states = [proposer.open(0), proposer.open(1)]
    chunks = [PromptChunk(torch.tensor([token]), _rows(first)) for token, first in ((5, 1), (6, 2))]
    proposer.prefill(states, chunks)
    matrices = [state.of_source for state in states]
    assert [matrix.rows()[0].tolist() for matrix in matrices] == [[5], [6]]
    assert not proposer.open(0).of_source.successors.any()
    assert matrices[0].nbytes == matrices[0].successors.numel() * 8 == VOCAB * 64
    shared = _recycle()
    together = [shared.open(0), shared.open(1)]
    shared.prefill(together, chunks)
    assert together[0].of_source is together[1].of_source is matrix_of(shared)
    assert _kept(shared).rows()[0].tolist() == [5, 6]


def test_what_was_saved_is_loaded_and_returned_to(tmp_path: Path) -> None:
    """Guards against a file of another vocabulary taken for this one's, rows lost on the way, a reset that forgets the
    file or keeps what came after it, and private requests that start from nothing."""
    matrix, file = TransitionMatrix(VOCAB, CPU), tmp_path / "matrix.safetensors"
    matrix.update(torch.tensor([3, 0]), torch.stack([torch.arange(8), torch.arange(4, 12)]))
    assert save_matrix(file, matrix) == 2
    content = load_file(file)
    assert sum(tensor.nbytes for tensor in content.values()) == 2 * 36
    proposer = _recycle(f",warm={file}")
    loaded = _kept(proposer)
    assert torch.equal(loaded.successors, matrix.successors)
    loaded.update(torch.tensor([3, 4]), _rows(2, 3))
    assert not torch.equal(loaded.successors, matrix.successors)
    proposer.reset()
    assert torch.equal(loaded.successors, matrix.successors)
    private = _recycle(f",warm={file},matrix=private")
    own = private.open(0).of_source
    assert torch.equal(own.successors, matrix.successors)
    own.update(torch.tensor([3]), _rows(2))
    assert torch.equal(private.open(0).of_source.successors, matrix.successors)
    with pytest.raises(ModelError, match="made for 12 ids, and the target has 13"):
        load_matrix(file, 13, CPU)
    empty = tmp_path / "empty.safetensors"
    assert save_matrix(empty, TransitionMatrix(VOCAB, CPU)) == 0
    assert not load_matrix(empty, VOCAB, CPU).successors.any()


WRONG: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "repeated token": lambda tokens, rows: (tokens.clamp(max=2), rows),
    "id too large": lambda tokens, rows: (tokens, rows + 1),
    "negative id": lambda tokens, rows: (tokens - 3, rows),
    "equal ids": lambda tokens, rows: (tokens, rows.clamp(max=10)),
    "narrow": lambda tokens, rows: (tokens, rows[:, :7].contiguous()),
    "int64": lambda tokens, rows: (tokens, rows.long()),
    "tokens in a column": lambda tokens, rows: (tokens[:, None].contiguous(), rows),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_files_that_are_no_matrices_are_refused(tmp_path: Path, wrong: str) -> None:
    """Guards against an index error, or rows that look unseen, in the middle of an answer."""
    tokens, rows = WRONG[wrong](torch.tensor([2, 5], dtype=torch.int32), _rows(0, 4).int())
    file = tmp_path / "bad.safetensors"
    save_file({"tokens": tokens, "successors": rows}, file, {"format": KIND.format, "vocab_size": str(VOCAB)})
    with pytest.raises(ModelError, match="8 different int32 ids from 0 to 11; make one with `outpace warmup`"):
        load_matrix(file, VOCAB, CPU)


def test_trees_follow_the_matrix() -> None:
    """Guards against a template read with parents or ranks mixed up: each node succeeds its parent."""
    matrix = TransitionMatrix(200, CPU)
    matrix.successors = torch.randint(0, 200, (200, SUCCESSORS), generator=torch.Generator().manual_seed(0))
    proposer = StaticProposer(TokenRecycling(matrix), RecyclingTemplate(), 80, CPU)
    requests = [draft_request([17], 80, 9), draft_request([99, 5], 13, 3), draft_request([1], 0, 9)]
    trees = proposer.propose([proposer.open(slot) for slot in range(3)], requests)
    assert [len(tree) - 1 for tree in trees] == [80, 13, 0]
    assert trees[1].topology.max_depth <= 3
    for tree, request in zip(trees, requests, strict=True):
        assert int(tree.tokens[0]) == request.ids[-1]
        for node in range(1, len(tree)):
            parent_token = int(tree.tokens[tree.topology.parents[node]])
            assert int(tree.tokens[node]) in matrix.successors[parent_token].tolist()
    first_level = [int(trees[0].tokens[node]) for node in trees[0].topology.children[0]]
    assert first_level == matrix.successors[17].tolist()


WIDE, EXPECTED = 40, 12  # ids of the texts below, and those with a probability at each place


def texts(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Ids from few tokens, so that keys come again, with the likeliest ids after each and probabilities."""
    draws = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(1, 30, (), generator=draws))
        ids = torch.randint(0, 6, (length,), generator=draws)
        top = torch.stack([torch.randperm(WIDE, generator=draws)[:EXPECTED] for _ in range(length)])
        probs = torch.rand(length, EXPECTED, generator=draws).sort(dim=1, descending=True).values
        made.append((ids, top, probs))
    return made


def added(given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> TransitionMatrix:
    ranks = TransitionRanks(WIDE)
    for one in given:
        ranks.add(*one)
    return ranks.matrix()


def test_ranks_are_by_the_sum_over_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the last word instead of all, keys of other contexts, and sums lost where texts come in parts."""
    given = texts(60)
    masses: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for ids, top, probs in given:
        for place, token in enumerate(ids.tolist()):
            before = int(ids[place - 1]) if place else NO_TOKEN
            keys: tuple[tuple[int, ...], ...] = ((token,), (before, token))
            for key in keys:
                masses[key].update(dict(zip(top[place].tolist(), probs[place].double().tolist(), strict=True)))
    whole = added(given)
    monkeypatch.setattr(warm_file, "AT_ONCE", 500)
    for made in (whole, added(given)):
        known = made.rows()
        assert known.tokens.tolist() == sorted(key[0] for key in masses if len(key) == 1)
        assert [tuple(pair) for pair in known.pairs.tolist()] == sorted(key for key in masses if len(key) == 2)
        for key, row in (*zip(known.tokens[:, None], known.successors, strict=True),
                         *zip(known.pairs, known.pair_successors, strict=True)):  # fmt: skip
            best = masses[tuple(key.tolist())].most_common(SUCCESSORS)
            assert row.tolist() == [token for token, _ in best], "masses are of real numbers, and never alike"


def test_of_pairs_with_one_place_the_frequent_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a table that rare pairs empty of common ones."""
    monkeypatch.setattr(transition_matrix, "PLACES", 1)
    monkeypatch.setattr(transition_matrix, "PLACE_BITS", 0)
    monkeypatch.setattr(transition_matrix, "_places", lambda keys: torch.zeros_like(keys))
    top, probs = torch.arange(8)[None], torch.full((1, 8), 0.1)
    common = torch.tensor([3, 4] * 9), top.expand(18, 8), probs.expand(18, 8)
    rare = [(torch.tensor([token]), top, probs) for token in (1, 2, 30)]
    for given in ([common, *rare], [*rare, common]):
        known = added(given).rows()
        assert known.pairs.tolist() == [[3, 4]]
        assert known.tokens.tolist() == [1, 2, 3, 4, 30], "rows of one token have no places to share"
