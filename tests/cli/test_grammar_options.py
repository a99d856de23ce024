"""Grammars on the command line."""

from pathlib import Path

import pytest

from outpace.cli.generate import grammar_of
from outpace.core.params import Grammar
from outpace.lib.errors import InvalidRequest


def test_each_option_names_its_grammar(tmp_path: Path) -> None:
    """Guards against a schema read as a grammar, or a file's name taken for its content."""
    schema, rules = tmp_path / "schema.json", tmp_path / "rules.lark"
    schema.write_text('{"type": "integer"}')
    rules.write_text('start: "a"')
    assert grammar_of(str(schema), None, None) == Grammar.json_schema({"type": "integer"})
    assert grammar_of(None, "a+", None) == Grammar.regex("a+")
    assert grammar_of(None, None, str(rules)) == Grammar.lark('start: "a"')
    assert grammar_of(None, None, None) is None


def test_bad_options_are_reported(tmp_path: Path) -> None:
    """Guards against two grammars of which one is ignored, and against tracebacks for files that cannot be read."""
    with pytest.raises(InvalidRequest, match="--json-schema and --regex: give one"):
        grammar_of("schema.json", "a", None)
    with pytest.raises(InvalidRequest, match=r"--grammar .*missing.*cannot be read"):
        grammar_of(None, None, str(tmp_path / "missing"))
    with pytest.raises(InvalidRequest, match=r"--json-schema .*cannot be read"):
        grammar_of("", None, None)  # as of a variable that is not set
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00\x9f")
    with pytest.raises(InvalidRequest, match=r"--json-schema .*cannot be read as text"):
        grammar_of(str(tmp_path / "picture"), None, None)
