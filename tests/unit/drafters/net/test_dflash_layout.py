"""DFlash checkpoints in their public layouts: there and back, and what is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.drafters.dflash.files import export_dflash, read_dflash
from outpace.drafters.dflash.net import DFlashConfig
from outpace.lib.checkpoint import Checkpoint
from outpace.lib.errors import ModelError
from tests.unit.drafters.net.block_nets import SIZES, SLIDING, small_dflash, speculators_files

Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]


def in_memory(config: dict[str, Any], tensors: dict[str, Tensor], edit: Edit | None = None) -> Checkpoint:
    """A checkpoint as its file would say it, spoilt by `edit`."""
    config = json.loads(json.dumps(config))
    if edit is not None:
        edit(config, tensors)
    return Checkpoint("drafter", config, tensors)


def assert_refused(read: Callable[[Checkpoint], object], checkpoint: Checkpoint, named: list[str]) -> None:
    """Reading it is an error that names all of these."""
    with pytest.raises(ModelError) as caught:
        read(checkpoint)
    assert str(caught.value).startswith("drafter")
    assert all(name in str(caught.value) for name in named), str(caught.value)


def exported(layout: str = "z-lab", edit: Edit | None = None, **changes: Any) -> Checkpoint:
    net = small_dflash(torch.float32, **changes)
    return in_memory(*(export_dflash(net) if layout == "z-lab" else speculators_files(net)), edit)


def put(*path: str, value: Any) -> Edit:
    """Sets a field of the config; None removes it."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for key in path[:-1]:
            config = config[key]
        if value is None:
            del config[path[-1]]
        else:
            config[path[-1]] = value

    return edit


def both(*edits: Edit) -> Edit:
    return lambda config, tensors: [edit(config, tensors) for edit in edits]


@pytest.mark.parametrize(
    "edit",
    [
        put("block_size", value=None),
        put("dflash_config", "block_size", value=None),
        put("architectures", value=None),
        put("rope_theta", value=10000),
        both(put("rope_theta", value=None), put("rope_parameters", value={"rope_theta": 1e4, "rope_type": "default"})),
        put("layer_types", value=None),
        put("num_target_layers", value=None),
        both(put("dflash_config", "target_layer_ids", value=None), put("num_target_layers", value=11)),
    ],
)
def test_other_spellings_mean_the_same(edit: Edit) -> None:
    """Guards against reading one generation of a layout only."""
    net = read_dflash(exported(edit=edit))
    known = {"target_layers", "target_layer_ids"}
    assert net.config.model_dump(exclude=known) == DFlashConfig(**SIZES).model_dump(exclude=known)
    assert net.config.target_layer_ids in ((1, 4, 6), (1, 4, 8))


def test_layer_types_left_out_follow_qwen3s_rule() -> None:
    """Guards against a sliding drafter read as a full one, where the config only names the first sliding layer."""
    edit = both(put("layer_types", value=None), put("max_window_layers", value=1))
    assert read_dflash(exported(edit=edit, **SLIDING)).config == DFlashConfig(**{**SIZES, **SLIDING})


def rename(old: str, new: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[new] = tensors.pop(old)

    return edit


def add(name: str, tensor: Tensor) -> Edit:
    return lambda config, tensors: tensors.update({name: tensor})


SPOILT: dict[str, tuple[Edit, list[str]]] = {
    "head size": (put("head_dim", value=4), ["q_proj.weight has shape [48, 24], its config says [24, 24]"]),
    "layers": (both(put("num_hidden_layers", value=2), put("layer_types", value=None)), ["unexpected layers.2."]),
    "taps": (put("dflash_config", "target_layer_ids", value=[1, 4]), ["fc.weight has shape [24, 72]"]),
    "countless layers": (
        both(put("dflash_config", "target_layer_ids", value=None), put("num_target_layers", value=10**400)),
        ["target_layer_ids is missing"],
    ),
    "mask outside": (put("dflash_config", "mask_token_id", value=61), ["mask_token_id=61", "vocab_size=61"]),
    "two block sizes": (put("block_size", value=8), ["block_size=8", "block_size=5", "agree"]),
    "no block size": (
        both(put("block_size", value=None), put("dflash_config", "block_size", value=None)),
        ["block_size is missing"],
    ),
    "two thetas": (put("rope_parameters", value={"rope_theta": 5e5}), ["rope_theta=10000.0", "rope_theta=500000.0"]),
    "partial rotation": (put("partial_rotary_factor", value=0.5), ["partial_rotary_factor"]),
    "activation": (put("hidden_act", value="gelu"), ["hidden_act='gelu'"]),
    "no config": (put("dflash_config", value=None), ["dflash_config is missing"]),
    "not an object": (put("dflash_config", value=[1]), ["dflash_config", "must be an object"]),
    "other net": (put("architectures", value=["DFlash2DraftModel"]), ["DFlash2DraftModel"]),
    "unknown field": (put("dflash_config", "conv_kernel_size", value=2), ["conv_kernel_size"]),
    "domino": (put("dflash_config", "projector_type", value="domino"), ["projector_type", "read it as Domino"]),
    "stray field": (put("emb_dim", value=256), ["emb_dim"]),
    "text for a number": (put("num_attention_heads", value="6"), ["num_attention_heads='6'"]),
    "causal": (put("dflash_config", "causal", value=True), ["causal=true"]),
    "causal no flag": (put("dflash_config", "causal", value="no"), ["causal='no'"]),
    "own head": (add("lm_head.weight", torch.zeros(61, 24)), ["lm_head.weight", "the target's"]),
    "own vocabulary": (add("d2t", torch.zeros(9, dtype=torch.int64)), ["d2t", "draft vocabulary"]),
}


@pytest.mark.parametrize(("edit", "named"), SPOILT.values(), ids=SPOILT.keys())
def test_what_does_not_fit_is_named(edit: Edit, named: list[str]) -> None:
    """Guards against a drafter that loads and drafts noise, and against errors that leave the user searching."""
    assert_refused(read_dflash, exported(edit=edit), named)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (put("sample_from_anchor", value=True), ["sample_from_anchor=true"]),
        (put("draft_vocab_size", value=32), ["draft_vocab_size=32", "vocab_size=61"]),
        (put("aux_hidden_state_layer_ids", value=[0, 2, 4]), ["aux_hidden_state_layer_ids=[0, 2, 4]"]),
        (put("sliding_window_non_causal", value=None), ["sliding_window_non_causal is missing"]),
        (put("sliding_window_non_causal", value=0), ["sliding_window_non_causal=0"]),
        (put("transformer_layer_config", "head_dim", value=None), ["transformer_layer_config", "head_dim is missing"]),
        (put("transformer_layer_config", "use_sliding_window", value=False), ["use_sliding_window=false"]),
    ],
)
def test_speculators_that_draft_otherwise_are_refused(edit: Edit, named: list[str]) -> None:
    """Guards against blocks aligned otherwise, reduced vocabularies and unstated causality read as the usual."""
    assert_refused(read_dflash, exported("speculators", edit, **SLIDING), named)


def test_mixed_dtypes_lose_nothing() -> None:
    """Guards against norms in float32 rounded to the dtype of the matrices."""
    norm = torch.full((24,), 1.0009765625)  # has no bfloat16
    checkpoint = exported(edit=add("norm.weight", norm))
    for key in checkpoint.tensors.keys() - {"norm.weight"}:
        checkpoint.tensors[key] = checkpoint.tensors[key].to(torch.bfloat16)
    assert torch.equal(read_dflash(checkpoint).norm.weight, norm)
