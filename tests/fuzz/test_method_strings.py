"""Texts that name methods, mutated: each is refused by name, or drafts without changing a token."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.lib.errors import ModelError
from outpace.methods.catalog import methods, option_kinds, parse_method
from tests.fuzz.campaign import Tally, counts

PROMPT = "hello hello hello"
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
NUMBERS = ["²", "-1", "0", "1", "2", "3", "64", "511", "512", "9" * 400, "nan", "inf", "-inf", "1e-320", "0.5", "1e300"]
WORDS = ["", "true", "false", "None", "[/]", "\ud800", "\n", "\x00", "é", "x" * 500, "1/2", "0.1/0.2/0.3", "/", "both"]
ODD = (*NUMBERS, *WORDS)
GLUE = (":", ",", "=", "::", ",,", "==", " ", "%", ":=,")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> outpace.Model:
    return outpace.load(checkpoint, dtype="float32", device="cpu", profile=False)


def text_of(rng: random.Random) -> str:
    """A method with a few options, the values odd ones, or those of another option; now and then cut about."""
    name = rng.choice(list(methods()))
    kind = methods()[name].options
    shapes = kind.shape_names() if hasattr(kind, "shape_names") else ()  # type: ignore[attr-defined]
    shape = rng.choice((None, *shapes))
    fields = {name: field for part in option_kinds(kind, shape) for name, field in part.model_fields.items()}
    given = [f"shape={shape}"] if shape is not None else []
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        default = str(fields[rng.choice(list(fields))].default).lower()
        value = rng.choice((*ODD, default, default, "matrix", "suffix", "tail"))
        given.append(f"{rng.choice(list(fields))}={value}")
    text = f"{name}:{','.join(given)}" if given else name
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice((*GLUE, *ODD)) + text[place + rng.randrange(3) :]
    return text


@counts(150, 1500)
def test_method_strings(model: outpace.Model, cases: int) -> None:
    """Guards against a method that takes an option for another, or numbers that its drafts cannot live with: what is
    accepted is written as it is read, and says what plain decoding says."""
    tally, rng = Tally("method strings"), random.Random(2306)
    plain = model.generate(PROMPT, method="plain", **OPTIONS).token_ids
    drawn = {"temperature": 1.0, "seed": 5, **OPTIONS}
    sampled = model.generate(PROMPT, method="plain", **drawn).token_ids
    for case in range(cases):
        text = text_of(rng)
        what = f"{case}: {text[:150]!a}"
        spec = tally.attempt(what, partial(parse_method, text), None, may=True)
        if spec is None:
            continue
        if parse_method(str(spec)) != spec:
            tally.failures.append(f"read otherwise than written: {what}: {str(spec)[:200]!a}")
        for wanted, options in ((plain, OPTIONS), (sampled, drawn)):
            answer = tally.attempt(what, partial(answered, model, text, options), None, may=True)
            if answer is not None and answer != wanted:
                tally.failures.append(f"unequal: {what}: {answer}")
    assert model.engine.is_idle
    tally.check()


def answered(model: outpace.Model, text: str, options: dict[str, Any]) -> tuple[int, ...]:
    try:
        return model.generate(PROMPT, method=text, **options).token_ids
    except ModelError as error:  # a file that an option names
        raise outpace.InvalidRequest(str(error)) from error


def test_methods_without_drafters_are_among_those_that_answer(model: outpace.Model) -> None:
    """Guards against a fuzzer that refuses everything and so finds nothing."""
    answers = {text: answered(model, text, OPTIONS) for text in ("lookup:budget=511", "recycle:budget=1", "svip")}
    assert len(set(answers.values())) == 1
