"""The ids that a loss compares: the frequent ones always, the others through a few that stand for them."""

import math
from typing import Any

import pytest
import torch

from outpace.drafters.training.batch import Facts
from outpace.drafters.training.losses import LossVocabulary, VocabularySettings
from outpace.lib.errors import InvalidRequest

COUNTS = torch.tensor([5, 0, 9, 1, 7, 0, 2, 3, 0, 4])
SIZE = len(COUNTS)
CPU = torch.device("cpu")


def chosen(special: tuple[int, ...] = (), **settings: Any) -> LossVocabulary:
    return LossVocabulary.chosen(VocabularySettings(**settings), Facts(COUNTS, COUNTS == 0, special), CPU)


def test_the_most_supervised_are_ranked_and_the_end_is_among_them() -> None:
    """Guards against ids ranked by what prompts say, and a drafter that can never draft the end of an answer."""
    assert chosen(vocabulary=4).ranked.tolist() == [0, 2, 4, 9]  # type: ignore[union-attr]
    assert chosen((3, 5), vocabulary=4).ranked.tolist() == [0, 2, 3, 4], "3 ends answers, 5 was never said"  # type: ignore[union-attr]


@pytest.mark.parametrize("keep", [None, SIZE, SIZE + 3])
def test_a_whole_vocabulary_is_left_alone(keep: int | None) -> None:
    """Guards against a detour, in other bits, where nothing is left out."""
    whole = chosen(vocabulary=keep)
    compared = whole.draw(3)
    assert whole.ranked is compared.ids is None
    logits, ids = torch.randn(3, SIZE), torch.tensor([[0, 9], [5, 1]])
    assert compared.shifted(logits) is logits
    places, known = compared.labels(ids)
    assert torch.equal(places, ids)
    assert known.all()
    assert compared.rows_at_once(256, SIZE) == 256


def test_labels_are_places_among_the_compared_ids() -> None:
    """Guards against labels that stay the target's ids, and rare tokens learned as the first of the frequent ones."""
    compared = chosen(vocabulary=4, sampled=3).draw(8)
    assert compared.ids is not None
    places, known = compared.labels(torch.tensor([2, 3, 9, 0, 1]))
    assert compared.ids[places].tolist()[::2] == [2, 9, int(compared.ids[places[4]])]
    assert known.tolist() == [True, False, True, True, False]
    assert compared.rows_at_once(70, SIZE) == 100, "as much memory as 70 rows of 10 logits"


def test_draws_depend_on_the_batch_alone() -> None:
    """Guards against a resumed run, or a second process, that draws others."""
    vocabulary = chosen(vocabulary=3, sampled=2)
    first, again, other = (vocabulary.draw(seed).ids for seed in (5, 5, 7))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    for drawn in (first, other):
        assert drawn[:3].tolist() == [0, 2, 4]
        assert len(set(drawn.tolist())) == 5


def test_sampled_ids_stand_for_all_the_others() -> None:
    """Guards against a sum over the vocabulary that forgets or overrates what was not drawn.

    Over many draws the mean of the estimated sum of exponentials is the true one: its standard error is below 0.4 %
    here, so a deviation of 2 % has odds below 1 in a million.
    """
    vocabulary, logits = chosen(vocabulary=4, sampled=2), torch.linspace(-1, 1, SIZE)
    draws = 4000
    total = 0.0
    for seed in range(draws):
        compared = vocabulary.draw(seed)
        total += float(compared.shifted(logits[compared.ids][None]).exp().sum())
    assert total / draws == pytest.approx(float(logits.exp().sum()), rel=0.02)
    assert vocabulary.draw(0).shift.tolist() == pytest.approx([0.0] * 4 + [math.log(3)] * 2)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "settings", [{"sampled": 1}, {"vocabulary": 8, "sampled": 3}, {"vocabulary": 10, "sampled": 1}]
)
def test_more_samples_than_there_are_others_are_refused(settings: dict[str, Any]) -> None:
    """Guards against a setting that does nothing, or ids drawn twice."""
    with pytest.raises(InvalidRequest, match=r"objective.sampled=\d: beyond objective.vocabulary=.* there are \d ids"):
        chosen(**settings)
