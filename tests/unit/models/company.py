"""What a row must have in company that it has alone: its bits where the probe says so, else all but rounding."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outpace.bench.certificate import ROUNDING_BOUND
from outpace.core.params import SamplingParams
from outpace.core.protocols import Chunk, NodeOutputs, Target
from outpace.core.tree import DraftTree, Topology
from outpace.engine.margin import decision_margin
from outpace.engine.session import Session
from outpace.models.exactness import Exactness, differing_products, differing_scores
from outpace.models.layers.linear import PackedLinear
from outpace.models.target import PackedTarget
from tests.unit.models.tiny import VOCAB, random_ids


def bound_of(target: PackedTarget) -> float:
    """The largest difference of deciding scores that rounding explains."""
    return ROUNDING_BOUND[str(target.dtype).removeprefix("torch.")]


def has_exact_products(module: nn.Module) -> bool:
    """Whether the probe says that the packed layers below `module` keep a row's bits."""
    return not list(differing_products(layer for layer in module.modules() if isinstance(layer, PackedLinear)))


def has_exact_scores(heads: int, groups: int, head_dim: int) -> bool:
    """Whether the probe says that attention of these sizes keeps a row's bits, at the present number of threads."""
    return not list(differing_scores(heads, groups, head_dim))


def assert_rows(is_exact: bool, actual: Tensor, expected: Tensor, where: str = "") -> None:
    """Equal bits where they were promised, else equal within the rounding of a sum."""
    if is_exact:
        assert torch.equal(actual, expected), where
    else:
        tolerance = 16 * torch.finfo(actual.dtype).eps
        torch.testing.assert_close(actual, expected, atol=tolerance * float(expected.abs().max()), rtol=tolerance)


def assert_as_probed(target: PackedTarget, exactness: Exactness, one: NodeOutputs, other: NodeOutputs) -> None:
    """Equal bits; where rounding is to be expected, the same best token unless another is as good."""
    if exactness.is_bitwise:
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.top_ids, other.top_ids)
        assert torch.equal(one.top_logits, other.top_logits)
        return
    torch.testing.assert_close(one.logits, other.logits, atol=bound_of(target), rtol=0)
    for row, (mine, its) in enumerate(zip(one.top_ids[:, 0].tolist(), other.top_ids[:, 0].tolist(), strict=True)):
        assert abs(float(one.logits[row, mine] - one.logits[row, its])) <= bound_of(target), f"row {row} is no tie"


def assert_said_as_probed(
    target: PackedTarget, exactness: Exactness, plain: Session, other: Session, params: SamplingParams
) -> bool:
    """Equal tokens; where rounding is to be expected, or a tie at the first that differs. Whether they are equal."""
    if plain.generated == other.generated:
        return True
    assert not exactness.is_bitwise, f"{plain.generated} and {other.generated}, where nothing can differ"
    pairs = zip(plain.generated, other.generated)
    place = next(index for index, (left, right) in enumerate(pairs) if left != right)
    prompt = len(plain.ids) - len(plain.generated)
    tokens = plain.generated[place], other.generated[place]
    margin = decision_margin(target, plain.ids[: prompt + place], params, tokens, prompt, slot=0)
    assert margin.smallest <= bound_of(target), f"token {place} differs by {margin.smallest}, which is no tie"
    return False


def of_a_mixed_pass(
    target: Target, prompts: Sequence[Sequence[int]], vocab: int = VOCAB
) -> list[tuple[NodeOutputs, NodeOutputs]]:
    """Outputs of two trees, and of two prompts, that were computed in one pass, each with those of a pass of its own.

    Args:
        target: with five slots or more.
        prompts: of the two trees, a whole prompt, and one of which the pass writes the middle third.
    """
    trees = [
        DraftTree(torch.tensor(random_ids(len(parents), seed=len(parents), vocab=vocab)), Topology.of(parents))
        for parents in ((-1, 0, 0, 1, 1, 2), (-1,))
    ]
    for slot, prompt in enumerate(prompts[:2]):
        _written(target, slot, prompt)
    *_, whole, long = (torch.tensor(prompt) for prompt in prompts)
    first, middle, last = long.tensor_split(3)
    target.rewind_slot(2, 0)
    target.rewind_slot(3, 0)
    target.run_pass([Chunk(3, first, False, False)], (), ())
    chunks = [Chunk(2, whole, True, True), Chunk(3, middle, True, False)]
    (short, _), verified = target.run_pass(chunks, [0, 1], trees)
    (rest,), _ = target.run_pass([Chunk(3, last, False, True)], (), ())
    assert short.last is not None
    assert rest.last is not None
    pairs = [(short.last, _written(target, 4, prompts[2])), (rest.last, _written(target, 4, prompts[3]))]
    for prompt, tree, own in zip(prompts[:2], trees, verified, strict=True):
        _written(target, 4, prompt)
        pairs.append((own, target.run_pass((), [4], [tree])[1][0]))
    return pairs


def _written(target: Target, slot: int, prompt: Sequence[int]) -> NodeOutputs:
    target.rewind_slot(slot, 0)
    (output,), _ = target.run_pass([Chunk(slot, torch.tensor(prompt), False, True)], (), ())
    assert output.last is not None
    return output.last
