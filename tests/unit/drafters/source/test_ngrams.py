"""N-gram tables: against counting by hand in exact fractions, and as files."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outpace.drafters.dart.ngrams import KIND, MOST_IDS, NGrams, count_ngrams, load_ngrams, save_ngrams
from outpace.lib.errors import InvalidRequest, ModelError

VOCAB = 7
SOURCE = random.Random(3)
# Ids 5 and 6 never occur; texts shorter than an n-gram are there too.
TEXTS = [[SOURCE.choice([0, 0, 0, 1, 2, 3, 4]) for _ in range(length)] for length in (40, 25, 0, 1, 2)]


def counted(texts: Sequence[Sequence[int]], order: int, keep: int) -> dict[tuple[int, ...], int]:
    """The most frequent n-grams, among equals the smaller."""
    found = Counter(tuple(text[at : at + order]) for text in texts for at in range(len(text) - order + 1))
    return dict(sorted(found.items(), key=lambda entry: (-entry[1], entry[0]))[:keep])


def distribution(tables: Sequence[dict[tuple[int, ...], int]], context: tuple[int, ...], token: int) -> Fraction:
    """Witten-Bell's interpolation, term by term: `tables[n - 1]` are the n-grams."""
    shorter = distribution(tables, context[1:], token) if context else Fraction(1, VOCAB)
    after = {gram[-1]: count for gram, count in tables[len(context)].items() if gram[:-1] == context}
    if not after:
        return shorter
    return Fraction(after.get(token, 0) + len(after) * shorter) / (sum(after.values()) + len(after))


@pytest.mark.parametrize("keep", [1000, 6, 5, 1])
def test_log_probs_are_those_counted_by_hand(keep: int) -> None:
    """Guards against n-grams across the border of two texts, contexts read backwards, and mass that pruning or an
    unseen context loses or adds: all ids of every context, whose exact probabilities add up to 1."""
    tables = [counted(TEXTS, order, keep) for order in (1, 2, 3)]
    ngrams = count_ngrams(TEXTS, VOCAB, keep)
    assert [len(keys) for keys in ngrams.keys] == [len(table) for table in tables]
    contexts = [(first, second) for first in range(-1, VOCAB) for second in range(VOCAB)]
    candidates = [SOURCE.sample(range(VOCAB), VOCAB) for _ in contexts]
    found = ngrams.log_probs(torch.tensor(contexts), torch.tensor(candidates))
    assert found.dtype == torch.float32
    expected = [
        [math.log(distribution(tables, context, token)) for token in tokens]
        for context, tokens in zip(contexts, candidates, strict=True)
    ]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=1e-6)
    alone = [ngrams.log_probs(torch.tensor([pair]), torch.tensor([row])) for pair, row in zip(contexts, candidates)]
    assert torch.equal(found, torch.cat(alone))


def test_the_largest_vocabulary() -> None:
    """Guards against keys that wrap around where V^3 almost fills an int64: a trigram would be some other one."""
    top = MOST_IDS - 1
    ngrams = count_ngrams([[top, top, top, top], [0, top]], MOST_IDS, 10)
    assert MOST_IDS**3 < 2**63 <= (MOST_IDS + 1) ** 3
    assert int(ngrams.keys[2][0]) == MOST_IDS**3 - 1
    seen, unseen = ngrams.log_probs(torch.tensor([[top, top]]), torch.tensor([[top, top - 1]]))[0].tolist()
    assert seen > math.log(0.8)
    assert unseen < math.log(1e-5)
    with pytest.raises(InvalidRequest, match=f"vocab_size={MOST_IDS + 1}: trigram keys fit"):
        count_ngrams([[1]], MOST_IDS + 1, 10)


def test_nothing_to_count() -> None:
    """Guards against a table of nothing, and ids that are another n-gram's key."""
    for texts, keep, complaint in (([[]], 5, "no tokens"), ([[1]], 0, "keep=0"), ([[1], [7]], 5, "ends at 7")):
        with pytest.raises(InvalidRequest, match=complaint):
            count_ngrams(texts, VOCAB, keep)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """Guards against tables that change on the way, and a file for another vocabulary or of another kind."""
    ngrams, file = count_ngrams(TEXTS, VOCAB, 1000), tmp_path / "ngrams.safetensors"
    save_ngrams(file, ngrams)
    loaded = load_ngrams(file, VOCAB)
    assert all(torch.equal(own, other) for own, other in zip(ngrams.keys + ngrams.counts, loaded.keys + loaded.counts))
    with pytest.raises(ModelError, match="made for 7 ids, and the target has 9"):
        load_ngrams(file, 9)
    save_file({"ids": torch.arange(3)}, tmp_path / "foreign", {"format": KIND.format, "vocab_size": "7"})
    with pytest.raises(ModelError, match="not an n-gram table; make one with `outpace count-ngrams`"):
        load_ngrams(tmp_path / "foreign", VOCAB)


@pytest.mark.parametrize(
    ("name", "wrong", "complaint"),
    [
        ("keys_1", torch.tensor([], dtype=torch.int64), "must hold n-grams"),
        ("keys_2", torch.tensor([1, 1]), "keys_2 must be ascending int64 below 7\\^2"),
        ("keys_2", torch.tensor([5, 3]), "keys_2 must be"),
        ("keys_2", torch.tensor([-1, 3]), "keys_2 must be"),
        ("keys_3", torch.tensor([0, 343]), "keys_3 must be ascending int64 below 7\\^3"),
        ("keys_3", torch.tensor([0, 3], dtype=torch.int32), "keys_3 must be"),
        ("keys_3", torch.tensor([[0], [3]]), "keys_3 must be"),
        ("counts_2", torch.tensor([1, 0], dtype=torch.int32), "counts_2 must be int32, one of at least 1"),
        ("counts_2", torch.tensor([1, 2, 3], dtype=torch.int32), "counts_2 must be"),
        ("counts_3", torch.tensor([1, 2]), "counts_3 must be"),
    ],
)
def test_wrong_tensors_are_refused(name: str, wrong: torch.Tensor, complaint: str, tmp_path: Path) -> None:
    """Guards against a damaged table that drafts badly for ever, or reads beyond its end, instead of being named."""
    right = {f"keys_{order}": torch.tensor([0, 3]) for order in (1, 2, 3)}
    right |= {f"counts_{order}": torch.tensor([1, 2], dtype=torch.int32) for order in (1, 2, 3)}
    about = {"format": KIND.format, "vocab_size": str(VOCAB)}
    save_file(right, tmp_path / "right", about)
    assert isinstance(load_ngrams(tmp_path / "right", VOCAB), NGrams)
    save_file(right | {name: wrong}, tmp_path / "wrong", about)
    with pytest.raises(ModelError, match=complaint):
        load_ngrams(tmp_path / "wrong", VOCAB)
