"""Sizes and vocabularies of new drafters of pairs."""

from typing import Any

import pytest
import torch

from outpace.drafters.dart.objective import DartNetSettings, DartObjectiveSettings, build_dart
from outpace.drafters.eagle3.objective import Eagle3NetSettings, Eagle3ObjectiveSettings, build_eagle3
from outpace.drafters.fusion import check_offsets
from outpace.drafters.training.batch import Facts
from outpace.drafters.training.fusion import FusionNetSettings, sizes_for
from outpace.models.frozen import FrozenTarget
from tests.unit.drafters.net.test_rotary import LLAMA3
from tests.unit.drafters.training import tiny
from tests.unit.models.tiny import tiny_config, tiny_target

LINEAR = {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.0}


def new_net(draft_vocab_size: int | None, facts: Facts) -> Any:
    settings = Eagle3NetSettings(draft_vocab_size=draft_vocab_size)
    return build_eagle3(settings, Eagle3ObjectiveSettings(), tiny.frozen(), facts, 0).net


def test_sizes_are_the_targets_unless_asked_for() -> None:
    """Guards against heads, MLPs and norms that differ from the target's, and settings that are not heard."""
    target = FrozenTarget(tiny_target(tiny_config("qwen3", rms_norm_eps=3e-4), max_length=32))
    found = sizes_for(FusionNetSettings(), target, ())
    wanted = {
        "hidden_size": 48, "target_hidden_size": 48, "intermediate_size": 96, "heads": 6, "kv_heads": 2, "head_dim": 16,
        "rms_eps": 3e-4, "max_positions": 512, "vocab_size": 160, "draft_vocab_size": 160,
        "rope_theta": 10000.0, "rope_scaling": None,
    }  # fmt: skip
    assert found == wanted
    asked: dict[str, Any] = {"intermediate_size": 50, "heads": 4, "kv_heads": 1, "head_dim": 10, "draft_vocab_size": 9}
    assert sizes_for(FusionNetSettings(**asked), target, ()) == wanted | asked


@pytest.mark.parametrize(
    ("family", "changes", "theta", "scaling"),
    [
        ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, 5e5, LLAMA3),
        ("llama", {"rope_parameters": LINEAR}, 2e4, None),
        ("gpt_neox", {}, 1e4, None),
        ("gemma3_text", {}, 1e6, None),
        ("gpt2", {}, 1e4, None),
    ],
    ids=["llama3", "another kind", "half rotated", "one per kind of layer", "learned positions"],
)
def test_positions_turn_as_the_targets_where_the_drafter_can(
    family: str, changes: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    """Guards against a base or scaling that is lost where transformers keeps it, and kinds that no file can say."""
    target = FrozenTarget(tiny_target(tiny_config(family, **changes), max_length=32))
    found = sizes_for(FusionNetSettings(), target, ("llama3",))
    assert (found["rope_theta"], found["rope_scaling"]) == (theta, scaling)


def test_new_drafters_of_every_family_have_nets() -> None:
    """Guards against fields of other families' configs that are read under Llama's names alone."""
    for family in ("gpt2", "gpt_neox", "gemma3_text", "qwen3_moe", "phi3"):
        target = FrozenTarget(tiny_target(tiny_config(family), max_length=32))
        facts = Facts(torch.ones(160, dtype=torch.int64), torch.zeros(160, dtype=torch.bool), ())
        build_eagle3(Eagle3NetSettings(), Eagle3ObjectiveSettings(), target, facts, 0)
        build_dart(DartNetSettings(), DartObjectiveSettings(), target, facts, 0)


def test_the_draft_vocabulary_is_what_is_supervised_most() -> None:
    """Guards against ids instead of offsets, ids by prompt counts, and ties that change from run to run."""
    counts = torch.zeros(tiny.VOCAB, dtype=torch.int64)
    counts[torch.tensor([40, 3, 9, 30])] = torch.tensor([5, 9, 1, 1])
    net = new_net(5, Facts(counts, counts == 0, ()))
    check_offsets(net.d2t, None, 5, tiny.VOCAB, "net")
    assert net.target_ids(torch.arange(5)).tolist() == [0, 3, 9, 30, 40]
    torch.testing.assert_close(net.lm_head.weight, tiny.frozen().head[[0, 3, 9, 30, 40]], check_dtype=False)


@pytest.mark.parametrize("size", [None, tiny.VOCAB, 32000])
def test_a_vocabulary_as_large_as_the_targets_is_not_mapped(size: int | None) -> None:
    """Guards against a map that maps nothing, and a head that is larger than the target's."""
    net = new_net(size, tiny.facts())
    assert net.d2t is None
    torch.testing.assert_close(net.lm_head.weight, tiny.frozen().head, check_dtype=False)
