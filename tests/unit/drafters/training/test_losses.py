"""Sums of losses in pieces: values and gradients are those of the whole at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from outpace.drafters.training.losses import summed, summed_with_gradients, weighted_cross_entropy

ROWS, WIDTH, IDS = 11, 6, 9


def rows() -> tuple[Tensor, Tensor, Tensor, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(IDS, (ROWS,), generator=generator)
    weights = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    return hidden, targets, weights, nn.Parameter(torch.randn(IDS, WIDTH, generator=generator, dtype=torch.float64))


def stock(hidden: Tensor, targets: Tensor, weights: Tensor, vocabulary: Tensor) -> Tensor:
    return (nn.functional.cross_entropy(hidden @ vocabulary.T, targets, reduction="none") * weights).sum()


@pytest.mark.parametrize("make", [summed, summed_with_gradients])
@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_pieces_add_up(make: Callable[..., Tensor], at_once: int) -> None:
    """Guards against rows lost or counted twice between pieces, and gradients that miss the factor of the loss."""
    hidden, targets, weights, vocabulary = rows()
    whole = stock(hidden, targets, weights, vocabulary)
    expected = torch.autograd.grad(whole * 0.3, (hidden, vocabulary))

    def losses(hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        learned = weighted_cross_entropy(hidden @ vocabulary.T, targets, weights)
        return torch.stack([learned, weights.sum()])

    pieces = (hidden, targets, weights)
    if make is summed:
        found = summed(losses, pieces, at_once)
    else:
        found = summed_with_gradients(losses, pieces, (vocabulary,), at_once)
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

    found = summed_with_gradients(losses, (hidden, targets, weights), (vocabulary,), 4)
    gradients = torch.autograd.grad(found[0] + found[1], (hidden, vocabulary))
    expected = torch.autograd.grad(stock(hidden, targets, weights, vocabulary), (hidden, vocabulary))
    assert all(torch.allclose(one, other) for one, other in zip(gradients, expected, strict=True))
    with torch.no_grad():
        again = summed_with_gradients(losses, (hidden, targets, weights), (vocabulary,), 4)
    assert torch.equal(again, found)
    assert not again.requires_grad


def test_a_forgotten_weight_is_refused() -> None:
    """Guards against a weight that is said to be read but is not, so that it would never learn."""
    hidden, targets, weights, vocabulary = rows()
    with pytest.raises(RuntimeError, match="not have been used"):
        summed_with_gradients(
            lambda hidden, targets, weights: weighted_cross_entropy(hidden, targets, weights)[None],
            (hidden, targets % WIDTH, weights),
            (vocabulary,),
        )


def test_the_gradient_of_half_precision_logits() -> None:
    """Guards against a loss in the dtype of its logits, whose sums over a vocabulary lose most digits."""
    hidden, targets, weights, vocabulary = rows()
    logits = (hidden @ vocabulary.T).detach().bfloat16().requires_grad_()
    loss = weighted_cross_entropy(logits, targets, weights.float())
    assert loss.dtype == torch.float32
    exact = logits.detach().double().requires_grad_()
    true = (nn.functional.cross_entropy(exact, targets, reduction="none") * weights).sum()
    assert loss.item() == pytest.approx(true.item(), rel=1e-6)
    loss.backward()
    true.backward()
    assert logits.grad is not None
    assert exact.grad is not None
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=1e-2, atol=1e-4)
