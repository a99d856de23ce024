"""The beam with level weights, DART's search: what a level counts, what is expanded, what is kept."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from outpace.testing.sources import Path, ToySource, blend, node_paths
from outpace.testing.toy import draft_request
from outpace.trees.proposer import GrowingProposer
from outpace.trees.shapes.beam import Beam, BeamConfig, SearchConfig

VOCAB = 9
ROUNDING = 1e-5
BEAMS = st.builds(
    BeamConfig,
    depth=st.integers(1, 5),
    breadth=st.integers(1, 5),
    beam=st.none() | st.integers(1, 6),
    level_power=st.sampled_from([0.0, 0.7, 4.0]),
    level_decay=st.sampled_from([1.0, 0.9, 0.5]),
)


def test_the_smallest_weight_is_a_normal_number() -> None:
    """Guards against a weight that float32 rounds to 0: 0 times -inf is no score, and all paths would be equal."""
    deepest = BeamConfig(depth=64, level_power=4, level_decay=0.5)
    assert torch.tensor(Beam(deepest).weight(deepest.depth)) >= torch.finfo(torch.float32).tiny
    for field, value in (("level_decay", 0.4), ("level_decay", 1.1), ("level_power", -0.1), ("level_power", 4.1)):
        with pytest.raises(ValidationError, match=field):
            BeamConfig.model_validate({field: value})


def test_constants_of_the_search() -> None:
    """Guards against EAGLE's widths under the name of DART's search."""
    config = SearchConfig()
    assert (config.breadth, config.beam, config.level_power, config.level_decay) == (25, 20, 0.7, 0.9)
    plain = BeamConfig()
    assert (plain.breadth, plain.beam, plain.level_power, plain.level_decay) == (10, None, 0.0, 1.0)


@settings(max_examples=80, deadline=None)
@given(config=BEAMS, budget=st.integers(1, 40), heat=st.sampled_from([0.0, 0.7]), seed=st.integers(0, 10_000))
def test_the_best_of_all_levels_make_a_tree(config: BeamConfig, budget: int, heat: float, seed: int) -> None:
    """Guards against weights that let a child outscore its parent, so that the best nodes are no tree; against scores
    ranked without their weights, and a beam of another width."""
    source = ToySource(blend(0, VOCAB, other=seed, sharpness=3))
    proposer = GrowingProposer(source, Beam(config), 15)
    (tree,) = proposer.propose([proposer.open(0)], [draft_request([3, 1], budget, 9, seed, temperature=heat)])
    totals: dict[Path, float] = {(): 0.0}
    for (_, path), answers in source.said.items():  # level by level
        weight = (len(path) + 1) ** -config.level_power * config.level_decay ** len(path)
        for token, score in answers.items():
            totals[*path, token] = totals[path] + weight * score
            assert totals[*path, token] <= totals[path]
    paths = node_paths(tree)
    assert len(set(paths)) == len(paths) == min(budget + 1, len(totals))
    assert {path[:-1] for path in paths[1:]} <= set(paths)
    left_out = [score for path, score in totals.items() if path not in paths]
    assert min(totals[path] for path in paths) >= max(left_out, default=-torch.inf) - ROUNDING
    expanded = Counter(len(path) for _, path in source.said)
    width = config.beam or config.breadth
    for depth in range(1, config.depth):
        assert expanded[depth] == min(width, expanded[depth - 1] * config.breadth)
        inside = [totals[path] for _, path in source.said if len(path) == depth]
        outside = [score for path, score in totals.items() if len(path) == depth and (0, path) not in source.said]
        assert min(inside) >= max(outside, default=-torch.inf) - ROUNDING
