"""What `outpace methods` prints of a method's options."""

import pytest
from typer.testing import CliRunner

from outpace import cli
from outpace.drafters.options import described
from outpace.methods.catalog import method_named, option_kinds


@pytest.mark.parametrize(("name", "columns"), [("graft", 80), ("outpace", 80), ("domino", 60), ("svip", 200)])
def test_options_are_whole_in_a_narrow_terminal(name: str, columns: int) -> None:
    """Guards against sentences that end in dots, and words broken in two."""
    result = CliRunner().invoke(cli.app, ["methods", name], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    shown = result.stdout
    assert "\u2026" not in shown
    rows = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in shown.splitlines() if "\u2502" in line]
    found: dict[str, str] = {}
    for option, _, meaning in rows:
        found |= {option: ""} if option else {}
        found[list(found)[-1]] += f" {meaning}"
    options = [row for kind in option_kinds(method_named(name).options) for row in described(kind)]
    assert {option: meaning.strip() for option, meaning in found.items()} == {row[0]: row[3] for row in options}
    if columns >= 80:
        assert max(len(meaning) for _, _, meaning in rows) >= 30
    assert max(map(len, shown.splitlines()[3:-1])) <= columns
