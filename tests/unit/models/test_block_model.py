"""Models over the blocks of a GGUF file, as they are."""

import os
import re
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from outpace.core.params import SamplingParams
from outpace.engine.engine import Engine
from outpace.kernels.blocks import BlockLinear, BlockWeight
from outpace.kernels.linear import KernelLinear, Kind
from outpace.lib.errors import ModelError, NonFiniteLogits
from outpace.models.costs_file import identity
from outpace.models.draft import early_exit
from outpace.models.exactness import probe
from outpace.models.loading.block_model import fill_blocks, read_blocks
from outpace.models.loading.gguf import GgufFile, read_gguf
from outpace.models.loading.gguf_config import config_of
from outpace.models.loading.gguf_weights import weights_of
from outpace.models.loading.registry import Location
from outpace.models.loading.weights import read_model
from outpace.models.packed import PassPart
from outpace.models.target import PackedTarget
from outpace.trees.proposer import EmptyDraft
from tests.unit.models.gguf_models import gguf_of
from tests.unit.models.tiny import needs_kernels, open_with, random_ids, stock_model, tiny_config

pytestmark = needs_kernels
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", "gpt2")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
SIZES_OF: dict[str, dict[str, Any]] = {
    "gpt2": {"hidden_size": 64, "num_attention_heads": 8, "n_inner": 96},
    "qwen3_moe": SIZES | {"moe_intermediate_size": 64, "mlp_only_layers": []},
    "gemma2": SIZES | {"tie_word_embeddings": True},
}


def target_of(file: GgufFile, config: Any) -> PackedTarget:
    return PackedTarget(read_blocks(file, config, torch.float32, "outpace"), 128, 4, (), quantize="file")


def block_target(config: Any, path: Path, kind: str = "Q8_0") -> PackedTarget:
    return target_of(gguf_of(path, config, kind), config)


def mixed_target(folder: Path, kind: str, parts: tuple[str, ...]) -> PackedTarget:
    """Of a file in Q8_0, some of whose tensors have another format."""
    config = tiny_config("qwen2", **SIZES)
    file, other = gguf_of(folder / "m.gguf", config, "Q8_0"), gguf_of(folder / "other.gguf", config, kind)
    file.tensors.update({name: other.tensors[name] for name in file.tensors if any(part in name for part in parts)})
    return target_of(file, config)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_on_its_blocks(family: str, tmp_path: Path) -> None:
    """Guards against matrices that are left out, joined in another order or read with another family's rows, against
    experts in the wrong place, and against passes that are not batch-invariant."""
    config = tiny_config(family, **SIZES_OF.get(family, SIZES))
    target, ids = block_target(config, tmp_path / "m.gguf"), random_ids(20, seed=3)
    with torch.inference_mode():
        expected = stock_model(config)(torch.tensor([ids])).logits[0]
    hidden = target.run([PassPart.of(0, torch.tensor(ids))])
    found = target.head(hidden).logits
    # 8-bit weights and activations: 1 % of the numbers each, more after three layers. Other rows give 100 %.
    assert float((found - expected).norm() / expected.norm()) < 0.1
    assert isinstance(target.head.layer, BlockLinear)
    assert probe(target).is_bitwise


def test_experts_stay_in_the_files_format(tmp_path: Path) -> None:
    """Guards against experts of 16 bits that take twice their memory, and a stack that is converted once per expert."""
    target = block_target(tiny_config("qwen3_moe", **SIZES_OF["qwen3_moe"]), tmp_path / "m.gguf", "F16")
    kinds = {layer.kind for layer in target.decoder.modules() if isinstance(layer, KernelLinear)}
    assert kinds == {Kind.HALVES, Kind.FLOAT32}, "a file's routers have 32 bits"


