"""Public EAGLE-3 files: who wrote one, what its fields mean, and that nothing in it goes unaccounted for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.drafters.eagle3.files import IDS, layout_of, read_eagle3
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.fusion import membership
from outpace.drafters.kinds import write_net
from outpace.lib.checkpoint import Checkpoint
from outpace.lib.errors import ModelError
from tests.unit.drafters.net.small import eagle3_net
from tests.unit.drafters.net.test_rotary import LLAMA3

LAYER = {
    "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 64,
    "vocab_size": 50, "hidden_act": "silu",
}  # fmt: skip


def file(architecture: str = "LlamaForCausalLMEagle3", net: Eagle3Net | None = None, **config: Any) -> Checkpoint:
    """A raw checkpoint around a net's weights; a field given as None is absent."""
    net = net or eagle3_net()
    fields = {"architectures": [architecture], **LAYER, "draft_vocab_size": net.config.draft_vocab_size, **config}
    tensors = dict(net.state_dict()) | ({} if net.d2t is None else {"t2d": membership(net.d2t, 50)})
    return Checkpoint("here", {key: value for key, value in fields.items() if value is not None}, tensors)


def speculators(net: Eagle3Net | None = None, **config: Any) -> Checkpoint:
    raw = file(net=net)
    fields = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": LAYER | {"model_type": "llama"},
        "draft_vocab_size": 20,
        "norm_before_residual": False,
        **config,
    }
    tensors = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in raw.tensors.items()}
    return Checkpoint("here", {key: value for key, value in fields.items() if value is not None}, tensors)


def same(net: Eagle3Net, wanted: Eagle3Net) -> bool:
    found, expected = net.state_dict(), wanted.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("checkpoint", "layout"),
    [
        (file("LlamaForCausalLM"), "LlamaForCausalLM"),
        (file("Eagle3LlamaForCausalLM"), "Eagle3LlamaForCausalLM"),
        (file("LlamaForCausalLMEagle3"), "LlamaForCausalLMEagle3"),
        (speculators(), "speculators"),
    ],
    ids=["authors", "angelslim", "specforge", "speculators"],
)
def test_every_layout_gives_the_same_weights(checkpoint: Checkpoint, layout: str) -> None:
    """Guards against a layout whose names are mapped to the wrong weights, with and without the `model.` prefix."""
    assert layout_of(checkpoint) == layout
    net = read_eagle3(checkpoint)
    assert same(net, eagle3_net())
    assert net.config.rope_theta == 500000.0
    assert net.fc.weight.dtype == torch.float64, "the net must have its file's dtype"
    assert net.config.taps_of(32) == (2, 16, 29)
    prefixed = {
        key if key in ("d2t", "t2d", "lm_head.weight") else f"model.{key}": tensor
        for key, tensor in checkpoint.tensors.items()
    }
    assert same(read_eagle3(replace(checkpoint, tensors=prefixed)), eagle3_net())


def test_the_authors_files_turn_by_10000_when_they_state_no_base() -> None:
    """Guards against the target's base taken for a drafter trained without one."""
    assert read_eagle3(file("LlamaForCausalLM", rope_theta=None)).config.rope_theta == 10000.0
    for architecture in ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"):
        with pytest.raises(ModelError, match="rope_theta is missing"):
            read_eagle3(file(architecture, rope_theta=None))
    plain = {key: value for key, value in LAYER.items() if key != "rope_theta"}
    with pytest.raises(ModelError, match="rope_theta is missing"):
        read_eagle3(speculators(transformer_layer_config=plain))


def test_rotation_is_read_from_old_and_new_fields() -> None:
    """Guards against a base or a scaling lost because transformers 5 keeps both in rope_parameters."""
    llama3 = LLAMA3 | {"original_max_position_embeddings": 32}
    old = read_eagle3(file(rope_scaling=llama3)).config
    new = read_eagle3(file(rope_theta=None, rope_parameters=llama3 | {"rope_theta": 500000.0})).config
    assert old == new
    assert old.rope_scaling == llama3
    default = read_eagle3(file(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})).config
    assert default.rope_scaling is None
    with pytest.raises(ModelError, match="disagree"):
        read_eagle3(file(rope_parameters={"rope_theta": 10000.0}))
    with pytest.raises(ModelError, match="dynamic"):
        read_eagle3(file(rope_scaling={"type": "dynamic", "factor": 2.0}))


