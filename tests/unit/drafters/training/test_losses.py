"""Sums of losses in pieces: values and gradients are those of the whole at once."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outpace.drafters.training.batch import Facts
from outpace.drafters.training.losses import (
    LossVocabulary,
    VocabularySettings,
    losses_and_candidates,
    paced_weights,
    row_losses,
    summed,
    weighted_cross_entropy,
)
from outpace.lib.errors import InvalidRequest

ROWS, WIDTH, IDS = 11, 6, 9


def rows() -> tuple[Tensor, Tensor, Tensor, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(IDS, (ROWS,), generator=generator)
    weights = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    return hidden, targets, weights, nn.Parameter(torch.randn(IDS, WIDTH, generator=generator, dtype=torch.float64))


def stock(hidden: Tensor, targets: Tensor, weights: Tensor, vocabulary: Tensor) -> Tensor:
    return (nn.functional.cross_entropy(hidden @ vocabulary.T, targets, reduction="none") * weights).sum()


@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_pieces_add_up(at_once: int) -> None:
    """Guards against rows lost or counted twice between pieces, and gradients that miss the factor of the loss."""
    hidden, targets, weights, vocabulary = rows()
    whole = stock(hidden, targets, weights, vocabulary)
    expected = torch.autograd.grad(whole * 0.3, (hidden, vocabulary))

    def losses(hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        learned = weighted_cross_entropy(hidden @ vocabulary.T, targets, weights)
        return torch.stack([learned, weights.sum()])

    found = summed(losses, (hidden, targets, weights), (vocabulary,), at_once)
    assert found[0].item() == pytest.approx(whole.item(), rel=1e-12)
    assert found[1].item() == pytest.approx(weights.sum().item(), rel=1e-12)
    for gradient, true in zip(torch.autograd.grad(found[0] * 0.3, (hidden, vocabulary)), expected, strict=True):
        assert torch.allclose(gradient, true, rtol=1e-12, atol=1e-14)


def test_what_is_shown_is_not_learned() -> None:
    """Guards against gradients of sums that are only shown, and rows that need none but get some."""
    hidden, targets, weights, vocabulary = rows()

    def losses(hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        learned = weighted_cross_entropy(hidden @ vocabulary.T, targets, weights)
        return torch.stack([learned, learned * 5])

    found = summed(losses, (hidden, targets, weights), (vocabulary,), 4)
    gradients = torch.autograd.grad(found[0] + found[1], (hidden, vocabulary))
    expected = torch.autograd.grad(stock(hidden, targets, weights, vocabulary), (hidden, vocabulary))
    assert all(torch.allclose(one, other) for one, other in zip(gradients, expected, strict=True))
    with torch.no_grad():
        again = summed(losses, (hidden, targets, weights), (vocabulary,), 4)
    assert torch.equal(again, found)
    assert not again.requires_grad


def test_the_gradient_of_half_precision_logits() -> None:
    """Guards against a loss in the dtype of its logits, whose sums over a vocabulary lose most digits."""
    hidden, targets, weights, vocabulary = rows()
    logits: Any = (hidden @ vocabulary.T).detach().bfloat16().requires_grad_()
    loss = weighted_cross_entropy(logits, targets, weights.float())
    assert loss.dtype == torch.float32
    exact = logits.detach().double().requires_grad_()
    true = (nn.functional.cross_entropy(exact, targets, reduction="none") * weights).sum()
    assert loss.item() == pytest.approx(true.item(), rel=1e-6)
    loss.backward()
    true.backward()
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=1e-2, atol=1e-4)


def test_losses_of_distributions() -> None:
    """Guards against a gradient that misses the labels or the weights, and an acceptance that is learned."""
    generator = torch.Generator().manual_seed(3)
    logits, other = (torch.randn(7, IDS, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    logits, target, weights = logits.requires_grad_(), other.softmax(dim=-1), torch.linspace(0.2, 2, 7).double()
    found, accepted = row_losses(logits, target)
    wanted = nn.functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(found, wanted)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    torch.testing.assert_close(gradient, torch.autograd.grad((wanted * weights).sum(), logits)[0])
    torch.testing.assert_close(accepted, torch.minimum(logits.softmax(dim=-1), target).sum(dim=-1).detach())
    assert not accepted.requires_grad


def test_candidates_and_all_others_have_their_probabilities() -> None:
    """Guards against a gradient that reaches the candidates twice or the others not at all."""
    generator = torch.Generator().manual_seed(4)
    logits, other = (torch.randn(5, IDS, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    logits, target = logits.requires_grad_(), other.softmax(dim=-1)
    candidates, weights = logits.topk(3, dim=1).indices, torch.rand(5, 4, generator=generator, dtype=torch.float64)
    losses, _, own, others = losses_and_candidates(logits, target, candidates)
    log_probs = logits.log_softmax(dim=-1)
    absent = log_probs.scatter(1, candidates, -torch.inf).logsumexp(dim=1)
    wanted = torch.cat((log_probs.gather(1, candidates), absent[:, None]), dim=1)
    found = torch.cat((own, others[:, None]), dim=1)
    torch.testing.assert_close(found, wanted)
    (gradient,) = torch.autograd.grad((found.exp() * weights).sum() + losses.sum(), logits)
    other_way = (wanted.exp() * weights).sum() + nn.functional.cross_entropy(logits, target, reduction="sum")
    torch.testing.assert_close(gradient, torch.autograd.grad(other_way, logits)[0])


def test_paced_weights_are_the_tokens_still_to_be_gained() -> None:
    """Guards against weights of another block's drafts, two blocks that are taken for one where rare tokens leave first
    depths unsupervised, and positions without a label that end a block or gain."""
    cells = torch.tensor([0, 1, 2, 3, 5, 7])  # three blocks: all depths, without the second, the second alone
    accepted = torch.tensor([0.8, 0.2, 0.6, 0.4, 1.0, 0.0], dtype=torch.float64)
    first, second, third = 0.9, 0.9 * 0.6, 0.9 * 0.6 * 0.8
    wanted = [first + second + third, second + third, third, 0.7 + 0.7, 0.7, 0.5]
    assert paced_weights(cells, accepted, 3).tolist() == pytest.approx(wanted)


COUNTS = torch.tensor([5, 0, 9, 1, 7, 0, 2, 3, 0, 4])
SIZE = len(COUNTS)
CPU = torch.device("cpu")


def chosen(special: tuple[int, ...] = (), **settings: Any) -> LossVocabulary:
    return LossVocabulary.chosen(VocabularySettings(**settings), Facts(COUNTS, COUNTS == 0, special), CPU)


def test_the_most_supervised_are_ranked_and_the_end_is_among_them() -> None:
    """Guards against ids ranked by what prompts say, a drafter that can never draft the end of an answer, and an index
    error for tokenizers that have more ids than the model."""
    assert chosen(vocabulary=4).ranked.tolist() == [0, 2, 4, 9]  # type: ignore[union-attr]
    for special in ((3, 5), (3, SIZE)):  # 3 ends answers, 5 was never said, SIZE is no id
        assert chosen(special, vocabulary=4).ranked.tolist() == [0, 2, 3, 4]  # type: ignore[union-attr]
    with pytest.raises(InvalidRequest, match=r"objective\.vocabulary=2: must be at least 3"):
        chosen((0, 3, 4), vocabulary=2)


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


def test_drafters_of_large_vocabularies_draft_frequent_ids() -> None:
    """Guards against a drafter that reads 151,936 rows of the head in every pass, and heads of a drafter's own that
    were trained in part, with which other engines draft."""
    counts = torch.zeros(151_936, dtype=torch.int64)
    counts[100_000:110_000] = 1
    facts = Facts(counts, counts == 0, ())
    reduced = LossVocabulary.chosen(VocabularySettings(), facts, CPU).ranked
    assert reduced is not None
    assert len(reduced) == 16_384
    assert set(range(100_000, 110_000)) <= set(reduced.tolist())
    assert LossVocabulary.chosen(VocabularySettings(), facts, CPU, has_head=True).ranked is None
    assert LossVocabulary.chosen(VocabularySettings(vocabulary=151_936), facts, CPU).ranked is None


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
    drawn_ids: list[Any] = [vocabulary.draw(seed).ids for seed in (5, 5, 7)]
    first, again, other = drawn_ids
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
