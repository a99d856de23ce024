"""`stop_strings` with `tokenizer=` through the door of transformers: the rows that stock `generate` returns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.stopping_criteria import StopStringCriteria

import outpace
from tests.unit.plugins.test_transformers import Recorder

PAD = 5
PROMPTS = ("hello hello", "abcabcabcab", "0101010101?")


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval(), AutoTokenizer.from_pretrained(checkpoint)


def asked(loaded: tuple[Any, Any], **options: Any) -> dict[str, Any]:
    ids = torch.tensor([loaded[1](prompt).input_ids for prompt in PROMPTS])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 32, "pad_token_id": PAD}
    return given | options


def some_strings(loaded: tuple[Any, Any]) -> list[list[str]]:
    """Strings over two tokens, one or several, that end some rows here and there and others never; one of them begins
    in the prompt."""
    model, tokenizer = loaded
    new = model.generate(**asked(loaded))[:, len(PROMPTS[0]) :]
    text = [[tokenizer.decode(row[at : at + 2]) for at in range(31)] for row in new]
    whole = [[piece for piece in row if "\ufffd" not in piece and len(piece) == 2] for row in text]
    found = [row[len(row) // 2] for row in whole if row]
    assert found, "the model must say something that is text"
    across = PROMPTS[0][-1] + tokenizer.decode(new[0, :1])
    return [found[:1], found, [across], ["never said"]]


@pytest.mark.parametrize("eos", [False, True], ids=["no EOS", "EOS"])
@pytest.mark.parametrize("method", ["plain", "recycle:budget=12", "lookup"])
def test_stop_strings_end_rows_where_stock_generate_ends_them(loaded: tuple[Any, Any], method: str, eos: bool) -> None:
    """Guards against stop strings that the door refuses for want of the tokenizer that was given."""
    model, tokenizer = loaded
    ends = 0
    for strings in some_strings(loaded):
        options = asked(loaded, stop_strings=strings, tokenizer=tokenizer)
        if eos:
            options["eos_token_id"] = [int(model.generate(**asked(loaded))[1, -3]), -1, 10**6]
        stock, ours = Recorder(), Recorder()
        expected = model.generate(**options, streamer=stock)
        actual = model.generate(**options, streamer=ours, custom_generate=outpace.custom_generate(method=method))
        assert torch.equal(actual, expected), strings
        assert (ours.puts, ours.ended) == (stock.puts, stock.ended)
        ends += expected.shape[1] < 32 + len(PROMPTS[0]) or bool((expected == PAD).any())
    assert ends or not eos, "some row must have ended"


def test_one_row_and_a_criterion_of_ones_own(loaded: tuple[Any, Any]) -> None:
    """Guards against a criterion that is heard only where `generate` made it, and samples that share an end."""
    model, tokenizer = loaded
    strings = some_strings(loaded)[0]
    options = asked(loaded, stopping_criteria=[StopStringCriteria(tokenizer, strings)])
    lengths = []
    for row in range(len(PROMPTS)):
        one = options | {name: options[name][row : row + 1] for name in ("input_ids", "attention_mask")}
        ours = model.generate(**one, custom_generate=outpace.custom_generate(method="recycle"))
        assert torch.equal(ours, model.generate(**one))
        lengths.append(ours.shape[1] - len(PROMPTS[0]))
    assert min(lengths) < 32, "a row must end by a stop string"
    sampled = one | {"do_sample": True, "num_return_sequences": 3}
    assert model.generate(**sampled, custom_generate=outpace.custom_generate(seed=3)).shape[0] == 3
    told = one | {"stop_strings": strings, "stopping_criteria": None}
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(**told, custom_generate=outpace.custom_generate())
