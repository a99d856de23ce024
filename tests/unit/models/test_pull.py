"""Models of the hub: checkpoints, GGUF files by built-in name and by REPO:QUANT; and drafters of a release. All from a
local server."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from threading import Barrier, BrokenBarrierError, Event
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import outpace
from outpace.lib.checkpoint import INDEX, WEIGHTS
from outpace.lib.errors import ModelError
from outpace.models.loading import download, hub_gguf, registry, shipped
from outpace.models.loading import pull as pulling
from outpace.models.loading.hub_gguf import fetch_gguf, is_gguf_name
from outpace.models.loading.load import load_vocabulary_facts
from outpace.models.loading.pull import Release, pull, pull_drafters
from outpace.models.loading.registry import OnHub, pulled, resolve
from outpace.models.loading.shipped import TARGET, find_drafter, shipped_for
from scripts import pack_drafters
from tests.unit.api.shipment import describe
from tests.unit.models.fake_hub import Hub, asked_instead
from tests.unit.models.tiny import save_tiny_model, write_tiny_gguf

NAME = "org/tiny"
REPO = "org/Tiny-Instruct-GGUF"
CUT = 40_000
PAUSE = Event()  # never set: waits where `time.sleep` is replaced


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("weights") / "tiny.gguf").read_bytes()


@pytest.fixture
def hub(weights: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a repository of several quantisations; the built-in model "tiny" is one of its files."""
    folder = tmp_path / "served" / REPO
    folder.mkdir(parents=True)
    for name in ("q8_0", "q4_k_m", "q2_k", "fp16-00001-of-00002", "fp16-00002-of-00002"):
        (folder / f"tiny-instruct-{name}.gguf").write_bytes(weights)
    (folder / "mmproj-tiny-f16.gguf").write_bytes(b"no model")
    (folder / "README.md").write_text("tiny")
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what is lost with a connection: 10 MB, else
    sha256 = hashlib.sha256(weights).hexdigest()
    built_in = {"tiny": OnHub(REPO, "tiny-instruct-q4_k_m.gguf", len(weights), sha256, "made here")}
    for module in (registry, pulling):
        monkeypatch.setattr(module, "BUILT_IN", built_in)
    with Hub(tmp_path / "served") as server:
        asked_instead(server, monkeypatch, tmp_path / "hub")
        yield server


def answer_of(name: str) -> list[int]:
    model = outpace.load(name, "plain", dtype="float32", device="cpu")
    return list(model.generate([5, 9, 7], max_new_tokens=6).token_ids)


def stop(hub: Hub, name: str, said: str = "") -> None:
    """Pull a part of a file, behind which the hub is down for a while."""
    hub.cut, hub.breaks, hub.goes_down = CUT, 1, True
    with pytest.raises(ModelError, match=f"stopped at {said}"):
        pull(name)
    hub.is_down = False


def without_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a checkpoint, and an empty cache."""
    registry._snapshot.cache_clear()
    save_tiny_model(tmp_path / "served" / NAME)
    with Hub(tmp_path / "served") as server:
        asked_instead(server, monkeypatch, tmp_path / "hub")
        yield server
    registry._snapshot.cache_clear()


def test_the_hub_is_asked_once_for_each_file_and_not_at_all_for_weights_that_are_not_read(checkpoint: Hub) -> None:
    """Guards against a request for each file at each of config, tokenizer and weights, and against gigabytes that are
    downloaded for a tokenizer."""
    assert load_vocabulary_facts(NAME)[1] == 264
    assert not [line for line in checkpoint.asked if "safetensors" in line]
    answer = answer_of(NAME)
    for verb in ("HEAD", "GET"):
        files = [line for line in checkpoint.asked if line.startswith(f"{verb} /{NAME}/resolve/")]
        assert len(files) == len(set(files)) == len(list((checkpoint.folder / NAME).iterdir()))
    assert answer_of(str(checkpoint.folder / NAME)) == answer


def test_without_a_connection_a_downloaded_checkpoint_loads_at_once(
    checkpoint: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against 70 seconds of retries for files of a tokenizer that no model has."""
    answer = answer_of(NAME)
    registry._snapshot.cache_clear()
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    without_connection(monkeypatch)
    assert answer_of(NAME) == answer
    assert not waits


