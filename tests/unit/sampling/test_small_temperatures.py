"""Temperatures so small, or so large, that a quotient of logits is no number of float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from outpace.core.params import LEAST_TEMPERATURE, SamplingParams
from outpace.lib.errors import InvalidRequest
from outpace.sampling.warp import History, warp

SMALL = (5e-324, 1e-320, 1e-38, 1e-37, 1e-30, 1e-12, 9.9e-9, 1e-8, 1e-6)
PROMPT = "hello hello hello"


@pytest.mark.parametrize("temperature", SMALL)
@pytest.mark.parametrize("spread", [1.0, 1e4, 1e30])
def test_the_best_token_is_left(temperature: float, spread: float) -> None:
    """Guards against logits divided by 1e-38: all infinite, so that the first token of the vocabulary was said. No two
    of these logits are as close as noise could tell apart."""
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)).sort(dim=-1).values * spread
    logits = logits[:, torch.randperm(500, generator=torch.Generator().manual_seed(1))]
    options: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"bad_words_ids": [[7]]}]
    for option in options:
        params = SamplingParams(temperature=temperature, **option)
        found = warp(logits, params, [History([1], [2])] * 4)
        expected = logits.clone()
        if "bad_words_ids" in option:
            expected[:, 7] = -torch.inf
        assert not found.isnan().any()
        assert torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1))
        torch.testing.assert_close(found.exp().sum(dim=-1), torch.ones(4))


def test_from_where_on_it_is_sampled() -> None:
    """Guards against a bound that swallows temperatures at which equal logits are still drawn from."""
    assert SamplingParams(temperature=LEAST_TEMPERATURE * 0.99).is_greedy
    assert not SamplingParams(temperature=LEAST_TEMPERATURE).is_greedy
    probs = warp(torch.tensor([[3.0, 3.0, 2.999]]), SamplingParams(temperature=LEAST_TEMPERATURE)).exp()
    torch.testing.assert_close(probs, torch.tensor([[0.5, 0.5, 0.0]]))


def test_a_large_temperature_keeps_bans() -> None:
    """Guards against minus infinity divided by what float32 takes for infinity: NaN, and a banned token."""
    with pytest.raises(InvalidRequest, match="temperature=1e\\+39: must be a number in \\[0, 1e\\+06\\]"):
        SamplingParams(temperature=1e39)
    params = SamplingParams(temperature=1e6, bad_words_ids=[[1]])  # type: ignore[arg-type]
    assert float(warp(torch.zeros(1, 3), params, [History([1], [])])[0, 1]) == -torch.inf


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "no kernels"])
def test_all_doors_say_the_greedy_answer(checkpoint: Path, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against doors that differ: compiled draws, torch's, rejection, drafts, a conversation, `generate` of
    transformers; all must be greedy decoding at temperatures that leave nothing to chance."""
    if not kernels:
        monkeypatch.setenv("OUTPACE_KERNELS", "off")
    model = outpace.load(checkpoint, dtype="float32", device="cpu", profile=False)
    greedy = model.generate(PROMPT, max_new_tokens=12).token_ids
    stock: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    asked = AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt")
    for temperature in SMALL:
        for method in ("plain", "recycle", "svip"):
            for verification in ("match", "rejection"):
                options: dict[str, Any] = {"temperature": temperature, "verification": verification, "seed": 3}
                answer = model.generate(PROMPT, max_new_tokens=12, method=method, **options)
                assert answer.token_ids == greedy, (temperature, method, verification)
        door = outpace.custom_generate(method="recycle", seed=3)
        ours = stock.generate(**asked, do_sample=True, temperature=temperature, max_new_tokens=12, custom_generate=door)
        assert tuple(ours[0, asked["input_ids"].shape[1] :].tolist()) == greedy
    with pytest.raises(InvalidRequest, match="temperature="):
        model.generate(PROMPT, temperature=1e7)
