"""The other doors on the real model: conversations over kept KV, and transformers' own `generate`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace

TURNS = ["Name three colours.", "Which of them is the colour of the sky?", "Say it again."]
PROMPTS = ["Once upon a time", "def fibonacci(n):\n    if n < 2:\n        return n\n"]


def test_a_conversation_says_what_fresh_requests_say(exact: outpace.Model) -> None:
    """Guards against a real template, tokenizer or cache for which kept KV is not that of the new prompt."""
    with exact.chat(max_new_tokens=12) as conversation:
        for number, text in enumerate(TURNS):
            messages = [*conversation.messages, {"role": "user", "content": text}]
            with conversation.send(text) as stream:
                list(stream)
            fresh = exact.generate(messages, method="plain", max_new_tokens=12)
            assert stream.result is not None
            assert stream.result.token_ids == fresh.token_ids
            assert (stream.result.metrics.reused_tokens > 20) == (number > 0)


@pytest.mark.costly
@pytest.mark.parametrize("pack", [False, True])
def test_custom_generate_says_what_generate_says(pack: bool, pulled: Path) -> None:
    """Guards against a borrowed real model that answers otherwise: 24 greedy tokens, alone and padded on the left."""
    folder = str(pulled)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    door = outpace.custom_generate(method="recycle", pack=pack)
    for prompts in (PROMPTS, PROMPTS[:1]):
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        stock = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        assert torch.equal(model.generate(**inputs, max_new_tokens=24, do_sample=False, custom_generate=door), stock)
