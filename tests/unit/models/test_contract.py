"""What a family must do to be decoded losslessly; it joins by a line in `tiny.FAMILIES`."""

import itertools
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel

from outpace.cache.slots import Segment
from outpace.core.params import SamplingParams
from outpace.core.protocols import Chunk, NodeOutputs
from outpace.core.tree import DraftTree, Topology
from outpace.engine.engine import Engine
from outpace.kernels import structs
from outpace.kernels.build import VARIABLE
from outpace.models.exactness import probe
from outpace.models.families import SUPPORTED_FAMILIES
from outpace.models.target import PackedTarget
from outpace.testing import AdversaryDrafter, decode
from outpace.trees.proposer import EmptyDraft
from tests.unit.models.company import assert_as_probed, assert_said_as_probed, of_a_mixed_pass
from tests.unit.models.tiny import (
    FAMILIES,
    INNER_SIZES,
    VOCAB,
    WINDOWS,
    committed_rows,
    decode_one_by_one,
    open_with,
    path_tokens,
    random_ids,
    random_tree,
    stock_model,
    tiny_config,
    tiny_target,
)

# A chain of two in the middle, siblings at every level, a node whose index is far from its depth.
BRANCHING = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 7, 3, 9)
TREES = {
    "pair": (-1, 0),
    "siblings": (-1, 0, 0),
    "chain": (-1, 0, 1, 2),
    "branching": BRANCHING,
    "bushy": (-1, *[0] * 6, *[1, 1, 2, 2, 3, 5], *[7, 7, 8, 12], *[13, 13, 16, 19]),
}
PROMPT = random_ids(21, seed=1)
# One shorter than any kernel's block, one that grows past a block inside a tree, one of several blocks.
BIT_PROMPTS = (random_ids(2, seed=4), random_ids(12, seed=5), random_ids(150, seed=6))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# What checkpoints differ in: grouped, single and full key heads, shared embeddings, wide heads, scaled rotations. Shown
# on two families, since no part of it belongs to a family.
COMMON_VARIANTS: dict[str, dict[str, Any]] = {
    "one key head": {"num_key_value_heads": 1},
    "all key heads": {"num_key_value_heads": 6},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1},
}
_SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_YARN = _SCALED | {"rope_type": "yarn"}
_LLAMA3 = _SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": COMMON_VARIANTS | {"llama3": {"rope_parameters": _LLAMA3}},
    "qwen2": COMMON_VARIANTS | {"yarn": {"rope_parameters": _YARN}},
    "qwen3_moe": {"weights of experts not normalised": {"norm_topk_prob": False}},
    "gemma2": {"uncapped": {"attn_logit_softcapping": None, "final_logit_softcapping": None}},
    "gpt_neox": {"serial": {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}},
    "gpt2": {"scaled by layer": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}},
    "phi3": {"partly rotated": {"partial_rotary_factor": 0.5}},
}
CASES = [(family, variant) for family in FAMILIES for variant in ("stock", *VARIANTS.get(family, {}))]
CASES += [(family, "window") for family in WINDOWS]

each_family = pytest.mark.parametrize("family", list(FAMILIES))
each_case = pytest.mark.parametrize(("family", "variant"), CASES)
each_dtype = pytest.mark.parametrize("dtype", list(DTYPES))


