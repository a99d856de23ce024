"""Stored features: what is read is what was written, as far as its dtype goes, and nothing of another run gets in."""

import pickle
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.data import answers as parts
from outpace.drafters.training.batch import TrainingSample
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.train import features
from outpace.train.data import SampleSet
from outpace.train.features import DTYPES, FeatureStore
from tests.unit.drafters.training import tiny

ABOUT: dict[str, Any] = {"target": "tiny", "taps": [0, 2, 3], "width": 12, "dtype": "bfloat16"}
ERRORS = {"bfloat16": 2**-8, "float16": 2**-11, "float8_e4m3fn": 2**-4}  # half a step, relative


def rows(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Taps that differ in size as those of models do."""
    drawn = torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(seed))
    return (drawn * torch.tensor([0.02, 1.0, 200.0])[:, None]).flatten(1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_is_what_was_written(dtype: str, tmp_path: Path) -> None:
    """Guards against rows filed under another name, scales of another row or tap, and small taps rounded away."""
    store = FeatureStore(tmp_path / "new" / "deep", ABOUT | {"dtype": dtype})
    written = {f"prompt {at}/ü": rows(5 + at, at) for at in range(4)} | {"empty": rows(0, 9)}
    written["zeros"] = torch.zeros(2, 12)
    store.write(written.items())
    for opened in (store, FeatureStore.existing(store.folder)):
        assert len(opened) == 6
        assert not opened.has("prompt 9")
        for name, wanted in written.items():
            assert opened.has(name)
            found = opened.read(name)
            assert (found.dtype, found.shape) == (torch.float32, wanted.shape)
            # Where 8 bits have no more exponents, the step is that of the smallest, of the largest in row and tap.
            least = 2.0**-10 / 448 * wanted.unflatten(1, (3, 4)).abs().amax(dim=2, keepdim=True).expand(-1, 3, 4)
            assert ((found - wanted).abs() <= ERRORS[dtype] * wanted.abs() + least.flatten(1)).all(), name
    assert store.read("zeros", torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_some_taps_may_be_read(dtype: str, tmp_path: Path) -> None:
    """Guards against features of one method that serve another with taps it did not ask for, or in another order."""
    store = FeatureStore(tmp_path, ABOUT | {"dtype": dtype})
    store.write([("a", rows(6, 1))])
    whole = store.read("a").unflatten(1, (3, 4))
    assert torch.equal(store.read("a", taps=(3,)), whole[:, 2])
    assert torch.equal(store.read("a", taps=(3, 0)), whole[:, [2, 0]].flatten(1))
    assert torch.equal(store.read("a", taps=(0, 2, 3)), whole.flatten(1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_has_the_dtype_already_is_kept_to_the_bit(dtype: str, tmp_path: Path) -> None:
    """Guards against rounding twice, and rows that change before they are written, as their giver needs the memory."""
    store = FeatureStore(tmp_path, ABOUT | {"dtype": dtype})
    wanted = [rows(7, at).to(DTYPES[dtype]) for at in range(3)]
    buffer = torch.empty_like(wanted[0])
    store.write((str(at), buffer.copy_(one)[: 5 + at]) for at, one in enumerate(wanted))
    for at, one in enumerate(wanted):
        assert torch.equal(store.read(str(at), DTYPES[dtype]), one[: 5 + at])


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_as_large_as_asked_and_as_announced(dtype: str, tmp_path: Path) -> None:
    """Guards against a disk that fills up although it was checked, and files too large to copy."""
    about = {"taps": [1, 2], "width": 512, "dtype": dtype}
    needed_by = FeatureStore(tmp_path, about).bytes_of
    store = FeatureStore(tmp_path, about, part_bytes=needed_by(250))
    store.write((str(at), torch.ones(100, 512)) for at in range(6))
    store.write([("long", torch.ones(300, 512))])
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("part-*"))]
    needed = [needed_by(tokens) for tokens in (200, 200, 200, 300)]
    assert sizes == [pytest.approx(size, rel=0.01) for size in needed]
    assert all(size >= least for size, least in zip(sizes, needed, strict=True))


def test_a_run_goes_on_where_the_last_part_ended(tmp_path: Path) -> None:
    """Guards against features lost because something later failed, and parts that a second run writes over."""

    def failing() -> Iterator[tuple[str, Tensor]]:
        yield "a", rows(3, 0)
        yield "b", rows(4, 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FeatureStore(tmp_path, ABOUT).write(failing())
    again = FeatureStore(tmp_path, ABOUT)
    assert (again.has("a"), again.has("b"), again.has("c")) == (True, True, False)
    again.write([("c", rows(2, 2))])
    third = FeatureStore(tmp_path, ABOUT)
    assert [len(third.read(name)) for name in "abc"] == [3, 4, 2]


def test_other_settings_need_another_folder(tmp_path: Path) -> None:
    """Guards against a folder in which some features are of another target, layer or dtype."""
    FeatureStore(tmp_path, ABOUT).write([("a", rows(3, 0))])
    with pytest.raises(InvalidRequest, match=r"features were made with taps=.*new folder"):
        FeatureStore(tmp_path, ABOUT | {"taps": [0, 2, 1]})
    with pytest.raises(InvalidRequest, match="stored='int8': features are stored in bfloat16"):
        FeatureStore(tmp_path / "new", ABOUT | {"dtype": "int8"})


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    """Guards against answers read as features."""
    parts.PartFolder(tmp_path / "answers", "answers").claim({"vocab_size": 3})
    with pytest.raises(ModelError, match="not that of a folder of features"):
        FeatureStore.existing(tmp_path / "answers")
    with pytest.raises(ModelError, match=r"none.*no readable about\.json"):
        FeatureStore.existing(tmp_path / "none")


@pytest.mark.parametrize(
    "change", [{"dtype": ["x"]}, {"taps": 3}, {"taps": None}, {"width": "x"}, {"max_length": None}]
)
def test_damaged_settings_are_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    """Guards against a traceback for a folder whose settings were edited, or are not there."""
    parts.PartFolder(tmp_path, "features").claim(ABOUT | change)
    with pytest.raises(ModelError, match="taps and width are not stated"):
        FeatureStore.existing(tmp_path)


def test_processes_can_be_sent_what_reads_features(tmp_path: Path) -> None:
    """Guards against `data.workers` that fails where processes do not inherit memory."""
    FeatureStore(tmp_path, ABOUT).write([("a", rows(3, 0))])
    read = partial(FeatureStore.existing(tmp_path).read, taps=ABOUT["taps"])
    assert torch.equal(pickle.loads(pickle.dumps(read))("a"), read("a"))


def test_damage_is_named(tmp_path: Path) -> None:
    """Guards against a traceback, or noise to train on, after a disk error."""
    store = FeatureStore(tmp_path, ABOUT)
    store.write([("a", rows(3, 0))])
    store.write([("b", rows(3, 1))])
    part = tmp_path / "part-00001.safetensors"
    whole = part.read_bytes()
    part.write_bytes(whole[:-3])
    with pytest.raises(ModelError, match=r"part-00001.*delete it and run"):
        FeatureStore(tmp_path, ABOUT)
    with pytest.raises(ModelError, match=r"part-00001.*delete it and run"):
        store.read("b")
    part.write_bytes(whole.replace(b'"0.rows"', b'"1.rows"'))
    with pytest.raises(ModelError, match=r"part-00001.*contradicts itself"):
        FeatureStore(tmp_path, ABOUT)
    part.write_bytes(whole.replace(b"[3,12]", b"[12,3]"))
    with pytest.raises(ModelError, match=r"part-00001.*contradicts itself"):
        FeatureStore(tmp_path, ABOUT)
    part.unlink()
    again = FeatureStore(tmp_path, ABOUT)
    assert len(again) == 1
    with pytest.raises(ModelError, match="none of 'b'; capture"):
        again.read("b")


def test_a_disk_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against hours of capturing that end with a full disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3_000_000_000))
    store = FeatureStore(tmp_path / "new" / "deep", ABOUT | {"dtype": "float8_e4m3fn"})
    store.check_room(125_000_000)
    with pytest.raises(InvalidRequest, match=r"features of 126000000 tokens need 3\.02 GB, and 3\.00 GB are free"):
        store.check_room(126_000_000)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", 1e5), ("bfloat16", float("nan")), ("float8_e4m3fn", float("inf"))]
)
def test_what_a_dtype_cannot_hold_is_refused(dtype: str, value: float, tmp_path: Path) -> None:
    """Guards against infinities to train on: the largest numbers of some models are beyond float16."""
    store = FeatureStore(tmp_path, ABOUT | {"dtype": dtype})
    bad = rows(3, 0)
    bad[1, 5] = value
    with pytest.raises(ModelError, match=f"'bad': its features are NaN or beyond {dtype}; choose stored="):
        store.write([("good", rows(3, 1)), ("bad", bad)])
    assert store.has("good")
    assert not store.has("bad")


@pytest.mark.parametrize("rows", [256, 3])
def test_the_likeliest_ids_after_every_token(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against positions off by one, probabilities of a part of the vocabulary."""
    monkeypatch.setattr(features, "ROWS", rows)
    target = tiny.frozen()
    draws = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, tiny.VOCAB, (length,), generator=draws) for length in (9, 2, 14)]
    samples = SampleSet(TrainingSample(f"p{at}/0", ids, torch.arange(len(ids)) >= 1) for at, ids in enumerate(texts))
    found = list(features.expected(samples, target))
    states = {}
    for at, (ids, (seen, top, probs)) in enumerate(zip(texts, found, strict=True)):
        assert torch.equal(seen, ids[:-1])
        hidden = target.features(ids[None], [len(ids)], (target.layers,))[0]
        states[f"p{at}/0"] = hidden
        wanted = target.logits(hidden[:-1]).float().softmax(dim=-1).topk(16)
        assert torch.equal(top, wanted.indices)
        assert torch.allclose(probs, wanted.values, atol=1e-6)
    again = list(features.expected(samples, target, states.__getitem__))
    assert all(torch.equal(one[1], other[1]) for one, other in zip(found, again, strict=True))