@pytest.mark.parametrize(("key", "value"), [("feed_forward_length", 96.0), ("rope.freq_base", "x")])
def test_values_of_another_type_are_one_line(key: str, value: Any, tmp_path: Path) -> None:
    """Guards against a traceback for a config whose values have a type that no check foresees."""
    file = gguf_of(tmp_path / "m.gguf", tiny_config("qwen2", **SIZES), "Q8_0")
    file.values[f"qwen2.{key}"] = value
    location, config = Location("m", str(tmp_path / "m.gguf"), file), cast(Any, config_of(file, "m"))
    with pytest.raises(ModelError):
        read_model(location, config, torch.float32, torch.device("cpu"), "outpace", "file")


def test_formats_may_differ_between_siblings(tmp_path: Path) -> None:
    """Guards against queries, keys and values of different formats, as in Q4_K_M, that leave the compiled decoder."""
    target = mixed_target(tmp_path, "Q4_0", ("attn_v", "ffn_up"))
    assert target.compiled is not None, target.computed_by
    formats = {module.formats for module in target.decoder.modules() if isinstance(module, BlockLinear)}
    assert ("Q8_0", "Q8_0", "Q4_0") in formats
    assert probe(target).is_bitwise


@pytest.mark.parametrize(
    ("name", "kind", "form"),
    [
        ("blk.1.ffn_down.weight", "Q8_0", "<e"),
        ("blk.1.ffn_down.weight", "F16", "<e"),
        ("blk.1.attn_q.bias", "Q8_0", "<f"),
        ("blk.1.attn_norm.weight", "Q8_0", "<f"),
    ],
)
def test_weights_that_are_not_finite_are_refused(name: str, kind: str, form: str, tmp_path: Path) -> None:
    """Guards against a damaged file that answers with noise: one infinite factor or number among all weights."""
    path, config = tmp_path / "m.gguf", tiny_config("qwen2", **SIZES)
    tensor = gguf_of(path, config, kind).tensors[name]
    whole = bytearray(path.read_bytes())
    start = whole.index(bytes(tensor.data))
    whole[start : start + struct.calcsize(form)] = struct.pack(form, float("inf"))
    path.write_bytes(whole)
    with pytest.raises(ModelError, match=rf"{re.escape(name)}: has weights that are NaN or infinite"):
        read_blocks(read_gguf(path), config, torch.float32, "outpace")


def test_an_embedding_that_is_not_finite_is_found_where_its_token_occurs(tmp_path: Path) -> None:
    """Guards against noise from a row of an untied embedding, which nothing reads before its token comes."""
    path, config = tmp_path / "m.gguf", tiny_config("qwen2", **SIZES, tie_word_embeddings=False)
    row = bytes(gguf_of(path, config, "Q8_0").tensors["token_embd.weight"].data[9])
    whole = bytearray(path.read_bytes())
    start = whole.index(row)
    whole[start : start + 2] = struct.pack("<e", float("inf"))
    path.write_bytes(whole)
    engine, params = Engine(target_of(read_gguf(path), config)), SamplingParams(max_new_tokens=2)
    right, wrong = (engine.add(ids, params, EmptyDraft())[0] for ids in ([5, 6, 7], [5, 9, 7]))
    while not engine.is_idle:
        engine.step()
    assert len(engine.result(right).token_ids) == 2
    with pytest.raises(NonFiniteLogits):
        engine.result(wrong)