def test_shards_that_an_interrupted_download_left_out_are_fetched(checkpoint: Hub) -> None:
    """Guards against a checkpoint that never loads again once a connection was lost between two of its shards."""
    folder = checkpoint.folder / NAME
    tensors, listed = load_file(folder / WEIGHTS), dict[str, str]()
    (folder / WEIGHTS).unlink()
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard, {"format": "pt"})
        listed |= dict.fromkeys(names, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    answer = answer_of(NAME)
    next(Path(constants.HF_HUB_CACHE).rglob("model-00002-*")).unlink()
    registry._snapshot.cache_clear()
    assert answer_of(NAME) == answer


def test_a_pulled_gguf_loads_by_name_without_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a built-in model that its name does not load, or that is downloaded or hashed again."""
    with pytest.raises(ModelError, match="run `outpace models pull tiny`"):
        resolve("tiny")
    folder = pull("tiny")
    assert sorted(path.name for path in folder.iterdir()) == ["outpace.json", "tiny-instruct-q4_k_m.gguf"]
    assert pulled() == {"tiny": folder}
    hub.asked.clear()
    monkeypatch.setattr("outpace.models.loading.download.file_digest", None)
    assert pull("tiny") == folder
    assert answer_of("tiny") == answer_of(str(folder / "tiny-instruct-q4_k_m.gguf"))
    assert hub.asked == []


def test_a_lost_connection_is_taken_up_again(hub: Hub, weights: bytes) -> None:
    """Guards against a pull that fails at the first lost connection, or starts again from the beginning."""
    hub.cut, hub.breaks = CUT, 2
    folder = pull("tiny")
    assert next(folder.glob("*.gguf")).read_bytes() == weights
    assert hub.ranges() == ["", f"bytes={CUT}-", f"bytes={2 * CUT}-"]


@pytest.mark.parametrize("name", ["tiny", f"{REPO}:Q4_K_M"])
def test_a_stopped_download_is_continued(hub: Hub, weights: bytes, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Guards against gigabytes that are downloaded again after a failure, and half a file that is loaded."""
    stop(hub, name, f"{CUT:,} of {len(weights):,} bytes.*same command again")
    assert pulled() == {}
    counted: list[int] = []
    monkeypatch.setattr(download, "advance", counted.append)
    pull(name)
    assert hub.ranges()[-1] == f"bytes={CUT}-"
    assert (counted[0], sum(counted)) == (CUT, len(weights)), "what the progress bar shows"
    location = resolve(name)
    assert location.gguf is not None
    assert location.gguf.path.read_bytes() == weights


def test_a_server_without_ranges_sends_all_of_it(hub: Hub, weights: bytes) -> None:
    """Guards against a whole file that is appended to the half that was there."""
    stop(hub, "tiny")
    hub.ignores_ranges = True
    assert next(pull("tiny").glob("*.gguf")).read_bytes() == weights


def test_a_killed_pull_is_continued_by_the_next_process(hub: Hub, weights: bytes, tmp_path: Path) -> None:
    """Guards against resuming that works within one process only."""
    content = weights + bytes(24 << 20)
    file = hub.folder / "org" / "Large-GGUF" / "large-Q4_K_M.gguf"
    file.parent.mkdir()
    file.write_bytes(content)
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "outpace", "models", "pull", "org/Large-GGUF:q4_k_m"]
    hub.cut, hub.breaks = 20 << 20, 1
    hub.waits.clear()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
        held = 0
        while held == 0:
            assert first.poll() is None, first.communicate()
            PAUSE.wait(0.05)
            held = sum(part.stat().st_size for part in (tmp_path / "hub").rglob("*.part"))
        first.kill()
    held = sum(part.stat().st_size for part in (tmp_path / "hub").rglob("*.part"))
    hub.waits.set()
    second = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert Path(second.stdout.strip()).read_bytes() == content
    assert hub.ranges() == ["", f"bytes={held}-"]
    assert second.stderr.startswith("pulled org/Large-GGUF:q4_k_m in ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, r"sha256 [0-9a-f]{64}, expected \d+ bytes and 0{64}; not kept"),
        ({"size": 1_000_000}, r"expected 1000000 bytes .*not kept"),
        ({"size": 1_000}, r"expected 1000 bytes .*not kept"),
    ],
)
def test_another_file_than_the_expected_one_is_not_kept(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    """Guards against weights that nobody checked, and against a wrong file that blocks the next attempt."""
    good = registry.BUILT_IN["tiny"]
    assert isinstance(good, OnHub)
    monkeypatch.setitem(registry.BUILT_IN, "tiny", replace(good, **changes))
    with pytest.raises(ModelError, match=message):
        pull("tiny")
    assert pulled() == {}
    assert {path.suffix for path in registry.models_folder().rglob("*.gguf*")} <= {".lock"}
    monkeypatch.setitem(registry.BUILT_IN, "tiny", good)
    assert pull("tiny").is_dir()


def test_two_pulls_at_once_download_once(hub: Hub, weights: bytes) -> None:
    """Guards against two processes that append to the same partial file."""
    with ThreadPoolExecutor(2) as threads:
        folders = set(threads.map(pull, ["tiny", "tiny"]))
    assert [path.read_bytes() == weights for path in folders.pop().glob("*.gguf")] == [True]
    assert hub.ranges() == [""]


def test_a_lock_that_another_process_waits_for_stays(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a complete download that fails on Windows, which removes no file that is open."""
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".lock":
            raise PermissionError(13, "in use", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert pull("tiny").is_dir()


def test_a_file_that_became_shorter_is_downloaded_from_its_start(hub: Hub, weights: bytes) -> None:
    """Guards against a partial file behind the end of what the server has, which would fail at every attempt."""
    stop(hub, "tiny")
    file = hub.folder / REPO / "tiny-instruct-q4_k_m.gguf"
    file.write_bytes(weights[: CUT // 2])
    with pytest.raises(ModelError, match=r"stopped at 40,000.*416"):
        pull("tiny")
    file.write_bytes(weights)
    assert next(pull("tiny").glob("*.gguf")).read_bytes() == weights


def test_repo_and_quant_load_and_need_no_connection_afterwards(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against names of llama.cpp that do not load, in any case, and a hub that is asked at every start."""
    answers = [answer_of(f"{REPO}:{quant}") for quant in ("Q8_0", "q8_0")]
    assert answers[0] == answers[1]
    assert hub.ranges() == [""]
    without_connection(monkeypatch)
    hub.asked.clear()
    assert answer_of(f"{REPO}:Q8_0") == answers[0]
    with pytest.raises(ModelError, match=r"hub's cache has Q8_0 of it only, and http://127\.0\.0\.1:9 was asked: Conn"):
        resolve(f"{REPO}:Q2_K")
    with pytest.raises(ModelError, match=r"org/none-gguf: not in the hub's cache, and http"):
        resolve("org/none-gguf")
    assert hub.asked == []


def test_a_suffix_in_capitals_is_found_again_without_a_connection(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a file that the hub's listing has, and that its cache then never has."""
    (hub.folder / REPO / "tiny-instruct-q8_0.gguf").rename(hub.folder / REPO / "TINY-Q8_0.GGUF")
    file = fetch_gguf(f"{REPO}:Q8_0")
    without_connection(monkeypatch)
    assert fetch_gguf(f"{REPO}:Q8_0") == file


def test_a_model_whose_name_says_that_it_has_one_part_is_whole(hub: Hub) -> None:
    """Guards against "split into 1 files, which cannot be read"."""
    (hub.folder / REPO / "tiny-instruct-q8_0.gguf").rename(hub.folder / REPO / "tiny-q8_0-00001-of-00001.gguf")
    assert fetch_gguf(f"{REPO}:Q8_0").name == "tiny-q8_0-00001-of-00001.gguf"


def test_without_a_quant_the_default_is_llama_cpps(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against another file than llama-cli takes for the same name."""
    assert fetch_gguf(REPO).name == "tiny-instruct-q4_k_m.gguf"
    (hub.folder / REPO / "tiny-instruct-q4_k_m.gguf").rename(hub.folder / REPO / "tiny-instruct-q6_k.gguf")
    rmtree(constants.HF_HUB_CACHE)
    assert fetch_gguf(REPO).name == "tiny-instruct-q2_k.gguf"
    without_connection(monkeypatch)
    assert fetch_gguf(REPO).name == "tiny-instruct-q2_k.gguf", "what the cache has is better than nothing"


def test_a_quant_that_cannot_be_had_names_those_that_can(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a user who has to look quantisations up, an image encoder taken for a model, and parts of a model
    that are downloaded and then refused."""
    available = r"available are Q2_K, Q4_K_M, Q8_0$"
    with pytest.raises(ModelError, match=rf"no quantisation 'Q9' in this repository; {available}"):
        resolve(f"{REPO}:Q9")
    with pytest.raises(ModelError, match="no quantisation 'F16'"):
        resolve(f"{REPO}:F16")
    with pytest.raises(ModelError, match=rf"split into 2 files, which cannot be read; {available}"):
        resolve(f"{REPO}:fp16")
    with pytest.raises(ModelError, match=r"org/none:Q8_0: not in the hub's cache, and .* was asked: Repository"):
        resolve("org/none:Q8_0")
    (hub.folder / "org" / "plain").mkdir()
    (hub.folder / "org" / "plain" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="org/plain:Q8_0: this repository has no GGUF file"):
        resolve("org/plain:Q8_0")
    assert hub.ranges() == []


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Model-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("Model.i1-IQ3_M.gguf", "IQ3_M"),
        ("model-bf16-00002-of-00003.gguf", "BF16"),
        ("Q6_K/Model-7B.gguf", "Q6_K"),
        ("gpt-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("Model-7B-Q4_K_M-imat.gguf", "Q4_K_M"),
        ("ggml-model.gguf", "GGML-MODEL"),
    ],
)
def test_how_files_state_their_quantisation(file: str, quant: str) -> None:
    """Guards against files of well-known publishers that no QUANT finds."""
    assert hub_gguf._quant_of(file) == quant
    assert hub_gguf._matching([file], quant.lower()) == [file]


def test_which_names_mean_a_gguf_file_on_the_hub() -> None:
    """Guards against listing a repository of safetensors, and paths that are taken for repositories."""
    assert all(map(is_gguf_name, ["a/b:Q4_0", "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "a/b-gguf:q8_0"]))
    assert not any(map(is_gguf_name, ["a/b", "gguf", "gguf/b", "./a/b-gguf", "a/b/c:Q4_0", "tiny:Q4_0", "a/b:", ""]))


def test_a_file_is_checked_against_the_hubs_own_checksum(hub: Hub) -> None:
    """Guards against damage on the way: the hub's own client checks the size only."""
    hub.damages = True
    with pytest.raises(ModelError, match="not kept"):
        resolve(f"{REPO}:Q8_0")
    hub.damages = False
    assert resolve(f"{REPO}:Q8_0").gguf is not None


def test_a_gated_model_tells_how_it_can_be_had(hub: Hub) -> None:
    """Guards against "no model found" and a bare 401 for a model that is there once its conditions are accepted."""
    (hub.folder / "org" / "plain").mkdir()
    (hub.folder / "org" / "plain" / "config.json").write_text("{}")
    hub.is_gated = True
    for name, repo in ((f"{REPO}:Q8_0", REPO), ("org/plain", "org/plain")):
        with pytest.raises(ModelError, match=rf"^{repo}: .* at {hub.url}/{repo}, then run `hf auth login` or set"):
            load_vocabulary_facts(name)
    assert hub.ranges() == []


@pytest.fixture
def packed(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A release with drafters for "tiny", packed by the script; the package, as a wheel, ships the target's facts only.
    The folder that was packed."""
    source = tmp_path / "drafters" / "tiny"
    describe(source, pull("tiny") / "tiny-instruct-q4_k_m.gguf")
    (source / "domino").mkdir()
    (source / "domino" / "config.json").write_text('{"made": "here"}')
    (tmp_path / "wheel" / "tiny").mkdir(parents=True)
    (tmp_path / "wheel" / "tiny" / TARGET).write_bytes((source / TARGET).read_bytes())
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path / "wheel")
    record = tmp_path / "release.json"
    options = ["--url", f"{hub.url}/release/", "--out", str(hub.folder / "release"), "--record", str(record)]
    pack_drafters.main([*options, "--drafters", str(source.parent), "tiny"])
    monkeypatch.setattr(pulling, "release", lambda: Release.model_validate_json(record.read_text()))
    return source


def test_drafters_that_do_not_ship_are_fetched_from_the_release(hub: Hub, packed: Path) -> None:
    """Guards against a user of the wheel who runs without the drafters that the checkout has."""
    assert not shipped_for("tiny").drafters
    folder = pull_drafters("tiny")
    assert folder is not None
    assert (folder / "domino" / "config.json").read_text() == '{"made": "here"}'
    assert shipped_for("tiny").drafters == {"domino": folder / "domino"}
    assert find_drafter("tiny/domino") == str(folder / "domino")
    with pytest.raises(ModelError, match=r"does not ship; shipped are tiny/domino"):
        find_drafter("tiny/eagle3")
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    hub.asked.clear()
    assert pull_drafters("tiny") == folder
    assert hub.asked == []
    assert pull_drafters("other") is None


def test_a_newer_release_replaces_drafters_and_a_damaged_one_does_not(hub: Hub, packed: Path, tmp_path: Path) -> None:
    """Guards against drafters of an older version that stay for ever, and a damaged archive that replaces good ones."""
    folder = pull_drafters("tiny")
    assert folder is not None
    (packed / "domino" / "config.json").write_text('{"made": "later"}')
    options = ["--url", f"{hub.url}/release", "--out", str(tmp_path / "out")]
    pack_drafters.main([*options, "--record", str(tmp_path / "release.json"), "--drafters", str(packed.parent), "tiny"])
    with pytest.raises(ModelError, match="not kept"):
        pull_drafters("tiny")  # the server still has the older archive
    assert (folder / "domino" / "config.json").read_text() == '{"made": "here"}'
    (hub.folder / "release" / "tiny.zip").write_bytes((tmp_path / "out" / "tiny.zip").read_bytes())
    assert pull_drafters("tiny") == folder
    assert (folder / "domino" / "config.json").read_text() == '{"made": "later"}'


@pytest.mark.parametrize("record", ["", "{}", "[]"])
def test_drafters_with_a_damaged_record_are_fetched_again(hub: Hub, packed: Path, record: str) -> None:
    """Guards against a pull that ends in a traceback for ever, once a power failure has emptied the record."""
    folder = pull_drafters("tiny")
    assert folder is not None
    whole = (folder / pulling.RECORD).read_text()
    (folder / pulling.RECORD).write_text(record)
    assert pull_drafters("tiny") == folder
    assert (folder / pulling.RECORD).read_text() == whole


def test_facts_that_another_version_fetched_are_not_read(hub: Hub, packed: Path) -> None:
    """Guards against no model that loads, whatever its name, with "install the package again", once a version with a
    field more or less in its facts has fetched drafters into the same home."""
    folder = pull_drafters("tiny")
    assert folder is not None
    (folder.parent / "later").mkdir()
    for name in ("tiny", "later"):
        (folder.parent / name / TARGET).write_text('{"field": "of another version"}')
    assert shipped_for("tiny").drafters == {"domino": folder / "domino"}
    assert not shipped_for("other").drafters


def test_drafters_of_the_checkout_are_not_fetched(hub: Hub, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a checkout whose own drafters are hidden by those of a release."""
    assert pull_drafters("tiny") is not None
    monkeypatch.setattr(shipped, "shipped_folder", lambda: packed.parent)
    hub.asked.clear()
    assert pull_drafters("tiny") == packed
    assert shipped_for("tiny").drafters == {"domino": packed / "domino"}
    assert hub.asked == []


def test_a_file_of_another_name_is_known_by_its_metadata(hub: Hub, packed: Path) -> None:
    """Guards against REPO:QUANT names that find no drafters, since only local files were opened for their metadata."""
    other = hub.folder / "org" / "else"
    other.mkdir()
    write_tiny_gguf(other / "else-Q4_0.gguf", "Tiny")
    pull_drafters("tiny")
    assert tuple(shipped_for("org/else:Q4_0").drafters) == ("domino",)


def test_two_fetches_of_drafters_at_once(hub: Hub, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an archive that one process removes while another opens it."""
    stock, both = download.download, Barrier(2, timeout=1)

    def meet(*given: Any) -> None:
        stock(*given)
        with suppress(BrokenBarrierError):
            both.wait()

    monkeypatch.setattr(pulling, "download", meet)
    with ThreadPoolExecutor(2) as threads:
        assert len(set(threads.map(pull_drafters, ["tiny", "tiny"]))) == 1
