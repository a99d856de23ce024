"""Stored answers: what is read is what was written, and nothing of another run gets in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outpace.data.answers import AnswerStore, Conversation, read_about, read_answers
from outpace.lib.errors import InvalidRequest, ModelError

ABOUT: dict[str, Any] = {"target": "tiny", "vocab_size": 65536, "sampling": {"temperature": 0.5}}
FIRST = [Conversation("a", ((1, 2, 263), (0,)), 5), Conversation("ü", ((),), 1 << 56), Conversation("cut", ())]
SECOND = [Conversation("b", ((65535,),))]
THIRD = [Conversation("c", ((7, 8),))]


@pytest.mark.parametrize("vocab_size", [65536, 65537])
def test_what_is_read_is_what_was_written(vocab_size: int, tmp_path: Path) -> None:
    """Guards against ids that do not fit, and answers filed under another prompt or turn."""
    store = AnswerStore(tmp_path / "new" / "deep", ABOUT | {"vocab_size": vocab_size})
    store.write(FIRST)
    store.write([])
    store.write(SECOND)
    assert list(read_answers(store.folder)) == FIRST + SECOND
    assert store.done == {"a": 5, "ü": 1 << 56, "cut": 0, "b": 0}
    assert len(list(store.folder.glob("part-*"))) == 2


@pytest.mark.parametrize("vocab_size", [263, 65536])
def test_ids_of_another_model_are_refused(vocab_size: int, tmp_path: Path) -> None:
    """Guards against hours of a wrong server's answers, whose ids would be cut to 16 bits."""
    store = AnswerStore(tmp_path, ABOUT | {"vocab_size": vocab_size})
    with pytest.raises(ModelError, match=f"has the id {vocab_size}, and the target's vocabulary has {vocab_size} ids"):
        store.write([Conversation("a", ((1, vocab_size),))])
    assert not store.done
    assert not list(read_answers(tmp_path))


@pytest.mark.parametrize("change", [{"target": "other"}, {"sampling": {"temperature": 0.6}}, {"endpoint": "http://x"}])
def test_other_settings_need_another_folder(change: Mapping[str, Any], tmp_path: Path) -> None:
    """Guards against a folder in which some answers are of another target, or sampled otherwise."""
    AnswerStore(tmp_path, ABOUT)
    with pytest.raises(InvalidRequest, match=f"{next(iter(change))}=.*new folder"):
        AnswerStore(tmp_path, ABOUT | dict(change))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """Guards against answers strewn among a user's files."""
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InvalidRequest, match="not a folder of answers"):
        AnswerStore(tmp_path, ABOUT)
    with pytest.raises(InvalidRequest, match="not a folder of answers"):
        AnswerStore(tmp_path / "thesis.txt", ABOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ModelError, match=r"about\.json"):
        read_about(tmp_path)


def test_a_deleted_part_is_made_again_and_no_other_is_lost(tmp_path: Path) -> None:
    """Guards against a part written over a whole one, after a damaged one was deleted as the error says."""
    store = AnswerStore(tmp_path, ABOUT)
    for part in (FIRST, SECOND, THIRD):
        store.write(part)
    (tmp_path / "part-00001.safetensors").unlink()
    again = AnswerStore(tmp_path, ABOUT)
    assert again.done.keys() == {"a", "ü", "cut", "c"}
    again.write(SECOND)
    assert list(read_answers(tmp_path)) == FIRST + THIRD + SECOND


def test_a_full_disk_loses_nothing_that_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a half-written part that takes the place of a whole one."""
    store = AnswerStore(tmp_path, ABOUT)
    store.write(FIRST)

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("outpace.lib.tensor_file.save_file", full)
        with pytest.raises(ModelError, match=r"No space left.*free some space"):
            store.write(SECOND)
    assert list(read_answers(tmp_path)) == FIRST
    again = AnswerStore(tmp_path, ABOUT)
    again.write(SECOND)
    assert list(read_answers(tmp_path)) == FIRST + SECOND


def test_a_folder_that_a_full_disk_left_empty_is_taken_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against "not a folder of answers; choose a new one" for the same command on a disk that has room again."""
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        write(path, content[:9])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            AnswerStore(tmp_path / "new", ABOUT)
    store = AnswerStore(tmp_path / "new", ABOUT)
    store.write(FIRST)
    assert list(read_answers(store.folder)) == FIRST
