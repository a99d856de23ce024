"""What holds for the nets and the files of every kind of drafter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.drafters.kinds import KINDS
from outpace.drafters.load import is_net, load_net
from outpace.lib.checkpoint import write_checkpoint
from tests.unit.drafters.net.block_nets import (
    SLIDING,
    small_dflash,
    small_dflash2,
    small_domino,
    small_dspark,
    small_lattice,
    speculators_files,
)
from tests.unit.drafters.net.small import dart_net, eagle3_net
from tests.unit.drafters.net.test_medusa import VARIANTS, medusa

NETS: dict[str, Callable[..., Any]] = {
    "dart": dart_net, "dflash": small_dflash, "dflash2": small_dflash2, "domino": small_domino, "dspark": small_dspark,
    "eagle3": eagle3_net, "medusa": medusa, "lattice": small_lattice,
}  # fmt: skip
BLOCKS: list[dict[str, Any]] = [{}, SLIDING, SLIDING | {"sliding_causal": False}, {"attention_bias": True},
                                {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}]  # fmt: skip
EAGLES: list[dict[str, Any]] = [
    {},
    {"taps": (2, 5, 9), "fc_norm": True, "bias": True},
    {"draft_vocab_size": 50, "rope_theta": 5e5},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "own_embedding": True},
    {"target_hidden_size": 16, "own_embedding": True, "taps": (1, 3)},
]
SPECIAL: list[dict[str, Any]] = [
    {"norm_before_residual": True, "norm_before_fc": True},
    {"norm_output": True, "qk_norm": True},
    {"taps": (0, 3)},
]
IN_PLACE = {"shift_label": False}
WRITTEN: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("dart", "dart"): [{}, {"draft_vocab_size": 50}, {"rope_theta": 1e6}],
    ("dflash", "z-lab"): BLOCKS,
    ("dflash", "speculators"): [one | {"target_layers": None} for one in BLOCKS],  # which this layout does not state
    ("dflash2", "z-lab"): [*BLOCKS, {"output_multiplier": 0.5, "final_logit_softcapping": 20.0}],
    ("dspark", "specforge"): [*BLOCKS, {"confidence_head_with_markov": False}, {"enable_confidence_head": False}],
    ("domino", "domino"): [{}, SLIDING, IN_PLACE, IN_PLACE | {"pure_draft_prefix_len": 0}],
    ("domino", "sglang"): [{}, SLIDING, IN_PLACE],
    ("eagle3", "midlayer"): EAGLES,
    ("eagle3", "speculators"): EAGLES + SPECIAL,
    ("lattice", "lattice"): [{}, SLIDING, {"candidates": 3}],
    ("medusa", "authors"): [VARIANTS[at] for at in (0, 1, 4, 5)],
    ("medusa", "vllm"): VARIANTS[:4],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "layout", "changes"), [(*file, one) for file, variants in WRITTEN.items() for one in variants], ids=str
)
def test_what_was_written_is_read_back(
    kind: str, layout: str, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Guards against a field, a name or a bit lost on the way: config and weights are equal, in their dtype; and
    against a DART file read as EAGLE-3, whose fields it has too, and Domino's head left in the file."""
    net = NETS[kind](dtype, **changes)
    if (kind, layout) == ("dflash", "speculators"):
        write_checkpoint(tmp_path, *speculators_files(net))
    else:
        KINDS[kind].layouts[layout](net, tmp_path, None)
    assert is_net(str(tmp_path))
    again = load_net(str(tmp_path))
    assert type(again) is type(net)
    assert again.config == net.config
    found, wanted = again.state_dict(), net.state_dict()
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("kind", NETS)
def test_weights_start_as_nan(kind: str) -> None:
    """Guards against initial weights in place of those that a file forgot."""
    net = NETS[kind]()
    fresh = type(net)(net.config)
    assert all(bool(weight.isnan().all()) and not weight.requires_grad for weight in fresh.parameters())
