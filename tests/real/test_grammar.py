"""Structured output of the real model, whose tokenizer was read from a GGUF file."""

import json
from typing import Any

import jsonschema
import pytest

import outpace
from outpace import Grammar, InvalidRequest

METHODS = ("outpace:draft=none", "outpace")


def closed(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has these properties and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMA = closed(
    name={"type": "string", "minLength": 1, "maxLength": 24},
    born={"type": "integer", "minimum": 1700, "maximum": 2026},
    field={"enum": ["mathematics", "physics", "chemistry"]},
    works={"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 2},
)
PLACE = closed(city={"type": "string", "maxLength": 20}, unit={"enum": ["celsius", "kelvin"]})
CALL = {"anyOf": [closed(name={"const": "get_weather"}, arguments=PLACE)]}


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_method_answers_as_plain_decoding_does(exact: outpace.Model, temperature: float) -> None:
    """Guards against loss under grammars on a real vocabulary: equal tokens, JSON that the schema validates, fewer
    passes; beside neighbours without a grammar, with penalties, min-p and a stop string."""
    requests: list[tuple[str, dict[str, Any]]] = [
        ("Describe Ada Lovelace in JSON.", {"grammar": Grammar.json_schema(SCHEMA)}),
        ("What is the weather in Lisbon?", {"grammar": Grammar.json_schema(CALL), "repetition_penalty": 1.1}),
        ("Describe Marie Curie in JSON.", {"grammar": Grammar.json_schema(SCHEMA), "min_p": 0.02}),
        ("Describe Isaac Newton in JSON.", {"grammar": Grammar.json_schema(SCHEMA), "stop": ('"field"',)}),
        ("Is the sky blue?", {"grammar": Grammar.choice(["yes, always", "yes, by day", "no"])}),
        ("Say hello.", {"max_new_tokens": 12}),
    ]
    for text, options in requests:
        options = {"max_new_tokens": 90, "temperature": temperature, "seed": 2, **options}
        plain = exact.generate(asked(text), method="plain", **options)
        is_json = "grammar" in options and options["grammar"].kind == "json"
        if is_json and plain.finish_reason == "stop" and "stop" not in options:
            jsonschema.validate(json.loads(plain.text), json.loads(options["grammar"].text))
        for method in METHODS:
            answer = exact.generate(asked(text), method=method, **options)
            assert (answer.token_ids, answer.text) == (plain.token_ids, plain.text), (method, text)
            assert not is_json or answer.metrics.steps < 0.8 * plain.metrics.steps, (method, text)


def test_a_tokenizer_from_a_gguf_file_follows_schemas(exact: outpace.Model) -> None:
    """Guards against GGUF tokenizers, whose decoder hides that tokens are bytes: no schema could be followed."""
    prompt, grammar = asked("Describe Ada Lovelace in JSON."), Grammar.json_schema(SCHEMA)
    plain, fast = (
        exact.generate(prompt, method=method, grammar=grammar, max_new_tokens=120) for method in ("plain", "lookup")
    )
    assert fast.token_ids == plain.token_ids
    assert plain.finish_reason == "stop"
    jsonschema.validate(json.loads(plain.text), SCHEMA)
    assert fast.metrics.accepted_forced > 8
    assert fast.metrics.tokens_per_step > 1.5


def test_batches_and_texts_beyond_ascii(exact: outpace.Model) -> None:
    """Guards against bytes of a character that are cut between tokens, and batches in which grammars meet."""
    grammar = Grammar.choice(["Größe: 日本", "é"])
    both = exact.generate(["Hello", "Hi"], grammar=grammar, max_new_tokens=20)
    assert {one.text for one in both} <= {"Größe: 日本", "é"}


def test_what_cannot_be_satisfied_is_refused_when_it_is_asked(exact: outpace.Model) -> None:
    """Guards against a bad grammar that harms requests which are being decoded."""
    with exact.stream("Hello", max_new_tokens=8) as stream:
        next(stream)
        with pytest.raises(InvalidRequest, match=r"grammar=json.*minimum"):
            exact.generate("x", grammar=Grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 1}))
        tokens = [token for event in stream for token in event.tokens]
    assert tokens
