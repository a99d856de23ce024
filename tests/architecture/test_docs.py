"""Pages whose tables are made for the site, and what stands there for readers of the files."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
MARK = re.compile(r"^<!-- outpace: (\w+)(?: (\S+))?.* -->$", re.MULTILINE)
SAID = {
    "methods": "`outpace methods`",
    "options": "`outpace methods {}`",
    "shared": "`outpace methods NAME`",
    "shapes": "`src/outpace/shaping/table.py`",
    "settings": "--shape ",
    "command": "`outpace COMMAND --help`",
    "arrows": "`tests/architecture/test_arrows.py`",
    "file": "`{}`",
    "figures": "(../measurements/graft-and-union.md)",
}
"""What the text before or behind a table's place must name, by the kind of table: what prints the same, or holds it."""


def test_a_reader_of_the_files_finds_every_table() -> None:
    """Guards against a comment and nothing else where the site has a table: whoever reads the files, as on GitHub, must
    be told what prints the same or holds it."""
    seen = set()
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text()
        for verb, name in MARK.findall(text):
            seen.add(verb)
            assert SAID[verb].format(name) in MARK.sub("", text), f"{path.name}: {verb} {name}"
    assert seen == set(SAID)
