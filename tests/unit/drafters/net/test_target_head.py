"""Drafters that borrow the target's LM head, in layouts that hold one: the head is read from the target's files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.drafters.convert import convert, read_head
from outpace.drafters.kinds import write_net
from outpace.drafters.load import load_net
from outpace.lib.checkpoint import Checkpoint, write_checkpoint
from outpace.lib.errors import InvalidRequest, ModelError
from tests.unit.drafters.net.small import eagle3_net, randn
from tests.unit.drafters.net.test_eagle3_layouts import file
from tests.unit.drafters.net.test_medusa import medusa

HEAD = randn(50, 24, seed=3, dtype=torch.float32)
OTHERS = {"model.embed_tokens.weight": randn(50, 24, seed=4, dtype=torch.float32), "model.norm.weight": torch.ones(24)}


def target(folder: Path, head: Tensor | None = HEAD, shards: bool = False, **config: Any) -> str:
    """A target's files; without a head for None."""
    tensors = OTHERS | ({} if head is None else {"lm_head.weight": head})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    if not shards:
        save_file(tensors, folder / "model.safetensors")
        return str(folder)
    listed = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        listed[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, folder / listed[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return str(folder)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 and a Medusa drafter without heads of their own."""
    folder = tmp_path_factory.mktemp("drafters")
    net = eagle3_net(torch.float32, draft_vocab_size=50, own_head=False)
    written: Checkpoint = file(net=net, draft_vocab_size=50)
    write_checkpoint(folder / "eagle3", written.config, written.tensors)
    write_net(medusa(torch.float32, hidden_size=24, head="target"), folder / "medusa", "authors")
    return folder


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize(("kind", "layout"), [("eagle3", "midlayer"), ("eagle3", "speculators"), ("medusa", "vllm")])
def test_the_targets_head_is_written_into_the_file(
    kind: str, layout: str, tied: bool, shards: bool, drafters: Path, tmp_path: Path
) -> None:
    """Guards against the embedding taken for the head, another tensor of a shard, and a head that is not compared."""
    where = target(tmp_path / "target", None if tied else HEAD, shards, tie_word_embeddings=tied)
    done = convert(str(drafters / kind), tmp_path / "out", layout, target_weights=where)
    assert (done.is_equal, done.difference, done.dtype) == (True, 0.0, "float32")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], OTHERS["model.embed_tokens.weight"] if tied else HEAD)
    before, after = load_net(str(drafters / kind)).state_dict(), load_net(str(tmp_path / "out")).state_dict()
    assert after.keys() - before.keys() == {"lm_head.weight"}
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


def test_the_name_and_the_weights_of_the_target_are_two_things(drafters: Path, tmp_path: Path) -> None:
    """Guards against a folder of this machine written where vLLM looks for the target's name."""
    where = target(tmp_path / "target")
    convert(str(drafters / "eagle3"), tmp_path / "out", "speculators", target="org/target", target_weights=where)
    text = (tmp_path / "out" / "config.json").read_text()
    assert json.loads(text)["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert str(tmp_path) not in text


def test_no_bit_of_a_wider_head_is_lost_unless_asked_for(drafters: Path, tmp_path: Path) -> None:
    """Guards against a head rounded to the drafter's dtype, or a drafter rounded to the head's, without a word."""
    half = target(tmp_path / "half", HEAD.to(torch.bfloat16))
    assert convert(str(drafters / "eagle3"), tmp_path / "a", "midlayer", target_weights=half).dtype == "float32"
    written = load_file(tmp_path / "a" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(written, HEAD.to(torch.bfloat16).float())
    done = convert(str(drafters / "eagle3"), tmp_path / "b", "midlayer", target_weights=half, dtype="bfloat16")
    assert done.dtype == "bfloat16"


def test_a_target_is_asked_for_where_it_is_needed_and_nowhere_else(drafters: Path, tmp_path: Path) -> None:
    """Guards against files without a head, and against weights taken and dropped."""
    for kind, layout in (("eagle3", "midlayer"), ("eagle3", "speculators"), ("medusa", "vllm")):
        with pytest.raises(InvalidRequest, match=r"target_weights is missing.*folder or hub id"):
            convert(str(drafters / kind), tmp_path / "out", layout)
    convert(str(drafters / "medusa"), tmp_path / "authors", "authors")
    with pytest.raises(InvalidRequest, match=r"target_weights='org/t': layout 'authors' needs nothing of the target's"):
        convert(str(drafters / "medusa"), tmp_path / "out", "authors", target_weights="org/t")
    assert not (tmp_path / "out").exists()


def test_the_home_of_nobody_is_no_folder(drafters: Path, tmp_path: Path) -> None:
    """Guards against a traceback of pathlib's for `--target-weights=~models/qwen`, where `~/models/qwen` is meant."""
    with pytest.raises(InvalidRequest, match="path '~nobody-has-this-name/qwen': cannot be accessed"):
        convert(str(drafters / "eagle3"), tmp_path / "out", "midlayer", target_weights="~nobody-has-this-name/qwen")


def test_of_a_target_on_the_hub_only_the_heads_shard_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a whole model downloaded for one matrix."""
    where, asked = target(tmp_path / "target", shards=True), []

    def download(name: str, allow_patterns: list[str], revision: str | None) -> str:
        assert name == "org/target"
        asked.extend(allow_patterns)
        return where

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert torch.equal(read_head("org/target", 50, 24), HEAD)
    assert asked == ["config.json", "model.safetensors.index.json", "model-2.safetensors"]


def test_a_pulled_target_is_named_as_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `--target-weights smollm2-135m` looked for on the hub alone."""
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    (Path(target(tmp_path / "models" / "small")) / "outpace.json").write_text("{}")
    assert torch.equal(read_head("small", 50, 24), HEAD)


def test_a_pulled_gguf_file_has_no_head_to_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `--target-weights qwen2.5-coder-1.5b`, a GGUF file without config.json, refused without a
    remedy."""
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path))
    folder = tmp_path / "models" / "small"
    folder.mkdir(parents=True)
    for name in ("outpace.json", "small-q4_k_m.gguf"):
        (folder / name).write_text("{}")
    with pytest.raises(ModelError, match=r"target_weights='small': is a GGUF file, .* hub id of the original model"):
        read_head("small", 50, 24)


def cut(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-9])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index(**shards: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        listed = {key.replace("__", "."): file for key, file in shards.items()}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))

    return write


def extra(name: str, tensor: Tensor) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file(OTHERS | {"lm_head.weight": HEAD, name: tensor}, folder / "model.safetensors")

    return write


@pytest.mark.parametrize(
    ("head", "config", "damage", "complaint"),
    [
        (HEAD[:49], {}, None, r"lm_head.weight is torch.float32 \[49, 24\]; .*vocab_size=50 and hidden_size=24"),
        (HEAD[:, :16], {}, None, r"\[50, 16\]; the drafter was made for"),
        (HEAD.T, {}, None, r"\[24, 50\]; the drafter was made for"),
        (HEAD.to(torch.int8), {}, None, r"torch.int8 \[50, 24\].* in float32, bfloat16 or float16"),
        (None, {"tie_word_embeddings": False}, None, "holds no lm_head.weight; only targets"),
        (None, {"text_config": {"tie_word_embeddings": False}}, None, "holds no lm_head.weight; only targets"),
        (HEAD, {"final_logit_softcapping": 30.0}, None, "final_logit_softcapping: no layout"),
        (HEAD, {"text_config": {"final_logit_softcapping": 30.0}}, None, "final_logit_softcapping: no layout"),
        (HEAD, {"text_config": 3}, None, "text_config: must be an object"),
        (HEAD, {"tie_word_embeddings": "yes"}, None, "tie_word_embeddings must be true or false"),
        (HEAD, {}, extra("lm_head.bias", torch.ones(50)), "holds lm_head.bias"),
        (HEAD, {}, cut, r"model\.safetensors: cannot be read, maybe cut off"),
        (HEAD, {}, pickled, "save the target as safetensors"),
        (HEAD, {}, lambda folder: (folder / "config.json").unlink(), r"config\.json: cannot be read"),
        (HEAD, {}, index(lm_head__weight="gone.safetensors"), r"gone\.safetensors: cannot be read"),
        (HEAD, {}, index(lm_head__weight="../target/model.safetensors"), "file name of this folder"),
        (HEAD, {}, index(other="model.safetensors"), "holds no model.embed_tokens.weight"),
    ],
)
def test_what_cannot_be_used_as_a_head_is_refused(
    head: Tensor | None, config: dict[str, Any], damage: Callable[[Path], None] | None, complaint: str, tmp_path: Path
) -> None:
    """Guards against a head for another vocabulary or width, one that says less than the target's, and tracebacks."""
    where = target(tmp_path / "target", None if head is None else head.contiguous(), **config)
    if damage is not None:
        damage(Path(where))
    with pytest.raises(ModelError, match=complaint) as caught:
        read_head(where, 50, 24)
    assert "target" in str(caught.value)


def test_a_shard_that_lacks_the_head_and_a_target_that_is_nowhere(tmp_path: Path) -> None:
    """Guards against an index taken at its word, and a name of nothing."""
    where = target(tmp_path / "target", shards=True)
    save_file({"x": torch.ones(1)}, Path(where) / "model-2.safetensors")
    with pytest.raises(ModelError, match=r"model-2\.safetensors: cannot be read.*lm_head\.weight"):
        read_head(where, 50, 24)
    with pytest.raises(ModelError, match="target_weights='no/such/target': no such folder"):
        read_head("no/such/target", 50, 24)
