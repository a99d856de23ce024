"""A real browser on a real server: what `make test-browser` runs."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, sync_playwright

import outpace
from outpace.api import Model
from outpace.models.loading.pull import pull
from tests.unit.serve.served import Served, serving

NAMES = ("chromium", "chromium-browser", "google-chrome")
REMEDY = (
    "no Chromium: install your system's (`apt-get install chromium`) or run `.venv/bin/playwright install chromium`"
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium: the system's, else playwright's own. Without either every test fails and says what to do."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found)
        except Error as error:
            pytest.fail(f"{REMEDY} ({str(error).splitlines()[0]})")
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def real() -> Model:
    """A real model. In float32, where no machine's rounding decides between two tokens."""
    pull("smollm2-135m")
    return outpace.load("smollm2-135m", "outpace:draft=none", dtype="float32", device="cpu", max_num_seqs=4)


@pytest.fixture(scope="session")
def server(real: Model) -> Iterator[Served]:
    with serving(real) as one:
        yield one


@dataclass
class Visit:
    """A page and what it did behind the scenes.

    Attributes:
        errors: messages on the console, and exceptions that nobody caught.
        requests: all addresses that it asked for.
    """

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def hear(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def settle(self) -> None:
        """Wait until nothing runs."""
        self.page.wait_for_function("() => !document.querySelector('#send').hidden", timeout=60_000)

    def ask(self, text: str, **settings: str) -> None:
        """Type a message and send it by Enter, with the settings given, and wait for both answers."""
        if settings:
            self.set(**settings)
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        self.settle()

    def set(self, **settings: str) -> None:
        self.page.evaluate("document.querySelector('#settings').open = true")
        for name, value in settings.items():
            if name in ("method", "race"):
                self.page.select_option(f"#{name}", value)
            else:
                self.page.fill(f"#{name}", value)

    def answers(self) -> list[str]:
        """Texts of the last turn's answers."""
        return [text or "" for text in self.page.locator(".turn:last-child .answer").all_text_contents()]

    @property
    def is_as_wide_as_the_window(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@pytest.fixture
def visit(browser: Browser, server: Served) -> Iterator[Any]:
    """Open the page of a server; by default the one with the real model."""
    contexts = []

    def opened(url: str = server.url, **options: Any) -> Visit:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        one = Visit(page)
        page.on("console", one.hear)
        page.on("pageerror", lambda error: one.errors.append(str(error)))
        page.on("request", lambda request: one.requests.append(request.url))
        page.goto(url)
        page.wait_for_function("() => document.querySelector('#model').textContent !== 'connecting …'")
        return one

    yield opened
    for context in contexts:
        context.close()
