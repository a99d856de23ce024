"""DART against its equations, and its files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.drafters.dart.files import read_dart
from outpace.drafters.dart.net import DartNet
from outpace.drafters.kinds import write_net
from outpace.lib.checkpoint import read_checkpoint
from outpace.lib.errors import ModelError
from tests.unit.drafters.net import reference
from tests.unit.drafters.net.small import causal, dart_net, randn, relative_error


def after(net: DartNet, embeddings: Tensor, features: Tensor) -> Tensor:
    """Logits [draft_length + 1, Vd] behind one sequence."""
    count, length = len(embeddings), net.config.draft_length
    positions, wanted = torch.arange(count + length), torch.arange(count - 1, count + length)
    hidden = net(embeddings, net.fuse(features), positions[:count], positions[count:], wanted, causal)
    return net.logits(hidden)


@pytest.mark.parametrize("changes", [{}, {"draft_length": 1}, {"target_hidden_size": 24, "rope_theta": 1e6}], ids=str)
@torch.inference_mode()
def test_all_depths_match_the_equations(changes: dict[str, Any]) -> None:
    """Guards against masks that are normed, a residual without its half of the mask vector, and a norm too few."""
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        net = dart_net(dtype, **changes)
        embeddings, features = randn(7, 24, seed=1, dtype=dtype), randn(7, 72, seed=2, dtype=dtype)
        exact = reference.dart(
            reference.weights_of(net), net.config, embeddings.double().numpy(), features.double().numpy()
        )
        assert relative_error(after(net, embeddings, features), exact) < tolerance


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """Guards against an EAGLE-3 file read as DART, and weights that are missing or of other shapes."""
    write_net(dart_net(torch.float32), tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    embedded = checkpoint.tensors | {"embed_tokens.weight": torch.zeros(50, 24)}
    assert "embed_tokens.weight" not in read_dart(replace(checkpoint, tensors=embedded)).state_dict()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"draft_length": 0}, "draft_length=0"),
        ({"head_dim": 6}, "head_dim is 6"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "kind 'linear'"),
    ]
    for changes, message in wrong:
        with pytest.raises(ModelError, match=message):
            read_dart(replace(checkpoint, config=checkpoint.config | changes))
    with pytest.raises(ModelError, match="embed_tokens has shape"):
        read_dart(replace(checkpoint, tensors=checkpoint.tensors | {"embed_tokens.weight": torch.ones(3, 24)}))
    with pytest.raises(ModelError, match="usual three"):
        write_net(dart_net(taps=(1, 2)), tmp_path / "other")


def test_a_base_that_is_not_stated_is_the_authors(tmp_path: Path) -> None:
    """Guards against the target's base taken for a drafter trained without one."""
    write_net(dart_net(torch.float32, rope_theta=1e6), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("rope_theta") == 1e6
    assert read_dart(replace(read_checkpoint(tmp_path), config=config)).config.rope_theta == 10000.0
