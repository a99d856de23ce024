"""EAGLE-3 against its equations written once more, in every published variant."""

import itertools
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from outpace.drafters.eagle3.net import Eagle3Config
from outpace.drafters.fusion import membership
from outpace.lib.errors import ModelError
from tests.unit.drafters.net import reference
from tests.unit.drafters.net.small import SIZES, causal, eagle3_net, offsets, randn, relative_error

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "bias")
VARIANTS: list[dict[str, Any]] = [dict(zip(FLAGS, said)) for said in itertools.product([False, True], repeat=6)]
OTHERS: list[dict[str, Any]] = [
    {"taps": (1, 9, 17, 25, 33)},
    {"taps": (4,), "fc_norm": True},
    {"target_hidden_size": 16, "own_embedding": True},
    {"draft_vocab_size": 50},
    {"kv_heads": 4, "rope_theta": 5e5},
]


@pytest.mark.parametrize(
    "changes", VARIANTS + OTHERS, ids=lambda one: "-".join(k for k, v in one.items() if v) or "plain"
)
@torch.inference_mode()
def test_two_steps_match_the_equations(changes: dict[str, Any]) -> None:
    """Guards against a wrong order in the pair, a residual after its norm."""
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        net = eagle3_net(dtype, **changes)
        config, w = net.config, reference.weights_of(net)
        features = randn(9, config.tap_count * config.target_hidden_size, seed=1, dtype=dtype)
        positions = torch.arange(3, 12)
        fused = net.fuse(features)
        exact = reference.eagle3_fuse(w, config, features.double().numpy())
        assert relative_error(fused, exact) < tolerance
        states = fused
        for step in range(2):
            embeddings = randn(9, config.hidden_size, seed=2 + step, dtype=dtype)
            states, hidden = net(embeddings, states, positions + step, causal)
            exact, wanted = reference.eagle3(
                w, config, embeddings.double().numpy(), exact, (positions + step).double().numpy()
            )
            assert relative_error(states, exact) < tolerance
            assert relative_error(hidden, wanted) < tolerance
        assert relative_error(net.logits(hidden), wanted @ w["lm_head.weight"].T) < tolerance


def test_the_targets_embedding_is_used_and_its_head_asked_for_where_the_file_has_none() -> None:
    """Guards against a copy of the target's tables, and against a head that is silently missing."""
    table = randn(50, 24, seed=8)
    net = eagle3_net(draft_vocab_size=50, own_head=False)
    assert not {"lm_head.weight", "embed_tokens.weight", "d2t"} & set(net.state_dict())
    assert torch.equal(net.embed(torch.tensor([4, 7]), lambda ids: table[ids]), table[[4, 7]])
    with pytest.raises(ModelError, match="own_head=False"):
        net.logits(randn(3, 24))
    own = eagle3_net(own_embedding=True)
    assert own.embed_tokens is not None
    assert torch.equal(own.embed(torch.tensor([4, 7]), lambda ids: table[ids]), own.embed_tokens.weight[[4, 7]])


def test_draft_ids_are_mapped_by_offsets() -> None:
    """Guards against d2t read as a list of ids, which is right for the first draft ids and wrong for all others."""
    net = eagle3_net()
    ids = torch.tensor([[0, 3], [19, 7]])
    wanted = offsets() + torch.arange(20)
    assert torch.equal(net.target_ids(ids), wanted[ids])
    assert torch.equal(membership(offsets(), 50).nonzero().flatten(), wanted)
    full = eagle3_net(draft_vocab_size=50)
    assert full.d2t is None
    assert torch.equal(full.target_ids(ids), ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads=3 is not a multiple of kv_heads=2"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"layers": 2}, "layers=2"),
        ({"taps": ()}, "taps="),
        ({"taps": (-1, 3)}, "taps="),
        ({"own_head": False}, "draft_vocab_size=20 needs a head"),
        ({"target_hidden_size": 16}, "hidden_size=24 differs from target_hidden_size=16"),
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"rms_eps": 0.0}, "rms_eps"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(changes: dict[str, Any], message: str) -> None:
    """Guards against sizes that only fail deep inside a pass, and against fields nobody reads."""
    with pytest.raises(ValidationError, match=message):
        Eagle3Config(**{**SIZES, **changes})