@pytest.fixture(params=["kernels", pytest.param("torch", marks=pytest.mark.thorough)], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract holds for the compiled kernels and for what is done without them."""
    if request.param == "torch":
        monkeypatch.setenv(VARIABLE, "off")


def config_of(family: str, variant: str, **changes: Any) -> PretrainedConfig:
    own = WINDOWS[family] if variant == "window" else VARIANTS.get(family, {}).get(variant, {})
    return tiny_config(family, **(own | changes))


def wide_config(family: str, variant: str = "stock") -> PretrainedConfig:
    """With inner layers so wide that kernels treat one row otherwise than many."""
    return config_of(family, variant, **{INNER_SIZES.get(family, "intermediate_size"): 1536})


def path_error(model: PreTrainedModel, target: PackedTarget, tree: DraftTree) -> float:
    """Largest distance between a tree row's logits and those of stock transformers on the path alone."""
    slot, _ = open_with(target, PROMPT)
    (outputs,) = target.run_pass((), [slot], [tree])[1]
    worst = 0.0
    for node in range(len(tree)):
        with torch.inference_mode():
            expected = model(torch.tensor([[*PROMPT, *path_tokens(tree, node)]])).logits[0, -1]
        worst = max(worst, float((outputs.logits[node] - expected).abs().max()))
    return worst


@each_case
def test_tree_rows_have_the_logits_of_their_paths(family: str, variant: str) -> None:
    """Guards against masks that leak between branches, positions that are not prefix + depth, windows counted in rows,
    caps left out, and whatever else a family does between embedding and logits."""
    config = config_of(family, variant)
    model, target = stock_model(config), tiny_target(config)
    for name, parents in TREES.items():
        assert path_error(model, target, random_tree(parents, seed=2)) < 1e-4, name


@pytest.mark.parametrize("family", list(WINDOWS))
def test_the_window_cases_have_power(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against window cases that pass without a window: leaving it out must move logits by more than 0.1."""
    config, look, sight = config_of(family, "window"), Segment.sight, structs.AttentionSight
    monkeypatch.setattr(Segment, "sight", lambda segment, window: look(segment, None))
    monkeypatch.setattr(structs, "AttentionSight", lambda window, softcap, scaling: sight(0, softcap, scaling))
    assert path_error(stock_model(config), tiny_target(config), random_tree(BRANCHING, seed=2)) > 0.1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("bug", ["positions follow the index", "siblings see each other"])
def test_the_path_check_has_power(family: str, bug: str) -> None:
    """Guards against a path check that passes on wrong trees: two planted bugs must move logits by more than 0.1."""
    config = tiny_config(family)
    model, target = stock_model(config), tiny_target(config)
    planted = Topology(BRANCHING)  # not the shared instance of this shape
    if bug == "positions follow the index":
        planted.__dict__["depth_tensor"] = torch.arange(len(planted))
    else:
        planted.__dict__["ancestor_mask"] = torch.ones(len(planted), len(planted), dtype=torch.bool).tril()
    tree = DraftTree(torch.tensor(random_ids(len(planted), seed=2)), planted)
    assert path_error(model, target, tree) > 0.1


@each_case
def test_kv_after_a_branching_commit_equals_a_fresh_prefill(family: str, variant: str) -> None:
    """Guards against commits that keep a wrong row, a wrong order, or keys rotated to a wrong position."""
    target = tiny_target(config_of(family, variant))
    tree = random_tree(BRANCHING, seed=3)
    for node in (0, 3, 6, 9, 11):
        slot, _ = open_with(target, PROMPT)
        target.run_pass((), [slot], [tree])
        target.commit([slot], [tree.topology.path(node)])
        fresh, _ = open_with(target, [*PROMPT, *path_tokens(tree, node)], slot=1)
        for kept, wanted in zip(committed_rows(target, slot), committed_rows(target, fresh), strict=True):
            torch.testing.assert_close(kept, wanted, atol=1e-4, rtol=1e-4)


@each_family
def test_top_ids_of_prompt_positions_are_those_of_stock_logits(family: str) -> None:
    """Guards against prompt top ids shifted by a position, which would teach a retrieval method wrong successors."""
    config = tiny_config(family)
    target = tiny_target(config)
    (output,) = target.run_pass([Chunk(0, torch.tensor(PROMPT), want_top=True, is_last=False)], (), ())[0]
    with torch.inference_mode():
        expected = stock_model(config)(torch.tensor([PROMPT])).logits[0].topk(4).indices
    assert output.top_ids is not None
    assert torch.equal(output.top_ids[:, :4], expected)


@each_case
def test_greedy_decoding_equals_transformers_generate(family: str, variant: str) -> None:
    """Guards against any difference to the reference decoder: off-by-one positions, a token drawn twice, wrong rows."""
    config = config_of(family, variant)
    model: Any = stock_model(config)
    prompts = [random_ids(length, seed=length) for length in (1, 9, 33)]
    engine = Engine(tiny_target(config), prefill_chunk=16)
    params = SamplingParams(max_new_tokens=16)
    sessions = decode(engine, prompts, [params] * len(prompts), [EmptyDraft()] * len(prompts))
    for prompt, session in zip(prompts, sessions, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
        assert session.ids == expected[0].tolist()


@each_family
@each_dtype
def test_chunks_and_trees_of_one_pass_have_the_numbers_they_have_alone(family: str, dtype: str) -> None:
    """Guards against chunks and trees that see each other, outputs in the order of another part, and rows of a prompt
    whose numbers, or whose keys and values, depend on the trees in their pass or on where the prompt was cut."""
    target = tiny_target(wide_config(family), DTYPES[dtype], max_slots=5)
    exactness = probe(target)
    prompts = [random_ids(length, seed=length) for length in (40, 3, 17, 100)]
    for one, other in of_a_mixed_pass(target, prompts):
        assert_as_probed(target, exactness, one, other)


@each_case
@each_dtype
def test_a_tree_row_has_the_numbers_of_plain_decoding(family: str, variant: str, dtype: str) -> None:
    """Guards against kernels that treat one row otherwise than many, or sum the same keys in another order.

    The sums over keys run in float64: a flip needs a sum within 2**-50 or so of a rounding boundary of float32,
    odds of about 1 in 10**8 per number and 1 in 100 for all cases here together; seeds are fixed, so that a machine
    that passes once passes always.
    """
    target = tiny_target(wide_config(family, variant), DTYPES[dtype])
    exactness = probe(target)
    for shape, prompt in itertools.product(("pair", "siblings", "bushy"), BIT_PROMPTS):
        tree = random_tree(TREES[shape], seed=5)
        slot, _ = open_with(target, prompt)
        (outputs,) = target.run_pass((), [slot], [tree])[1]
        for node in sorted(range(len(tree)), key=tree.topology.path):  # each behind its ancestors, which stay written
            target.kv.truncate(slot, len(prompt) + tree.topology.depths[node])
            row = slice(node, node + 1)
            alone = decode_one_by_one(target, slot, tree.tokens[row].tolist())
            own = NodeOutputs(outputs.logits[row], outputs.top_ids[row], outputs.top_logits[row])
            assert_as_probed(target, exactness, own, alone)


@each_family
@each_dtype
def test_speculation_leaves_the_numbers_of_plain_decoding_in_the_cache(family: str, dtype: str) -> None:
    """Guards against errors that build up round by round: after 40 tokens from random trees the KV is plain's."""
    target = tiny_target(wide_config(family), DTYPES[dtype])
    exactness = probe(target)
    engine, params = Engine(target), SamplingParams(max_new_tokens=40, temperature=0.9, seed=4)
    (plain,) = decode(engine, [PROMPT], [params], [EmptyDraft()])
    keys, values = (rows.clone() for rows in _rows_at_the_end(target, plain.ids))
    drafter = AdversaryDrafter(VOCAB, [plain.ids], budget=9)
    (session,) = decode(engine, [PROMPT], [params], [drafter])
    assert session.metrics.accepted > 10, "the drafter must have been right often enough to test commits"
    if not assert_said_as_probed(target, exactness, plain, session, params):
        return  # after a tie the two say other things
    for kept, wanted in zip(_rows_at_the_end(target, session.ids), (keys, values), strict=True):
        if exactness.is_bitwise:
            assert torch.equal(kept, wanted)
        else:
            torch.testing.assert_close(kept, wanted, atol=1e-3, rtol=1e-3)


def _rows_at_the_end(target: PackedTarget, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the request that just ended, the only one; the last token was never written."""
    rows = len(ids) - 1
    return target.kv.keys[:, 0, :, :rows], target.kv.values[:, 0, :, :rows]


def test_every_supported_family_is_under_contract() -> None:
    """Guards against a family that is let in at load without a line in the contract's table."""
    assert set(SUPPORTED_FAMILIES) == set(FAMILIES)
