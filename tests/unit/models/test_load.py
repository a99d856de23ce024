"""From a name to a target: what is found first, and what is said when nothing usable is found."""

import json
import time
import weakref
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import outpace
from outpace.core.tree import MAX_TREE_NODES
from outpace.lib.errors import InvalidRequest, ModelError, UnsupportedModel
from outpace.lib.quick import without_collection
from outpace.models.families import positions_of
from outpace.models.loading import load
from outpace.models.loading.load import load_target, load_vocabulary_facts
from outpace.models.loading.precision import check_kv_cache_dtype, choose_device, choose_dtype
from outpace.models.loading.registry import resolve
from tests.unit.models.tiny import needs_kernels, save_tiny_model, tiny_config, tiny_target, write_tiny_gguf


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home for pulled models and an empty folder to stand in."""
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def test_a_folder_beats_a_pulled_model_and_that_beats_the_hub(home: Path) -> None:
    """Guards against a local checkpoint shadowed by a download of the same name, and against needless downloads."""
    assert resolve("name").path == "name", "nothing here: the hub's"
    stored = home / "models" / "name"
    stored.mkdir(parents=True)
    assert resolve("name").path == "name", "a folder without its record is half a pull"
    (stored / "outpace.json").write_text("{}")
    assert resolve("name").path == str(stored)
    Path("name").mkdir()
    assert resolve("name").path == "name"
    assert Path(resolve("name").path).is_dir()
    assert resolve("owner/name").path == "owner/name"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "some/deep/path", "none.gguf"])
def test_a_path_that_does_not_exist_is_not_sought_on_the_hub(name: str) -> None:
    """Guards against a mistyped path, or a name of a file, answered with an error about hub authentication."""
    with pytest.raises(ModelError, match=f"{name}: no such (folder or )?GGUF file"):
        resolve(name)


@pytest.mark.parametrize("name", ["gpt-17", "owner/gpt-17", "gpt 17"])
def test_an_unknown_name_is_answered_at_once(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against 40 seconds of retries where the hub is out of reach, and an error that names half the places."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    stored = home / "models" / "mine"
    stored.mkdir(parents=True)
    (stored / "outpace.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"{name}: no model found.*\(mine, .*smollm2-135m\).* hub's cache, and http"):
        load_target(name, "auto", "cpu", None, 1)
    assert not waits


def test_a_complete_gguf_loads_and_answers(gguf: Path) -> None:
    """Guards against a file check that refuses good files, and against the EOS id lost on the way."""
    model = outpace.load(str(gguf), dtype="float32")
    assert model.target.eos_token_ids == (2,)
    assert model.target.max_length == 128
    assert model.generate("hello", max_new_tokens=4, method="recycle").token_ids == (
        model.generate("hello", max_new_tokens=4, method="plain").token_ids
    )


@pytest.mark.parametrize("name", ["TINY.GGUF", "sha256-0123"])
def test_a_gguf_file_may_have_any_name(name: str, gguf: Path) -> None:
    """Guards against a file that llama.cpp loads, such as a blob of Ollama's, read as config.json or not found."""
    Path(name).write_bytes(gguf.read_bytes())
    for given in (name, str(Path(name).absolute())):
        assert resolve(given).gguf is not None


