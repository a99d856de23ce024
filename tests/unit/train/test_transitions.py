"""What a target expects over whole sequences, as transitions are learned from."""

import pytest
import torch

from outpace.drafters.training.batch import TrainingSample
from outpace.train import features as transitions
from outpace.train.data import SampleSet
from tests.unit.drafters.training import tiny


@pytest.mark.parametrize("rows", [256, 3])
def test_the_likeliest_ids_after_every_token(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against positions off by one, probabilities of a part of the vocabulary, and sequences that see each
    other."""
    monkeypatch.setattr(transitions, "ROWS", rows)
    target = tiny.frozen()
    draws = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, tiny.VOCAB, (length,), generator=draws) for length in (9, 1, 14)]
    samples = SampleSet(TrainingSample(f"p{at}/0", ids, torch.arange(len(ids)) >= 1) for at, ids in enumerate(texts))
    found = list(transitions.expected(samples, target))
    states = {}
    for at, (ids, (told, top, probs)) in enumerate(zip(texts, found, strict=True)):
        assert torch.equal(told, ids)
        states[f"p{at}/0"] = hidden = target.features(ids[None], [len(ids)], (target.layers,))[0]
        wanted = target.logits(hidden).float().softmax(dim=-1).topk(16)
        assert torch.equal(top, wanted.indices)
        assert torch.allclose(probs, wanted.values, atol=1e-6)
    again = list(transitions.expected(samples, target, states.__getitem__))
    assert all(torch.equal(one[1], other[1]) for one, other in zip(found, again, strict=True))
