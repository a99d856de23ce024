"""The lattice as a source: its probabilities, its best-first trees, and both on the kernels and without them."""

from typing import Any

import pytest
import torch

from outpace.core.drafting import Frontier
from outpace.core.params import SamplingParams
from outpace.drafters.lattice import reference
from outpace.drafters.lattice.methods import LatticeProposer
from outpace.engine.engine import Engine
from outpace.kernels import lattice as kernel
from outpace.kernels.lattice import LatticeRows
from outpace.sampling.noise import noise_key
from outpace.testing import decode
from outpace.testing.toy import draft_request
from outpace.trees.proposer import EmptyDraft
from outpace.trees.shapes.beam import BestFirst, BestFirstConfig
from tests.unit.drafters.source.learned import PROMPTS, proposer_of, source_of
from tests.unit.drafters.source.test_learned import prefilled
from tests.unit.models.tiny import needs_kernels, tiny_config, tiny_target

DEPTH, WIDTH, RANK, IDS = 5, 6, 11, 40


def block(seed: int, **changes: Any) -> LatticeRows:
    """A random block whose candidates have most of the probability at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(DEPTH, IDS, generator=generator) * 2).log_softmax(dim=-1)
    best = logits.topk(WIDTH)
    values: dict[str, Any] = {
        "pending": torch.randn(RANK, generator=generator),
        "a": torch.randn(IDS, RANK, generator=generator),
        "b": torch.randn(IDS, RANK, generator=generator),
        "places": best.indices,
        "ids": best.indices + 100,
        "gates": torch.randn(DEPTH, RANK, generator=generator) * 0.5,
        "base": best.values,
        "others": torch.log1p(-best.values.exp().sum(dim=1)),
        "sharpness": torch.rand(DEPTH, generator=generator) + 0.5,
        "token": 7,
    }
    return LatticeRows(**values | changes)


@needs_kernels
@pytest.mark.parametrize("is_keyed", [False, True], ids=["greedy", "keyed"])
def test_scores_and_trees_of_the_kernels_are_those_of_the_reference(is_keyed: bool) -> None:
    """Guards against a kernel that scores other pairs, or grows other trees, than the Python it replaces."""
    rows = []
    for seed in range(8):
        keys = [noise_key(seed, 0, 4 + depth) for depth in range(DEPTH)] if is_keyed else []
        made = block(seed, budget=3 * seed, max_depth=DEPTH - seed % 3, temperature=0.7 if is_keyed else 1.0, keys=keys)
        endings = made.ids[0, :2].tolist() if seed % 2 else []
        rows.append(block(seed, **{**vars(made), "endings": endings}))
    for found, wanted in zip(kernel.weave(rows), reference.weave(rows), strict=True):
        torch.testing.assert_close(found.scores[0, 0], wanted.scores[0, 0])
        torch.testing.assert_close(found.scores[1:], wanted.scores[1:], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.log_mass[1:], wanted.log_mass[1:], atol=1e-5, rtol=1e-5)
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.parents.tolist() == wanted.parents.tolist()
        torch.testing.assert_close(found.path_scores, wanted.path_scores, atol=1e-4, rtol=1e-5)


def test_probabilities_of_candidates_and_none_of_them_sum_to_one() -> None:
    """Guards against edges that claim the probability of ids outside the candidates: with scores of pairs at zero, an
    edge has exactly the softmax of the base logits over all ids."""
    plain = block(1, gates=torch.zeros(DEPTH, RANK), sharpness=torch.ones(DEPTH))
    scores, log_mass = reference.pair_scores(plain)
    edges = scores.log_softmax(dim=2) + log_mass[..., None]
    torch.testing.assert_close(edges, plain.base[:, None].expand_as(edges))
    moved = block(1)
    scores, log_mass = reference.pair_scores(moved)
    edges = scores.log_softmax(dim=2) + log_mass[..., None]
    others = (moved.others * moved.sharpness)[:, None]
    none = others - torch.logaddexp(scores.logsumexp(dim=2), others)
    torch.testing.assert_close(edges.exp().sum(dim=2) + none.exp(), torch.ones(DEPTH, WIDTH))
    assert float((edges - moved.base[:, None]).abs().max()) > 0.5


def test_the_tree_has_the_most_probable_paths_of_all() -> None:
    """Guards against a search that stops at a level or prefers breadth: every path is compared."""
    one = block(3, budget=17, max_depth=4, sharpness=torch.ones(DEPTH))
    scores, log_mass = reference.pair_scores(one)
    edges = scores.log_softmax(dim=2) + log_mass[..., None]
    paths: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(4):
        longer: dict[tuple[int, ...], float] = {}
        for path, score in paths.items():
            if len(path) < 4:
                above = path[-1] if path else 0
                longer |= {(*path, at): score + float(edges[len(path), above, at]) for at in range(WIDTH)}
        paths |= longer
    best = sorted((score for path, score in paths.items() if path), reverse=True)[:17]
    (found,) = reference.weave([one])
    torch.testing.assert_close(found.path_scores[1:], torch.tensor(best), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["lattice", "lattice-subset"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_grown_tree_is_what_levels_would_answer(kind: str, temperature: float) -> None:
    """Guards against a call that ranks by other scores than `expand`: each node's score is the sum along its path."""
    target = tiny_target(tiny_config("llama"))
    source, ids = source_of(kind, target), PROMPTS[1]
    proposer = LatticeProposer(source, BestFirst(BestFirstConfig()), 12)
    request = draft_request(ids, 12, 20, 3, temperature=temperature)
    grown = proposer.made(False, of_source=prefilled(source, target, 0, ids))
    (tree,) = proposer.propose([grown], [request])
    assert len(tree) == 13
    assert tree.scores is not None
    state = prefilled(source, target, 1, ids)
    source.begin([state], [request])
    level, parents = [0], [-1]
    scores = {0: 0.0}
    while below := [node for node in range(1, len(tree)) if tree.topology.parents[node] in level]:
        tokens = torch.tensor([int(tree.tokens[node]) for node in level])
        found = source.expand([state], Frontier(tokens, [0] * len(level), parents), source.width)
        for node in below:
            place = level.index(tree.topology.parents[node])
            rank = found.tokens[place].tolist().index(int(tree.tokens[node]))
            scores[node] = scores[level[place]] + float(found.log_probs[place, rank])
        parents = [level.index(tree.topology.parents[node]) for node in below]
        level = below
    expected = torch.tensor([scores[node] for node in range(len(tree))])
    torch.testing.assert_close(expected, tree.scores, atol=1e-4, rtol=1e-4)
    assert tree.scores[1:].tolist() == sorted(tree.scores[1:].tolist(), reverse=True)


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3},
     {"temperature": 1.0, "verification": "rejection"}],
    ids=["greedy", "sampled", "warped", "rejection"],
)  # fmt: skip
def test_best_first_trees_change_no_answer(
    options: dict[str, Any], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against trees grown in one call that break a request, in a batch and for requests that need levels."""
    if kernels == "off":
        monkeypatch.setenv("OUTPACE_KERNELS", "off")
    target = tiny_target(tiny_config("llama"))
    params = [SamplingParams(max_new_tokens=12 + at, seed=at, **options) for at in range(3)]
    plain = decode(Engine(target), PROMPTS, params, [EmptyDraft()] * 3)
    proposer = LatticeProposer(source_of("lattice", target), BestFirst(BestFirstConfig(depth=4)), 9)
    sessions = decode(Engine(target, prefill_chunk=8), PROMPTS, params, [proposer] * 3)
    for wanted, found in zip(plain, sessions, strict=True):
        assert found.metrics.drafted > 20
        if options.get("verification") != "rejection":
            assert found.generated == wanted.generated


def test_a_tree_under_rejection_does_not_depend_on_the_options_of_others() -> None:
    """Guards against trees whose nodes have other numbers beside a request that needs levels: the noise that accepts a
    node is keyed by its number, so that the same seed would say something else."""
    source, ids = source_of("lattice", tiny_target(tiny_config("llama")), noise=False), PROMPTS[0]
    own = draft_request(ids, 9, 9, temperature=1.0, verification="rejection")
    assert source.grows([draft_request(ids, 9, 9)])
    assert source.grows([own]) == source.grows([own, draft_request(ids, 9, 9, repetition_penalty=1.3)])


def test_rejection_draws_from_the_candidates() -> None:
    """Guards against chains under rejection whose stated distribution is not the one that they were drawn from."""
    target = tiny_target(tiny_config("llama"))
    source, ids = source_of("lattice", target), PROMPTS[0]
    request = draft_request(ids, 5, 5, 3, temperature=1.0, verification="rejection")
    proposer: Any = proposer_of("chain", source)
    (tree,) = proposer.propose([proposer.made(False, of_source=prefilled(source, target, 0, ids))], [request])
    assert tree.draft_probs is not None
    assert set(tree.draft_probs) == set(range(5))
    for node, distribution in tree.draft_probs.items():
        assert float(distribution.sum()) == pytest.approx(1.0, abs=1e-5)
        assert int((distribution > 0).sum()) == source.width
        assert float(distribution[tree.tokens[node + 1]]) > 0