def test_a_file_of_another_format_is_not_called_incomplete() -> None:
    """Guards against "download it again" for a whole model.safetensors whose folder was meant."""
    Path("model.safetensors").write_bytes(bytes(64))
    with pytest.raises(ModelError, match=r"safetensors: not a GGUF file; .* give the folder with its config\.json"):
        resolve("./model.safetensors")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_a_gguf_cut_off_half_way_is_refused_before_any_weight_is_read(gguf: Path, tmp_path: Path, share: float) -> None:
    """Guards against an interrupted download that loads with weights missing, or fails with a shape mismatch."""
    whole = gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match=rf"cut\.gguf: not a complete GGUF file \({cut.stat().st_size} bytes\).*again"):
        outpace.load(str(cut))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dtype": "int8"}, r"dtype='int8': use 'auto'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': use one of 'auto', 'int8', 'bfloat16', 'float32'"),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype=8: must be text"),
        ({"device": "abacus"}, r"device='abacus': not a device"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be an integer >= 1"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0: must be an integer >= 1"),
        ({"prompt_slowdown": 1}, r"prompt_slowdown=1: must be a number in \(1, 100\]"),
        ({"prompt_slowdown": float("inf")}, r"prompt_slowdown=inf: must be a number in \(1, 100\]"),
        ({"prompt_slowdown": "2"}, r"prompt_slowdown='2': must be a number in \(1, 100\]"),
        ({"max_model_len": 0}, "max_model_len=0: must be an integer >= 1"),
        ({"max_model_len": 257}, "max_model_len=257: .* positions for 1 to 256 tokens"),
        ({"budget": -1}, "budget=-1"),
        ({"method": "guess"}, "method='guess': unknown; choose one of plain"),
    ],
)
def test_a_bad_option_is_refused_with_a_remedy(checkpoint: Path, options: dict[str, object], complaint: str) -> None:
    """Guards against options that fail deep in torch, or are corrected in silence."""
    with pytest.raises(InvalidRequest, match=complaint):
        outpace.load(str(checkpoint), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "device", "switch", "complaint"),
    [
        (torch.float32, "cuda", "on", "'int8': its kernels are for CPUs; use device='cpu' or kv_cache_dtype='auto'"),
        (torch.float64, "cpu", "on", "'int8': not with torch.float64; use dtype='float32'"),
        (torch.float32, "cpu", "off", "'int8': its kernels are not there: .*; unset OUTPACE_KERNELS"),
    ],
)
def test_int8_keys_without_kernels_are_refused(
    dtype: torch.dtype, device: str, switch: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a format that is silently another, or fails in a pass."""
    monkeypatch.setenv("OUTPACE_KERNELS", switch)
    check_kv_cache_dtype("auto", dtype, torch.device(device))
    with pytest.raises(InvalidRequest, match=f"kv_cache_dtype={complaint}"):
        check_kv_cache_dtype("int8", dtype, torch.device(device))


@needs_kernels
def test_keys_are_as_coarse_as_the_weights_were_made(checkpoint: Path) -> None:
    """Guards against float32 keys of a model that was rounded to bfloat16, twice the memory, and against rounding the
    keys of one in float32, or of anything where no kernel reads them."""
    for dtype, kept in (("bfloat16", "bfloat16"), ("float32", "float32"), ("float64", "float64")):
        assert load_target(str(checkpoint), dtype, "cpu", None, 1)[0].kv_cache_dtype == kept


def test_a_missing_gpu_is_reported(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against falling back to the CPU in silence; "auto" is for that."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InvalidRequest, match="device='cuda': no such GPU is visible"):
        choose_device("cuda")
    with pytest.raises(InvalidRequest, match="device='cuda:99': no such GPU"):
        outpace.load(str(checkpoint), device=99)
    with pytest.raises(InvalidRequest, match="device=200: must be an integer from 0 to 127"):
        outpace.load(str(checkpoint), device=200)  # torch makes -56 of it
    assert choose_device("auto").type == "cpu"
    assert choose_dtype("auto", torch.device("cpu")) in (torch.bfloat16, torch.float32)


def test_the_models_limit_and_the_users_shorter_one(checkpoint: Path) -> None:
    """Guards against positions the model was not built for, and against a shorter limit that is ignored."""
    assert load_target(str(checkpoint), "float32", "cpu", None, 1)[0].max_length == 256
    assert load_target(str(checkpoint), "float32", "cpu", 1, 1)[0].max_length == 1
    for longest, expected in ((40, 40), (999, 256)):  # as in training, which needs no memory for more
        assert load_target(str(checkpoint), "float32", "cpu", None, 1, longest=longest)[0].max_length == expected


def test_yarn_adds_positions_to_those_of_a_config(tmp_path: Path) -> None:
    """Guards against prompts of more than 32,768 tokens refused by Qwen2.5 and Qwen3 with YaRN in their configs, added
    as their model cards say, which leave max_position_embeddings as it is."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    folder = save_tiny_model(tmp_path / "m", max_position_embeddings=64, rope_parameters=yarn)
    assert load_target(str(folder), "float32", "cpu", None, 1)[0].max_length == 256
    with pytest.raises(InvalidRequest, match="positions for 1 to 256 tokens"):
        load_target(str(folder), "float32", "cpu", 257, 1)
    assert positions_of(tiny_config("llama", rope_parameters=yarn)) == 512, "a config with all of its positions"
    assert positions_of(tiny_config("llama", rope_parameters=yarn | {"factor": 1e300})) == 512


def test_the_limit_of_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a context that memory does not hold: taken in silence where it was wanted, refused where it was
    only the model's limit."""
    target, _ = load_target(str(checkpoint), "float32", "cpu", None, 2)
    rows = {"kv_cache_memory_bytes": (MAX_TREE_NODES + 40) * target.row_bytes}
    assert load_target(str(checkpoint), "float32", "cpu", None, 2, **rows)[0].max_length == 40
    with pytest.raises(InvalidRequest, match=r"max_model_len=41: .* hold 40 tokens per request.*kv_cache_memory_bytes"):
        load_target(str(checkpoint), "float32", "cpu", 41, 2, **rows)
    monkeypatch.setattr(load, "free_bytes", lambda device: 1000)
    with pytest.raises(InvalidRequest, match=r"max_model_len=256: .* hold 1 tokens.*free memory"):
        load_target(str(checkpoint), "float32", "cpu", None, 2)


@pytest.mark.parametrize(
    ("generation_eos", "config_eos", "expected"),
    [([7, 5], 6, (7, 5)), (7, 6, (7,)), (None, 6, (6,)), (None, None, (0,)), (-1, 6, ()), ([7, -1], 6, (7,))],
)
def test_eos_ids_of_the_generation_config_come_first(
    tmp_path: Path, generation_eos: int | list[int] | None, config_eos: int | None, expected: tuple[int, ...]
) -> None:
    """Guards against chat models that end on an id only their generation config names, so that they never stop."""
    folder = save_tiny_model(tmp_path / "m", generation_eos=generation_eos, eos_token_id=config_eos)
    assert load_target(str(folder), "float32", "cpu", None, 1)[0].eos_token_ids == expected


def test_a_generation_config_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    """Guards against chats that never end: transformers passes over such a file, and the config names another id."""
    folder = save_tiny_model(tmp_path / "m", generation_eos=7, eos_token_id=6)
    file = folder / "generation_config.json"
    file.write_text(file.read_text()[:20])
    with pytest.raises(ModelError, match=r"generation_config\.json: not JSON"):
        load_target(str(folder), "float32", "cpu", None, 1)
    with pytest.raises(ModelError, match=r"generation_config\.json: not JSON"):
        load_vocabulary_facts(str(folder))


def test_broken_checkpoints_are_told_apart(tmp_path: Path) -> None:
    """Guards against one message for everything: no model, no tokenizer, cut-off weights, a refused architecture."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="empty: no model found"):
        outpace.load(str(tmp_path / "empty"))
    folder = save_tiny_model(tmp_path / "m")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read, maybe cut off"):
        outpace.load(str(folder))
    weights.write_bytes(whole)
    for tokenizer in folder.glob("tokenizer*"):
        tokenizer.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        outpace.load(str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_type": "dynamic", "factor": 2}}))
    with pytest.raises(UnsupportedModel, match="dynamic"):
        outpace.load(str(folder))


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("adapter_config.json", r"tuned: adapter_config\.json: is an adapter of 'owner/base', .*; merge both"),
        ("a.gguf", r"tuned: no config\.json there; load a file of this folder by its path: a\.gguf"),
    ],
)
def test_a_folder_of_something_else_says_what_to_load(file: str, complaint: str) -> None:
    """Guards against "no config.json, see the hub" for an adapter, and for the folder around GGUF files."""
    Path("tuned").mkdir()
    Path("tuned", file).write_text('{"base_model_name_or_path": "owner/base"}')
    with pytest.raises(ModelError, match=complaint):
        load_target("tuned", "auto", "cpu", None, 1)


def test_short_dtype_names_mean_what_they_mean_elsewhere() -> None:
    """Guards against refusing, or misreading, the names people carry over from other engines."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32), ("half", torch.float16)):
        assert choose_dtype(name, torch.device("cpu")) == dtype, name


def test_a_dropped_target_is_freed_at_once() -> None:
    """Guards against the weights of a model that was dropped, in memory together with those of the next one."""
    target = tiny_target(tiny_config("llama"))
    gone = weakref.ref(target)
    with without_collection():
        del target
        assert gone() is None
