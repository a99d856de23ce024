"""The playground's files, without a browser: they come with strict headers and need nothing from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from outpace.serve.app import FOLDER
from tests.unit.serve.served import Served

FILES = sorted(Path(FOLDER).iterdir())
SCRIPTS = [file for file in FILES if file.suffix == ".js"]
PAGE = Path(FOLDER, "index.html").read_text(encoding="utf-8")


class Tags(HTMLParser):
    """All tags of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


TAGS = Tags(PAGE).tags


def test_the_page_is_served_at_the_root(served: Served) -> None:
    """Guards against a page that is not there, or may load and run what it likes."""
    with served.http as http:
        page = http.get("/")
        assert http.head("/").status_code == 200
    assert page.status_code == 200
    assert page.text == PAGE
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().partition(" ")[::2] for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "connect-src")} == {"'self'"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_is_served_with_its_kind(served: Served, file: Path) -> None:
    """Guards against a module that a browser refuses for its type, and files without the page's headers."""
    kinds = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    answer = served.get(f"/playground/{file.name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kinds[file.suffix])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_nothing_but_the_folder_is_served(served: Served) -> None:
    """Guards against a way out of the folder."""
    for path in ("/playground/../app.py", "/playground/%2e%2e/app.py", "/playground/..%2fapp.py", "/playground/"):
        assert served.get(path).status_code == 404, path


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_comes_from_elsewhere(file: Path) -> None:
    """Guards against fonts, scripts and images of other hosts, which tell them who visits."""
    addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`<]*", file.read_text(encoding="utf-8"))
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}, "the name of SVG is no address"


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_text_never_becomes_markup_or_code(file: Path) -> None:
    """Guards against the one line by which a model's answer would run in the page."""
    ways = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "createContextualFragment",
            "setHTML", "eval(", "Function(", "srcdoc", "javascript:", '"href"', '"onclick"')  # fmt: skip
    found = [way for way in ways if way in file.read_text(encoding="utf-8")]
    assert not found


def test_no_script_or_style_within_the_page() -> None:
    """Guards against what the policy would block: inline scripts, styles and handlers."""
    for tag, attributes in TAGS:
        assert tag != "style"
        assert not {name for name in attributes if name == "style" or name.startswith("on")}, tag
        assert tag != "script" or attributes.get("src")


def test_everything_that_is_named_is_there() -> None:
    """Guards against a file that was renamed in one place, and an id that no element has."""
    named = {str(attributes.get("src") or attributes.get("href")) for _, attributes in TAGS
             if attributes.get("src") or attributes.get("href")}  # fmt: skip
    names = {file.name for file in FILES}
    assert {name.removeprefix("playground/") for name in named if not name.startswith("#")} <= names
    ids = {attributes["id"] for _, attributes in TAGS if "id" in attributes}
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        assert set(re.findall(r'from "\./([^"]+)"', text)) <= names
        assert set(re.findall(r'by\("([\w-]+)"\)', text)) <= ids, script.name
        assert len(text.splitlines()) <= 300
    labelled = {attributes["for"] for tag, attributes in TAGS if tag == "label" and "for" in attributes}
    assert labelled <= ids