def test_a_head_restricted_to_some_ids_scores_them_alike(tmp_path: Path) -> None:
    """Guards against drafters that draft from a part of the vocabulary with another score for each id."""
    target = block_target(tiny_config("qwen2", **SIZES), tmp_path / "m.gguf")
    _, outputs = open_with(target, random_ids(9, seed=1))
    ids = torch.tensor([5, 0, 121])
    hidden = torch.randn(3, 64)
    part = target.head.restricted(ids)
    assert torch.equal(part.own_scores(hidden), target.head.scores(hidden)[:, ids])
    assert target.head.restricted(ids) is part
    assert outputs.logits.isfinite().all()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_matrices_are_read_from_the_file_as_the_mapping_shows_them(family: str, tmp_path: Path) -> None:
    """Guards against rows read from another place in the file than they are mapped at, such as the rows of Llama's
    queries, which are in another order, and the later experts of a stack, and against a mapping that is still read."""
    config = tiny_config(family, **SIZES_OF.get(family, SIZES))
    file = gguf_of(tmp_path / "m.gguf", config, "Q4_0")
    from_file, from_mapping = read_blocks(file, config, torch.float32, "outpace"), stock_model(config)
    fill_blocks(from_mapping, weights_of(file, config), torch.float32)
    assert layers_of(from_file)
    for (name, first), (_, second) in zip(layers_of(from_file), layers_of(from_mapping), strict=True):
        for (_, panels, _), (_, expected, _) in zip(first._pieces, second._pieces, strict=True):
            assert torch.equal(panels, expected), name


@pytest.mark.skipif(sys.platform == "win32", reason="handles are made up")
def test_windows_names_files_by_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against GGUF files that seem cut off to kernels which MinGW built, whose C library has other descriptors
    than Python's."""
    config, handles = tiny_config("llama", **SIZES), list[int]()

    def get_osfhandle(descriptor: int) -> int:
        handles.append(os.dup(descriptor))
        return handles[-1]

    monkeypatch.setattr("outpace.kernels.blocks.sys", SimpleNamespace(platform="win32"))
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(get_osfhandle=get_osfhandle))
    model = read_blocks(gguf_of(tmp_path / "m.gguf", config, "Q4_0"), config, torch.float32, "outpace")
    assert layers_of(model)
    assert len(handles) > 1
    for handle in handles:
        os.close(handle)


def test_a_file_that_changes_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    """Guards against a program that is killed by a signal, or weights of two files in one model, where a download goes
    on or a file is replaced after its header was read."""
    path, config = tmp_path / "m.gguf", tiny_config("qwen2", **SIZES)
    file, whole = gguf_of(path, config, "Q8_0"), path.read_bytes()
    path.rename(tmp_path / "first.gguf")
    with pytest.raises(ModelError, match=r"m\.gguf: cannot be read again: .*No such file"):
        read_blocks(file, config, torch.float32, "outpace")
    path.write_bytes(whole)
    with pytest.raises(ModelError, match="was replaced by another file while it was loaded; load it again"):
        read_blocks(file, config, torch.float32, "outpace")
    weight = file.tensors["blk.0.attn_q.weight"]
    with path.open("rb") as cut:
        past_the_end = cut.fileno(), len(whole) - weight.data.size // 2
        rows = [BlockWeight(weight.kind, weight.data, weight.shape[-1], name=weight.name)]
        with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight: the file was cut off while it was read"):
            BlockLinear(rows, None, torch.float32, place=lambda data: past_the_end)


def layers_of(model: nn.Module) -> list[tuple[str, BlockLinear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, BlockLinear)]


def test_times_are_of_a_files_formats(tmp_path: Path) -> None:
    """Guards against trees sized for the passes of another file of the same model, of half the bytes."""
    config = tiny_config("llama", **SIZES)
    one, other = (block_target(config, tmp_path / f"{kind}.gguf", kind) for kind in ("Q8_0", "Q4_0"))
    assert identity(one) != identity(other)


def test_a_fingerprint_dequantises_no_embedding(tmp_path: Path) -> None:
    """Guards against half a gigabyte of numbers, kept for a hash."""
    target = block_target(tiny_config("llama", **SIZES), tmp_path / "m.gguf")
    early_exit(target, 1).plain_tensors()
    assert "weight" not in vars(target.embedding)


def test_formats_that_cannot_be_joined_are_named(tmp_path: Path) -> None:
    """Guards against "a NoneType" as the reason that a model runs slowly."""
    assert "cannot be joined" in mixed_target(tmp_path, "F16", ("attn_v",)).computed_by
