"""DFlash checkpoints in their public layouts: there and back, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.drafters.dflash.files import export_dflash, read_dflash, write_dflash
from outpace.drafters.dflash.net import DFlashConfig, DFlashNet
from outpace.lib.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from outpace.lib.errors import ModelError
from tests.unit.drafters.net.block_nets import SIZES, SLIDING, small_dflash, speculators_files

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": SLIDING,
    "sliding both ways": {**SLIDING, "sliding_causal": False},
    "biases": {"attention_bias": True},
    "scaled": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}
Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]


def exported(layout: str = "z-lab", edit: Edit | None = None, **changes: Any) -> Checkpoint:
    """A checkpoint in memory, spoilt by `edit`."""
    net = small_dflash(torch.float32, **changes)
    config, tensors = export_dflash(net) if layout == "z-lab" else speculators_files(net)
    config = json.loads(json.dumps(config))
    if edit is not None:
        edit(config, tensors)
    return Checkpoint("drafter", config, tensors)


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


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_was_written_reads_back_bit_equal(
    layout: str, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Guards against a field that one direction forgets, a tensor under another name, a dtype widened and back."""
    net = small_dflash(dtype, **changes)
    if layout == "z-lab":
        write_dflash(net, tmp_path)
    else:
        write_checkpoint(tmp_path, *speculators_files(net))
    back = read_dflash(read_checkpoint(tmp_path))
    lost = {"target_layers": None} if layout == "speculators" else {}  # that layout does not say
    assert back.config == net.config.model_copy(update=lost)
    assert back.state_dict().keys() == net.state_dict().keys()
    for key, tensor in net.state_dict().items():
        assert back.state_dict()[key].dtype == dtype, key
        assert torch.equal(back.state_dict()[key], tensor), key


def test_speculators_count_taps_from_the_embedding() -> None:
    """Guards against the off-by-one between the layouts: features would come from the layer below."""
    config = exported("speculators").config
    assert config["aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert exported("z-lab").config["dflash_config"]["target_layer_ids"] == [1, 4, 6]
    assert config["sample_from_anchor"] is False


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


def swap(first: str, second: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return edit


SPOILT: dict[str, tuple[Edit, list[str]]] = {
    "missing": (rename("norm.weight", "final_norm.weight"), ["missing norm.weight", "unexpected final_norm.weight"]),
    "swapped": (
        swap("layers.1.mlp.up_proj.weight", "layers.1.mlp.down_proj.weight"),
        ["layers.1.mlp.up_proj.weight", "[24, 40]", "[40, 24]"],
    ),
    "integers": (add("norm.weight", torch.ones(24, dtype=torch.int8)), ["norm.weight", "torch.int8"]),
    "head size": (put("head_dim", value=4), ["head_dim=4", "q_proj has 48 rows"]),
    "layers": (both(put("num_hidden_layers", value=2), put("layer_types", value=None)), ["num_hidden_layers=2"]),
    "taps": (put("dflash_config", "target_layer_ids", value=[1, 4]), ["target_layer_ids=[1, 4]", "72 columns"]),
    "tap outside": (put("dflash_config", "target_layer_ids", value=[1, 4, 9]), ["[1, 4, 9]", "target_layers=9"]),
    "mask outside": (put("dflash_config", "mask_token_id", value=61), ["mask_token_id=61", "vocab_size=61"]),
    "two block sizes": (put("block_size", value=8), ["block_size=8", "block_size=5", "agree"]),
    "no block size": (
        both(put("block_size", value=None), put("dflash_config", "block_size", value=None)),
        ["block_size is missing"],
    ),
    "no theta": (put("rope_theta", value=None), ["rope_theta is missing"]),
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
    "quantised": (add("norm.weight", torch.ones(24).to(torch.float8_e4m3fn)), ["norm.weight", "float8_e4m3fn"]),
    "own head": (add("lm_head.weight", torch.zeros(61, 24)), ["lm_head.weight", "the target's"]),
    "own vocabulary": (add("d2t", torch.zeros(9, dtype=torch.int64)), ["d2t", "draft vocabulary"]),
}


@pytest.mark.parametrize(("edit", "named"), SPOILT.values(), ids=SPOILT.keys())
def test_what_does_not_fit_is_named(edit: Edit, named: list[str]) -> None:
    """Guards against a drafter that loads and drafts noise, and against errors that leave the user searching."""
    with pytest.raises(ModelError) as caught:
        read_dflash(exported(edit=edit))
    assert str(caught.value).startswith("drafter")
    assert all(name in str(caught.value) for name in named), str(caught.value)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (put("sample_from_anchor", value=True), ["sample_from_anchor=true"]),
        (put("speculators_model_type", value="eagle3"), ["'eagle3'"]),
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
    with pytest.raises(ModelError) as caught:
        read_dflash(exported("speculators", edit, **SLIDING))
    assert all(name in str(caught.value) for name in named), str(caught.value)


def test_a_file_cut_off_is_refused(tmp_path: Path) -> None:
    """Guards against half a download, and against an error that does not say so."""
    write_dflash(small_dflash(torch.bfloat16), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="cut off"):
        read_checkpoint(tmp_path)


def test_shards_are_read_and_a_broken_index_is_refused(tmp_path: Path) -> None:
    """Guards against a sharded checkpoint read in part, and a traceback for an index cut off."""
    net = small_dflash(torch.bfloat16)
    write_dflash(net, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    back = read_dflash(read_checkpoint(tmp_path)).state_dict()
    assert all(torch.equal(back[key], tensor) for key, tensor in net.state_dict().items())
    index.write_text(index.read_text()[:-20])
    with pytest.raises(ModelError, match="not JSON"):
        read_checkpoint(tmp_path)


def test_mixed_dtypes_lose_nothing() -> None:
    """Guards against norms in float32 rounded to the dtype of the matrices."""
    norm = torch.full((24,), 1.0009765625)  # has no bfloat16
    checkpoint = exported(edit=add("norm.weight", norm))
    for key in checkpoint.tensors.keys() - {"norm.weight"}:
        checkpoint.tensors[key] = checkpoint.tensors[key].to(torch.bfloat16)
    assert torch.equal(read_dflash(checkpoint).norm.weight, norm)


def test_nothing_is_written_over_or_out_of_nothing(tmp_path: Path) -> None:
    """Guards against a checkpoint overwritten, a net of NaN written."""
    with pytest.raises(ModelError, match="NaN: fc"):
        write_dflash(DFlashNet(DFlashConfig(**SIZES)), tmp_path)
    write_dflash(small_dflash(), tmp_path)
    with pytest.raises(ModelError, match="already holds"):
        write_dflash(small_dflash(), tmp_path)
