"""Grammars as a user writes them."""

from typing import Any

import pytest

from outpace import Grammar, InvalidRequest, SamplingParams


def test_equal_grammars_are_equal_keys() -> None:
    """Guards against a cache of compiled grammars that never finds one, and parameters that cannot be keys."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert Grammar.json_schema(schema) == Grammar.json_schema('{"type": "object", "properties": {"b": {}, "a": {}}}')
    assert len({SamplingParams(grammar=Grammar.json_schema(schema)) for _ in range(2)}) == 1
    assert Grammar.json_object() != Grammar.regex('{"type": "object"}')


def test_the_order_of_properties_is_kept() -> None:
    """Guards against a schema whose keys are sorted: their order is the order of the answer."""
    assert Grammar.json_schema({"properties": {"b": {}, "a": {}}}).text == '{"properties": {"b": {}, "a": {}}}'


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Grammar.json_schema("{"), "not JSON"),
        (lambda: Grammar.json_schema("[]"), "must be an object, found list"),
        (lambda: Grammar.json_schema(7), "must be an object, found int"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema("[" * 100_000), "not JSON"),
        (lambda: Grammar.json_schema({"enum": [{1}]}), "cannot be written as JSON"),
        (lambda: Grammar.regex(None), "must be text"),  # type: ignore[arg-type]
        (lambda: Grammar.choice([]), "one or more texts"),
        (lambda: Grammar.choice("yes"), "one or more texts"),
        (lambda: Grammar.choice(["yes", ""]), "one or more texts"),
        (lambda: Grammar("ebnf", "x"), "choose 'json'"),
        (lambda: SamplingParams(grammar={"type": "object"}), r"Grammar\.json_schema"),  # type: ignore[arg-type]
        (lambda: SamplingParams(grammar=Grammar.json_object(), ignore_eos=True), "leave out one"),
        (lambda: SamplingParams(draft_forced=1), "must be True or False"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_grammar_is_refused(make: Any, said: str) -> None:
    """Guards against a bad grammar that is found out in the engine, or never."""
    with pytest.raises(InvalidRequest, match=said):
        make()
