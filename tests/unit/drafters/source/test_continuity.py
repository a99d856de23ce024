"""DART's search with and without an n-gram table, against the formula in plain Python."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core.drafting import Frontier
from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Needs
from outpace.core.tree import DraftTree
from outpace.drafters.dart.net import DartConfig, DartNet
from outpace.drafters.dart.ngrams import CANDIDATES, Continuity, NGrams, count_ngrams
from outpace.drafters.dart.source import DartSource, DartState
from outpace.engine.engine import Engine
from outpace.sampling.scores import keyed_scores
from outpace.testing import assert_lossless
from outpace.testing.sources import Path
from outpace.testing.toy import draft_request
from outpace.trees.proposer import GrowingProposer, StaticProposer
from outpace.trees.shapes.beam import Search, SearchConfig
from outpace.trees.shapes.rank_paths import Chain
from tests.toys import node_paths
from tests.unit.drafters.source.learned import PROMPTS, SIZES, random_net
from tests.unit.models.tiny import VOCAB, random_ids, tiny_config, tiny_target

DEPTH, DECAY = 6, 0.9
# Few ids, so that many contexts of a search are known.
NGRAMS = count_ngrams([[token % 40 for token in random_ids(3000, seed)] for seed in range(3)], VOCAB, 5000)
CONTINUITY = Continuity(NGRAMS, search_decay=DECAY)
LogProb = Callable[[int, int, int], float]


def guesses(seed: int) -> Tensor:
    return torch.randn(DEPTH, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def log_distribution(ngrams: NGrams) -> LogProb:
    every = torch.arange(VOCAB)[None]
    rows: dict[tuple[int, int], list[float]] = {}

    def distribution(first: int, second: int, token: int) -> float:
        if (first, second) not in rows:
            rows[first, second] = ngrams.log_probs(torch.tensor([[first, second]]), every)[0].tolist()
        return rows[first, second][token]

    return distribution


def searched(logits: Tensor, ids: Sequence[int], budget: int, distribution: LogProb | None) -> set[Path]:
    """The authors' search: level by level w_l * (0.9^l * log p + 0.5 * log p_ngram), 25 children, a beam of 20.

    With a distribution, the candidates are the best 64 of a depth.
    """
    level_rows = logits.double().log_softmax(dim=-1).tolist()
    nodes: list[tuple[float, Path]] = [(0.0, ())]
    found: list[tuple[float, Path]] = []
    for level, log_q in enumerate(level_rows):
        children: list[tuple[float, Path]] = []
        fade = 0.9**level
        best = sorted(range(VOCAB), key=lambda token: -log_q[token])[:64]
        for score, path in nodes:
            scores = {token: fade * log_q[token] for token in best}
            if distribution is not None:
                first, second = [-1, *ids, *path][-2:]
                scores = {token: scores[token] + 0.5 * distribution(first, second, token) for token in best}
            ranked = sorted(scores, key=lambda token: -scores[token])[:25]
            children += [(score + (level + 1) ** -0.7 * scores[token], (*path, token)) for token in ranked]
        children.sort(reverse=True)
        found += children
        nodes = children[:20]
    return {(), *(path for _, path in sorted(found, reverse=True)[:budget])}


def search(logits: Sequence[Tensor], requests: Sequence[Any], continuity: Continuity | None) -> list[DraftTree]:
    proposer = GrowingProposer(GuessSource(logits, continuity), Search(SearchConfig()), 60)
    return proposer.propose([proposer.open(slot) for slot in range(len(requests))], requests)


@pytest.mark.parametrize("continuity", [None, CONTINUITY], ids=["alone", "ngrams"])
def test_the_search_is_the_papers(continuity: Continuity | None) -> None:
    """Guards against any slip in the formula: a level counted twice or from 1."""
    distribution = None if continuity is None else log_distribution(continuity.ngrams)
    for seed in range(4):
        rows = [guesses(3 * seed + place) for place in range(3)]
        prompts, budgets = [[seed], [1, 2, 3], [seed, 39]], [60, 7, 30]
        requests = [draft_request(ids, budget, 9) for ids, budget in zip(prompts, budgets, strict=True)]
        for tree, logits, request in zip(search(rows, requests, continuity), rows, requests, strict=True):
            paths = node_paths(tree)
            assert len(set(paths)) == len(paths)
            assert set(paths) == searched(logits, request.ids, request.budget, distribution)
            assert tree.topology.max_depth > 1 or request.budget < 30


@pytest.mark.parametrize("heat", [0.0, 0.7])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=str)
def test_company_changes_nothing(heat: float, options: dict[str, Any]) -> None:
    """Guards against contexts and scores of a neighbour in the batch, also one whose options look back."""
    mixed = [{}, options, options]
    requests = [
        draft_request(PROMPTS[place], 40 - 9 * place, 9 - 3 * place, place, temperature=heat, **mixed[place])
        for place in range(3)
    ]
    rows = [guesses(place) for place in range(3)]
    for tree, logits, request in zip(search(rows, requests, CONTINUITY), rows, requests, strict=True):
        (alone,) = search([logits], [request], CONTINUITY)
        assert tree.tokens.tolist() == alone.tokens.tolist()
        assert tree.topology.parents == alone.topology.parents


@pytest.mark.parametrize("decay", [None, DECAY])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "repetition_penalty": 1.4}], ids=str)
def test_scores_are_a_laws_under_the_requests_noise(params: dict[str, Any], decay: float | None) -> None:
    """Guards against an n-gram term added behind the noise, penalties that miss its candidates, ids beyond them."""
    logits, request = guesses(1), draft_request([4, 9], 60, 9, 5, **params)
    source, state = begun(logits, request, Continuity(NGRAMS, search_decay=decay))
    paths: list[list[int]] = [[]]
    frontier = Frontier(torch.tensor([9]), [0], [-1])
    for depth in range(3):
        found = source.expand([state], frontier, VOCAB)
        tokens, log_probs = found.tokens, found.log_probs
        assert log_probs is not None
        assert tokens.shape[1] == CANDIDATES
        contexts = torch.tensor([[4, 9, *path][-2:] for path in paths])
        every = torch.arange(VOCAB).expand(len(paths), -1)
        moved = logits[depth] + 0.5 / (decay or 1.0) ** depth * NGRAMS.log_probs(contexts, every)
        moved[:, logits[depth] < logits[depth].topk(CANDIDATES).values[-1]] = -torch.inf
        expected = keyed_scores(moved, [request.sampling] * len(paths), [depth] * len(paths), True, paths)
        if decay is not None:
            expected += (moved.exp().sum(dim=1) / logits[depth].exp().sum()).log()[:, None]
        torch.testing.assert_close(log_probs, expected.gather(1, tokens), atol=1e-5, rtol=1e-5)
        assert bool((log_probs.diff(dim=1) <= 0).all())
        assert bool((log_probs <= 0).all())
        places = [place for place in range(len(paths)) for _ in range(2)]
        frontier = Frontier(tokens[:, :2].flatten(), [0] * len(places), places)
        paths = [[*path, token] for path, row in zip(paths, tokens[:, :2].tolist()) for token in row]


def test_guesses_never_add_up_to_more_than_one() -> None:
    """Guards against mass above 1 by rounding: a child could outscore its parent, and the best nodes be no tree."""
    for seed in range(150):
        logits = (guesses(seed) + seed % 30).index_fill(1, torch.arange(CANDIDATES, VOCAB), -200.0)
        source, state = begun(logits, draft_request([3, 3], 60, 9), Continuity(NGRAMS, 0.0, DECAY))
        source.expand([state], Frontier(torch.tensor([3]), [0], [-1]), 1)
        assert -1e-5 < float(state.mass) <= 0


class Unread(Tensor):
    """A tensor that fails when its values, or what was computed from them, are wanted on the host."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = {"tolist", "item", "cpu", "numpy", "nonzero", "unique", "masked_select", "__iter__"}
        reads |= {"__bool__", "__int__", "__index__", "__float__"}
        if func.__name__ in reads:
            raise AssertionError(f"{func.__name__} waits for the device")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"repetition_penalty": 1.3}], ids=str)