def test_norm_output_means_another_thing_in_specforge() -> None:
    """Guards against SpecForge's default, a norm before the head, taken for feeding back the normed state."""
    assert not read_eagle3(file("LlamaForCausalLMEagle3", norm_output=True)).config.norm_output
    assert read_eagle3(file("Eagle3LlamaForCausalLM", norm_output=True)).config.norm_output
    assert read_eagle3(speculators(norm_output=True)).config.norm_output
    assert not read_eagle3(speculators()).config.norm_output
    with pytest.raises(ModelError, match="norm before the head"):
        read_eagle3(file("LlamaForCausalLMEagle3", norm_output=False))


def test_a_missing_norm_before_residual_is_asked_for() -> None:
    """Guards against guessing: for speculators files vLLM takes true, the library that wrote them false."""
    with pytest.raises(ModelError, match="norm_before_residual"):
        read_eagle3(speculators(norm_before_residual=None))
    assert read_eagle3(speculators(norm_before_residual=True)).config.norm_before_residual
    assert not read_eagle3(file()).config.norm_before_residual


def test_layer_ids_count_inputs_or_outputs_by_where_they_stand() -> None:
    """Guards against features one layer off: eagle_config counts layer outputs, the top level indexes hidden_states."""
    inside = {"use_aux_hidden_state": True, IDS: [1, 15, 28]}
    assert read_eagle3(file(eagle_config=inside)).config.taps == (2, 16, 29)
    assert read_eagle3(speculators(eagle_aux_hidden_state_layer_ids=[2, 16, 29])).config.taps == (2, 16, 29)
    both = file(eagle_config=inside, eagle_aux_hidden_state_layer_ids=[2, 16, 29])
    assert read_eagle3(both).config.taps == (2, 16, 29)
    with pytest.raises(ModelError, match="name different layers"):
        read_eagle3(file(eagle_config=inside, eagle_aux_hidden_state_layer_ids=[1, 15, 28]))
    with pytest.raises(ModelError, match="whole numbers"):
        read_eagle3(file(eagle_aux_hidden_state_layer_ids=[1, "15", 28]))
    five = eagle3_net(taps=(1, 9, 17, 25, 33))
    assert read_eagle3(file(net=five, eagle_aux_hidden_state_layer_ids=[1, 9, 17, 25, 33])).config.tap_count == 5
    with pytest.raises(ModelError, match=r"fc has 120 columns, but no layer ids are stated"):
        read_eagle3(file(net=five))


def test_norms_before_fc_are_found_under_their_older_names() -> None:
    """Guards against SGLang's three norms dropped, or put in another order."""
    net = eagle3_net(fc_norm=True)
    checkpoint = file(net=net, fc_norm=True)
    old = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}
    tensors = {key.replace(key[:9], old.get(key[:9], key[:9]), 1): tensor for key, tensor in checkpoint.tensors.items()}
    assert "aux_norm_mid.weight" in tensors
    assert same(read_eagle3(replace(checkpoint, tensors=tensors)), net)
    with pytest.raises(ModelError, match=r"unexpected fc_norm\.0\.weight"):
        read_eagle3(file(net=net))
    both = eagle3_net(norm_before_fc=True)
    assert same(read_eagle3(file(net=both, eagle_config={"norm_before_fc": True})), both)


def test_query_and_key_norms_come_with_qwen3_layers_only() -> None:
    """Guards against a Qwen3 target taken for a drafter with norms of its heads, and norms that nobody computes."""
    net = eagle3_net(qk_norm=True)
    assert same(read_eagle3(file(net=net)), net)
    assert same(read_eagle3(speculators(net, transformer_layer_config=LAYER | {"model_type": "qwen3"})), net)
    with pytest.raises(ModelError, match=r"unexpected midlayer\.self_attn.k_norm.weight"):
        read_eagle3(speculators(net))
    half = file(net=net)
    del half.tensors["midlayer.self_attn.k_norm.weight"]
    with pytest.raises(ModelError, match=r"missing midlayer\.self_attn.k_norm.weight"):
        read_eagle3(half)
    assert not read_eagle3(file("Eagle3LlamaForCausalLM", target_model_type="qwen3")).config.qk_norm


def test_a_full_vocabulary_needs_neither_maps_nor_head() -> None:
    """Guards against maps that are there but say nothing, and against a head invented for a file without one."""
    full = eagle3_net(draft_vocab_size=50)
    checkpoint = file(net=full, draft_vocab_size=None)
    assert same(read_eagle3(checkpoint), full)
    identity = {"d2t": torch.zeros(50, dtype=torch.int64), "t2d": torch.ones(50, dtype=torch.bool)}
    assert same(read_eagle3(replace(checkpoint, tensors=checkpoint.tensors | identity)), full)
    del checkpoint.tensors["lm_head.weight"]
    shared = read_eagle3(checkpoint)
    assert shared.lm_head is None
    assert not shared.config.own_head
    own = eagle3_net(own_embedding=True)
    assert same(read_eagle3(file(net=own)), own)


