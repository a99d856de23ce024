"""Domino's causal head: the equations, both alignments, branches, pools, and teacher forcing against steps."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from outpace.drafters.domino.net import DominoConfig, DominoNet
from tests.unit.drafters.net import block_reference as reference
from tests.unit.drafters.net.block_nets import (
    HEAD,
    SIZES,
    draft,
    forward_block,
    randn,
    relative_error,
    requests,
    small_dflash,
    small_domino,
)

BLOCK, VOCAB, WIDTH = 5, 61, 24
each_alignment = pytest.mark.parametrize("shift_label", [True, False], ids=["shifted", "in place"])
each_prefix = pytest.mark.parametrize("prefix", [0, 1, 2])


def blocks(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [N, B, H], base logits [N, B, V] and the embeddings [N, B, H] of the blocks' true tokens."""
    hidden, base = randn(count, BLOCK, WIDTH, seed=1, dtype=dtype), randn(count, BLOCK, VOCAB, seed=2, dtype=dtype)
    return hidden, base, randn(count, BLOCK, WIDTH, seed=3, dtype=dtype)


def stepped(net: DominoNet, hidden: Tensor, base: Tensor, embeddings: Tensor) -> dict[int, Tensor]:
    """Final logits [N, V] by depth, as drafting makes them: one token at a time."""
    logits, state = {}, net.head.start(embeddings[:, 0])
    for depth in range(1, net.config.drafts_per_block(every_position=True) + 1):
        step = net.config.draft_step(depth)
        assert step.seen == depth
        logits[depth] = base[:, step.position]
        if step.corrected:
            logits[depth] = logits[depth] + net.head.correction(hidden[:, step.position], state)
        if depth < embeddings.shape[1]:
            state = net.head.step(state, embeddings[:, depth])
    return logits


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_head_is_the_papers(dtype: torch.dtype, tolerance: float) -> None:
    """Guards against swapped gates, the reset gate in the wrong place, [S; H] for [H; S], another activation."""
    net = small_domino(dtype)
    weights, embeddings = net.state_dict(), randn(3, 4, WIDTH, dtype=dtype)
    hidden, state = randn(3, WIDTH, seed=8, dtype=dtype), net.head.start(embeddings[:, 0])
    for count in range(1, 5):
        want = torch.stack([reference.gru(weights, list(row[:count]), 10) for row in embeddings])
        assert relative_error(state, want) < tolerance
        corrections = torch.stack([reference.correction(weights, *pair) for pair in zip(hidden, want, strict=True)])
        assert relative_error(net.head.correction(hidden, state), corrections) < tolerance
        if count < 4:
            state = net.head.step(state, embeddings[:, count])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_whole_blocks_follow_the_papers_equations(dtype: torch.dtype, tolerance: float) -> None:
    """Guards against a state that includes the token being predicted: S_(i-1) corrects L_i, for i = 1 .. B-1."""
    net = small_domino(dtype, shift_label=False, pure_draft_prefix_len=0)
    weights, (hidden, base, embeddings) = net.state_dict(), blocks(2, dtype)
    final = forward_block(net, hidden, base, embeddings)
    for row in range(2):
        assert torch.equal(final[row, 0], base[row, 0]), "the anchor's position predicts nothing"
        for index in range(1, BLOCK):
            state = reference.gru(weights, list(embeddings[row, :index]), 10)
            want = base[row, index].double() + reference.correction(weights, hidden[row, index], state)
            assert relative_error(final[row, index], want) < tolerance


@each_alignment
@each_prefix
def test_shifted_and_unshifted_blocks_read_the_same_tokens(shift_label: bool, prefix: int) -> None:
    """Guards against an off-by-one between alignments: only the position may differ, not the tokens seen."""
    config = DominoConfig(**{**SIZES, **HEAD, "shift_label": shift_label, "pure_draft_prefix_len": prefix})
    steps = [config.draft_step(depth) for depth in range(1, 5)]
    assert [step.position for step in steps] == ([0, 1, 2, 3] if shift_label else [1, 2, 3, 4])
    assert [step.seen for step in steps] == [1, 2, 3, 4]
    assert [step.corrected for step in steps] == [depth > prefix for depth in range(1, 5)]


def test_drafts_per_block_are_the_authors_or_the_servers() -> None:
    """Guards against a B-th draft where the last position predicts nothing new, or its loss where it does."""
    shifted, plain = (DominoConfig(**{**SIZES, **HEAD, "shift_label": shift}) for shift in (True, False))
    assert (shifted.drafts_per_block(every_position=True), shifted.drafts_per_block()) == (5, 4)
    assert (plain.drafts_per_block(every_position=True), plain.drafts_per_block()) == (4, 4)
    last = shifted.draft_step(5)
    assert (last.position, last.corrected, last.seen) == (4, True, 5)