def test_drafted_tokens_are_not_read_back(params: dict[str, Any]) -> None:
    """Guards against a wait for the device in every level; options that look back need one."""
    source, state = begun(guesses(0), draft_request([4, 9], 60, 9, **params), CONTINUITY)
    pending = torch.tensor([9]).as_subclass(Unread)
    tokens = source.expand([state], Frontier(pending, [0], [-1]), 3).tokens
    below = Frontier(tokens[0].as_subclass(Unread), [0] * 3, [0] * 3)
    if "repetition_penalty" in params:
        with pytest.raises(AssertionError, match="waits for the device"):
            source.expand([state], below, 3)
    else:
        log_probs = source.expand([state], below, 3).log_probs
        assert isinstance(log_probs, Unread), "the scores depend on the tokens"


@pytest.mark.parametrize("shape", ["search", "chain"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"repetition_penalty": 1.3}], ids=str)
def test_lossless(shape: str, options: dict[str, Any]) -> None:
    """Guards against an n-gram table that reaches what the target says, alone and in a ragged batch."""
    target = tiny_target(tiny_config("llama"))
    net = random_net(DartNet(DartConfig(**SIZES, taps=(0, 1, 2), draft_vocab_size=60, draft_length=5)))
    net.d2t.copy_(torch.arange(60) * 2 - torch.arange(60))  # even ids only

    def proposer(_: object) -> GrowingProposer | StaticProposer:
        source = DartSource(net, target, continuity=CONTINUITY)
        if shape == "chain":
            return StaticProposer(source, Chain(), 6, torch.device("cpu"))
        return GrowingProposer(source, Search(SearchConfig()), 30)

    params = [SamplingParams(max_new_tokens=24, seed=seed, **options) for seed in range(3)]
    sessions = assert_lossless(lambda: Engine(target, prefill_chunk=8), proposer, PROMPTS, params)
    assert all(session.metrics.drafted for session in sessions)
    assert all(session.metrics.draft_passes <= session.metrics.steps for session in sessions), "one pass per round"