def changed(**tensors: Tensor) -> Callable[[], Checkpoint]:
    def build() -> Checkpoint:
        whole, spoilt = file(), {key.replace("__", "."): tensor for key, tensor in tensors.items()}
        return replace(whole, tensors=whole.tensors | spoilt)

    return build


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: file("LlamaForCausalLM", draft_vocab_size=None), "without draft_vocab_size"),
        (lambda: file("EagleLlamaForCausalLM"), "architectures="),
        (lambda: file(head_dim=6), r"head_dim is 6.*24 rows, but q_proj has 32.*head_dim=8"),
        (lambda: file(head_dim=None), r"hidden_size / num_attention_heads is 6.*head_dim=8"),
        (lambda: file(num_key_value_heads=4), r"k_proj.weight has shape \[16, 48\], its config says \[32, 48\]"),
        (lambda: file(draft_vocab_size=60), "draft_vocab_size=60 exceeds vocab_size=50"),
        (lambda: file(vocab_size=30), "outside vocab_size=30"),
        (lambda: file(hidden_size="24"), "hidden_size='24' must be a whole number"),
        (lambda: file(rms_norm_eps="small"), "rms_norm_eps='small'"),
        (lambda: file(hidden_act="gelu"), "hidden_act='gelu'"),
        (lambda: file(mlp_bias=True), "mlp_bias"),
        (lambda: file(layer_types=["sliding_attention"]), "sliding"),
        (lambda: file(fc_norm="yes"), "fc_norm must be true or false"),
        (lambda: file(fc_norm=True, eagle_config={"fc_norm": False}), "fc_norm"),
        (lambda: file(target_hidden_size=16), "target_hidden_size=16"),
        (changed(layers__0__hidden_norm__weight=torch.ones(24)), "two tensors stand for midlayer.hidden_norm.weight"),
        (changed(fc__weight=torch.ones(24, 48)), "fc has 48 columns"),
    ],
)
def test_what_does_not_fit_is_named(build: Callable[[], Checkpoint], message: str) -> None:
    """Guards against errors that leave the user with a stack trace, and against files half understood."""
    with pytest.raises(ModelError, match=message) as caught:
        read_eagle3(build())
    assert str(caught.value).startswith("here: ")


def test_the_midlayer_file_states_what_engines_would_guess(tmp_path: Path) -> None:
    """Guards against engines that fall back to a base, a head size or layer ids of their own."""
    write_net(eagle3_net(taps=(2, 5, 9)), tmp_path, "midlayer")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rope_theta"], config["head_dim"], config["draft_vocab_size"]) == (10000.0, 8, 20)
    assert config[IDS] == [2, 5, 9], "vLLM indexes hidden_states"
    assert config["eagle_config"][IDS] == [1, 4, 8], "SGLang counts layer outputs"


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "norm_output", "qk_norm"])
def test_a_variant_that_an_engine_would_skip_is_not_written(tmp_path: Path, flag: str) -> None:
    """Guards against a file that loads without complaint and drafts nonsense."""
    changes: dict[str, Any] = {flag: True}
    with pytest.raises(ModelError, match=f"cannot express {flag}.*layout='speculators'"):
        write_net(eagle3_net(**changes), tmp_path, "midlayer")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("layout", "changes"), [("midlayer", {}), ("headless", {"own_head": False})])
def test_the_embedding_is_no_layers_output(layout: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Guards against layer -1 in a file: SGLang counts the outputs of layers from 0."""
    net = eagle3_net(torch.float32, draft_vocab_size=50, taps=(0, 2, 5), **changes)
    with pytest.raises(ModelError, match=r"cannot express taps=\[0, 2, 5\].*layout='speculators'"):
        write_net(net, tmp_path, layout)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["midlayer", "speculators"])
def test_a_file_without_a_head_is_not_written(layout: str, tmp_path: Path) -> None:
    """Guards against files without a head, which engines fill with whatever they have."""
    with pytest.raises(ModelError, match="own_head=False"):
        write_net(eagle3_net(torch.float32, draft_vocab_size=50, own_head=False), tmp_path, layout)
    assert not list(tmp_path.iterdir())