@each_alignment
@each_prefix
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)], ids=str)
def test_steps_give_what_teacher_forcing_gives(
    shift_label: bool, prefix: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Guards against a head that is trained on one alignment and drafts on another."""
    net = small_domino(dtype, shift_label=shift_label, pure_draft_prefix_len=prefix)
    inputs = blocks(3, dtype)
    final = forward_block(net, *inputs)
    for depth, logits in stepped(net, *inputs).items():
        step = net.config.draft_step(depth)
        assert relative_error(final[:, step.position], logits) < tolerance, f"depth {depth}"
        if not step.corrected:
            assert torch.equal(final[:, step.position], inputs[1][:, step.position]), "pure positions are the base's"


@each_alignment
def test_a_correction_never_reads_the_token_it_predicts(shift_label: bool) -> None:
    """Guards against a leak under teacher forcing, which trains to a perfect loss and drafts noise."""
    net = small_domino(shift_label=shift_label, pure_draft_prefix_len=0)
    hidden, base, embeddings = blocks(1)
    before = forward_block(net, hidden, base, embeddings)
    for changed in range(BLOCK):
        other = embeddings.clone()
        other[:, changed] += 1
        after = forward_block(net, hidden, base, other)
        for depth in range(1, net.config.drafts_per_block(every_position=True) + 1):
            position = net.config.draft_step(depth).position
            assert torch.equal(after[:, position], before[:, position]) == (changed >= depth), (changed, depth)


def test_a_prefix_as_long_as_the_block_leaves_the_base_logits() -> None:
    """Guards against an empty slice that turns into the whole block."""
    net = small_domino(shift_label=False, pure_draft_prefix_len=4)
    hidden, base, embeddings = blocks(2)
    assert torch.equal(forward_block(net, hidden, base, embeddings), base)


def test_branches_of_a_tree_have_the_state_of_their_path() -> None:
    """Guards against siblings that share a state, or rows gathered from the wrong parent."""
    net = small_domino()
    parents, levels = [-1, 0, 0, 1, 1, 2, 4, 4], [[0], [1, 2], [3, 4, 5], [6, 7]]
    embeddings, hidden = randn(8, WIDTH, seed=4), randn(8, WIDTH, seed=5)
    states = net.head.start(embeddings[:1]).new_zeros(8, 10)
    for depth, nodes in enumerate(levels):
        if depth == 0:
            states[nodes] = net.head.start(embeddings[nodes])
        else:
            states[nodes] = net.head.step(states[[parents[node] for node in nodes]], embeddings[nodes])
    corrections = net.head.correction(hidden, states)
    for node in range(8):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = net.head.start(embeddings[path[:1]])
        for index in path[1:]:
            alone = net.head.step(alone, embeddings[[index]])
        assert relative_error(states[[node]], alone) < 1e-12
        assert relative_error(corrections[[node]], net.head.correction(hidden[[node]], alone)) < 1e-12


@pytest.mark.parametrize("ids", [[0], [60, 3, 17, 3], list(range(VOCAB))], ids=["one", "unsorted", "all"])
def test_a_pool_of_candidates_is_the_full_correction_at_its_ids(ids: list[int]) -> None:
    """Guards against a pool whose columns are in another order than its ids."""
    net = small_domino()
    hidden, state = randn(4, WIDTH, seed=6), randn(4, 10, seed=7).tanh()
    full = net.head.correction(hidden, state)
    pool = net.head.low_rank(hidden, state) @ net.head.vocabulary_weight[ids].T
    assert full.shape == (4, VOCAB)
    assert pool.shape == (4, len(ids))
    assert relative_error(pool, full[:, ids]) < 1e-12


def test_rows_of_several_requests_compute_what_each_would_alone() -> None:
    """Guards against a state that leaks from one request to the next."""
    net, inputs = small_domino(), blocks(4)
    together = stepped(net, *inputs)
    for row in range(4):
        alone = stepped(net, *(tensor[row : row + 1] for tensor in inputs))
        for depth, logits in alone.items():
            assert relative_error(together[depth][row : row + 1], logits) < 1e-12


def test_the_backbone_is_dflash() -> None:
    """Guards against a backbone that the head changes: the same weights must give the same block."""
    domino, plain = small_domino(), small_dflash(seed=2)
    plain.load_state_dict({key: value for key, value in domino.state_dict().items() if not key.startswith("head.")})
    request = requests([6], torch.float64)
    assert torch.equal(draft(domino, request)[0], draft(plain, request)[0])


def test_gradients_reach_the_whole_head() -> None:
    """Guards against steps that cut the graph: the recurrent weights would stay where they began."""
    for at_once in (True, False):
        net, inputs = small_domino().requires_grad_(), blocks(2)
        made = forward_block(net, *inputs) if at_once else stepped(net, *inputs)[4]
        made.pow(2).sum().backward()  # type: ignore[no-untyped-call]
        for name, weight in net.head.named_parameters():
            assert weight.grad is not None, name
            assert weight.grad.abs().sum() > 0, name


def test_parameters_are_nan_until_filled() -> None:
    """Guards against nn.GRU's own initialisation standing in for weights that a file did not hold."""
    net = DominoNet(DominoConfig(**SIZES, **HEAD))
    assert all(bool(weight.isnan().all()) for weight in net.parameters())
    assert {name for name, _ in net.head.named_parameters()} == {
        "prefix_gru.weight_ih_l0",
        "prefix_gru.weight_hh_l0",
        "embed_proj.0.weight",
        "embed_proj.2.weight",
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pure_draft_prefix_len": 5}, ["pure_draft_prefix_len=5", "block_size=5"]),
        ({"pure_draft_prefix_len": -1}, ["pure_draft_prefix_len"]),
        ({"shift_label": 1}, ["shift_label"]),
        ({"emb_dim": 0}, ["emb_dim"]),
        ({"gru_hidden_dim": "10"}, ["gru_hidden_dim"]),
        ({"mask_token_id": 61}, ["mask_token_id=61", "vocab_size=61"]),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_contradictions_are_named(changes: dict[str, Any], named: list[str]) -> None:
    """Guards against a prefix that leaves nothing to correct, and against losing the backbone's own checks."""
    with pytest.raises(ValidationError) as caught:
        DominoConfig(**{**SIZES, **HEAD, **changes})
    assert all(name in str(caught.value) for name in named), str(caught.value)