def test_a_table_of_the_same_law_finds_longer_paths() -> None:
    """Guards against n-grams that are counted, filed and asked, and help nothing."""
    size, generator = 64, torch.Generator().manual_seed(7)
    step = torch.zeros(size, size)  # [V, V] next token's distribution
    for share in (0.6, 0.25, 0.15):
        step[torch.arange(size), torch.randperm(size, generator=generator)] += share
    text = [0]
    for _ in range(6000):
        text.append(int(torch.multinomial(step[text[-1]], 1, generator=generator)))
    continuity = Continuity(count_ngrams([text[:5000]], size, 10_000), search_decay=DECAY)
    lengths = []
    for known in (None, Continuity(continuity.ngrams), continuity):
        found = 0
        for end in range(5010, 5610, 10):
            distribution, rows = step[text[end - 1]], []
            for _ in range(DEPTH):
                rows.append(distribution.clamp(min=1e-9).log())
                distribution = distribution @ step
            (tree,) = search([torch.stack(rows)], [draft_request(text[:end], 60, 9)], known)
            paths = set(node_paths(tree))
            found += max(length for length in range(DEPTH + 1) if tuple(text[end : end + length]) in paths)
        lengths.append(found)
    alone, as_distribution, as_search = lengths
    assert as_search > 1.25 * alone
    assert as_search > 1.1 * as_distribution


class GuessSource(DartSource):
    """DART's guesses from logits of each slot, with or without an n-gram table."""

    def __init__(self, logits: Sequence[Tensor], continuity: Continuity | None = None) -> None:
        self.needs, self._noise, self._of_slots = Needs(), True, logits
        self._continuity, self.shares = continuity, continuity is None

    def open(self, slot: int, alone: bool = False) -> DartState:
        return DartState(slot)

    def begin(self, states: Sequence[DartState], requests: Sequence[DraftRequest]) -> list[int]:
        for state, request in zip(states, requests, strict=True):
            state.request = request
        return [min(request.max_depth, DEPTH) for request in requests]

    def _guess(self, states: Sequence[DartState]) -> Tensor:
        return torch.stack([self._of_slots[state.slot] for state in states])


def begun(logits: Tensor, request: DraftRequest, continuity: Continuity) -> tuple[GuessSource, DartState]:
    """A source of these guesses, and the state of a request whose round has begun."""
    source = GuessSource([logits], continuity)
    state = source.open(0)
    source.begin([state], [request])
    return source, state
