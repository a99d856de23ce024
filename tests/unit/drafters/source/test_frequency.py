"""Frequency-ranked vocabularies: counted, ranked, filed, and refused where they do not fit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outpace.drafters.ranked_vocabulary import (
    KIND,
    count_tokens,
    head_of,
    load_vocabulary,
    rank_tokens,
    save_vocabulary,
)
from outpace.lib.errors import InvalidRequest, ModelError


def test_counts_are_of_all_texts() -> None:
    """Guards against counts of the last text alone, empty texts that fail, and ids beyond the end that grow counts."""
    assert count_tokens([[1, 1, 4], [], [4]], 6).tolist() == [0, 2, 0, 0, 2, 0]
    for wrong in ([6], [-1]):
        with pytest.raises(InvalidRequest, match="vocabulary ends at 6"):
            count_tokens([wrong], 6)


def test_the_most_frequent_are_kept_and_eos_whatever_its_count() -> None:
    """Guards against a drafter that cannot end an answer, ties that depend on the sort, and ids out of order."""
    counts = torch.tensor([0, 5, 1, 5, 9, 1, 0])
    assert rank_tokens(counts, 3, ()).tolist() == [1, 3, 4]
    assert rank_tokens(counts, 4, ()).tolist() == [1, 2, 3, 4]
    assert rank_tokens(counts, 3, (6, 0)).tolist() == [0, 4, 6]
    assert rank_tokens(counts, 3, (4, 4)).tolist() == [1, 3, 4]
    assert rank_tokens(counts, 7, (6,)).tolist() == list(range(7))
    for keep, eos, complaint in ((8, (), "1 .* to 7"), (0, (), "keep=0"), (1, (5, 6), "keep=1"), (3, (7,), "eos_ids")):
        with pytest.raises(InvalidRequest, match=complaint):
            rank_tokens(counts, keep, eos)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """Guards against a file that another vocabulary, or another program, made, and one overwritten in silence."""
    ids, file = torch.tensor([0, 3, 9]), tmp_path / "ids.safetensors"
    save_vocabulary(file, ids, 10)
    assert torch.equal(load_vocabulary(file, 10), ids)
    with pytest.raises(ModelError, match="made for 10 ids, and the target has 12"):
        load_vocabulary(file, 12)
    for taken in (file, tmp_path / "nowhere" / "ids.safetensors"):
        with pytest.raises(InvalidRequest, match="name a new file"):
            save_vocabulary(taken, ids, 10)
    about = {"format": KIND.format, "vocab_size": "10"}
    for index, wrong in enumerate(([3, 3], [9, 2], [0, 10], [-1, 2], [])):
        bad = tmp_path / f"{index}.safetensors"
        save_file({"ids": torch.tensor(wrong, dtype=torch.int64)}, bad, about)
        with pytest.raises(ModelError, match="ascending int64 ids from 0 to 9"):
            load_vocabulary(bad, 10)
    save_file({"ids": ids}, tmp_path / "foreign.safetensors")
    with pytest.raises(ModelError, match="not a vocabulary; make one"):
        load_vocabulary(tmp_path / "foreign.safetensors", 10)
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:30])
    for unreadable in (tmp_path / "cut.safetensors", tmp_path / "missing", tmp_path):
        with pytest.raises(ModelError, match="cannot be read"):
            load_vocabulary(unreadable, 10)


def test_where_two_vocabularies_meet() -> None:
    """Guards against draft ids taken for target ids where a drafter has a reduced vocabulary of its own."""
    weight, hidden = torch.randn(4, 16), torch.randn(3, 16)
    own, scores = torch.tensor([2, 4, 6, 8]), torch.full((3, 10), -torch.inf)
    every = head_of(weight, own, None, 10).scores(hidden)
    torch.testing.assert_close(every, scores.index_copy(1, own, hidden @ weight.T))
    found = head_of(weight, own, torch.tensor([0, 4, 5, 8]), 10).scores(hidden)
    torch.testing.assert_close(found, scores.index_copy(1, own[[1, 3]], hidden @ weight[[1, 3]].T))
    with pytest.raises(ModelError, match="no id in common"):
        head_of(weight, own, torch.tensor([1, 3]), 10)
