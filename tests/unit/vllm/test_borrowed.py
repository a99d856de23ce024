"""What a trained drafter takes from a vLLM model, without vLLM."""

from types import SimpleNamespace

import pytest
import torch

from outpace.lib.errors import UnsupportedModel
from outpace.vllm.borrowed import _weight


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_quantised_head_is_refused(dtype: torch.dtype) -> None:
    """Guards against an LM head in 8-bit floats, as compressed-tensors and ModelOpt have it in vLLM, that is taken for
    a matrix of numbers: the server started, and at its first draft went on without."""
    model = SimpleNamespace(lm_head=SimpleNamespace(weight=torch.zeros(4, 8).to(dtype)))
    with pytest.raises(UnsupportedModel, match=r"Model: lm_head\.weight is no matrix of real numbers"):
        _weight(model, "lm_head", "Model")
    model.lm_head.weight = torch.zeros(8, 4, dtype=torch.bfloat16)
    assert _weight(model, "lm_head", "Model").shape == (8, 4)
