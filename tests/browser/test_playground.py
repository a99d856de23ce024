"""The playground in a real browser, on a real model: what a visitor types, sees and may do by keyboard."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Request, Route, expect

from outpace.api import Model
from tests.browser.conftest import Visit
from tests.unit.serve.served import Served, serving

pytestmark = pytest.mark.browser

Visiting = Callable[..., Visit]
QUESTION = "List the numbers from one to ten, and then list them again."
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 8}, "is_happy": {"type": "boolean"}},
    "required": ["first_name", "is_happy"],
    "additionalProperties": False,
}


def bodies_of(one: Visit) -> list[dict[str, Any]]:
    """What the page asks of the server from now on, as it asks."""
    bodies: list[dict[str, Any]] = []

    def keep(request: Request) -> None:
        if request.method == "POST":
            bodies.append(json.loads(request.post_data or ""))

    one.page.on("request", keep)
    return bodies


def test_both_answers_come_and_are_equal(visit: Visiting, server: Served) -> None:
    """Guards against a race that ends without a verdict, tokens without their origin, a tree or chart that does not
    appear, errors that only the console knows, and anything that is fetched from another host."""
    one = visit()
    one.ask(QUESTION, max_tokens="40", temperature="0")
    own, plain = one.answers()
    assert own == plain
    assert len(own) > 20
    page = one.page
    expect(page.locator(".verdict .told")).to_have_text("Equal: all 40 tokens are the same.")
    assert re.fullmatch("\\d+\\.\\d\\d\u00d7", page.inner_text(".verdict .ratio"))
    for lane in page.locator(".lane").all():
        assert lane.get_attribute("data-state") == "done"
        assert float(lane.locator(".clock").inner_text().removesuffix(" s")) > 0
        assert re.match(r"40 tokens · \d+\.\d\d per step · \d+ tokens/s", lane.locator(".figures").inner_text())
    counts = {
        item.get_attribute("data-origin"): int(item.locator("b").inner_text())
        for item in page.locator("#legend li").all()
    }
    assert set(counts) == {"drafted", "retrieved", "matched", "forced", "bonus"}
    assert sum(counts.values()) == 40
    assert counts["retrieved"] + counts["matched"] > 0
    assert page.locator("#chart .part").count() > 0
    assert page.locator("#tree .node.accepted").count() >= 2
    assert one.errors == []
    assert all(url.startswith(server.url + "/") for url in one.requests)


def test_sampled_answers_are_equal_at_once_and_over_several_turns(visit: Visiting) -> None:
    """Guards against a seed that only one of both gets, lanes that mix when they run at once, and a conversation whose
    earlier turns are forgotten."""
    one = visit()
    one.ask("My name is Ada. Say hello.", max_tokens="16", temperature="0.9", race="both")
    one.ask("What is my name?", seed="5")
    assert one.answers()[0] == one.answers()[1]
    verdicts = one.page.locator(".verdict .told").all_inner_texts()
    assert [text.partition(":")[0] for text in verdicts] == ["Equal", "Equal"]
    assert "Seed 5." in verdicts[1]
    assert one.page.locator(".turn").count() == 2


def test_a_turn_before_is_sent_along(visit: Visiting) -> None:
    """Guards against questions that are asked without what was said before, a system prompt that is not sent, and a
    list of methods of which only the first can be chosen: others are asked without its options."""
    one = visit()
    bodies = bodies_of(one)
    one.ask("First.", method="lookup", max_tokens="4", system="Be kind.")
    assert bodies[0]["outpace"]["method"] == "lookup"
    expect(one.page.locator("#alert")).to_be_hidden()
    (said, _) = one.answers()
    one.ask("Second.")
    told = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "First."},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "Second."},
    ]
    assert [body["messages"] for body in bodies] == [told[:2], told[:2], told, told]
    assert bodies[0]["seed"] == bodies[1]["seed"]
    one.page.click("#fresh")
    expect(one.page.locator("#welcome")).to_be_visible()
    one.ask("Third.", system="")
    assert bodies[-1]["messages"] == [{"role": "user", "content": "Third."}]


def test_pointing_at_a_token_shows_its_round(visit: Visiting) -> None:
    """Guards against a tree of another round than that of the token, by mouse, by keyboard and by the buttons."""
    one = visit()
    one.ask(QUESTION, max_tokens="40", temperature="0")
    page = one.page
    token = page.locator(".lane").first.locator(".token[data-round]", has_text=re.compile(r"\w")).nth(6)
    number = int(token.get_attribute("data-round") or "")
    token.hover()
    expect(page.locator("#round-title")).to_have_text(re.compile(rf"^Round {number + 1} of \d+$"))
    marked = page.locator(".token.same-round").all_text_contents()
    drawn = page.locator("#tree .node.accepted title").all_text_contents()
    shown = [text.replace(" ", "␣").replace("\n", "↵") for text in marked]
    assert [title.rpartition(": ")[0] for title in drawn[1:]] == shown
    page.locator(".lane").first.locator(".answer").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#round")).to_have_text("The first token comes with the prompt, before any round.")
    page.keyboard.press("End")
    expect(page.locator("#round-title")).to_have_text(re.compile(r"^Round (\d+) of \1$"))
    here = "[...document.activeElement.parentElement.children].indexOf(document.activeElement)"
    place = page.evaluate(here)
    page.evaluate(
        "document.activeElement.dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'ArrowLeft', altKey: true, bubbles: true, cancelable: true}))"
    )
    assert page.evaluate(here) == place, "Alt and an arrow are the browser's"
    page.click("#before")
    expect(page.locator("#round-title")).not_to_have_text(re.compile(r"^Round (\d+) of \1$"))
    page.locator(".lane").nth(1).locator(".token", has_text=re.compile(r"\w")).nth(3).hover()
    expect(page.locator("#round")).to_have_text("Nothing was guessed; the model said one token.")


def test_it_is_used_by_keyboard_alone(visit: Visiting, server: Served) -> None:
    """Guards against controls that Tab does not reach, focus that nobody sees, and an answer that Escape leaves
    running on the server."""
    one = visit()
    page = one.page
    expect(page.locator("#prompt")).to_be_focused()
    seen = []
    for _ in range(12):  # back to the beginning
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
    for _ in range(14):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break  # behind the last one
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    order = [name for name in dict.fromkeys(seen) if name in ("skip", "prompt", "send")]
    assert order == ["skip", "prompt", "send"]
    page.focus("#prompt")
    page.keyboard.type("Count to a thousand.")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Slowly.")
    assert page.input_value("#prompt") == "Count to a thousand.\nSlowly."
    page.evaluate("document.querySelector('#max_tokens').value = '3000'")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.lane:first-child .token').length > 5")
    page.evaluate(
        "document.activeElement.dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'Escape', isComposing: true, bubbles: true}))"
    )
    page.wait_for_function("() => document.querySelectorAll('.lane:first-child .token').length > 15")
    page.keyboard.press("Escape")
    one.settle()
    assert [lane.get_attribute("data-state") for lane in page.locator(".lane").all()] == ["stopped", "skipped"]
    expect(page.locator(".verdict")).to_have_text("Stopped: nothing to compare.")
    expect(page.locator("#prompt")).to_be_focused()
    server.assert_idle()
    assert one.errors == []


def test_screen_readers_hear_verdicts_and_not_clocks(visit: Visiting) -> None:
    """Guards against live regions that change many times a second, and against a focus that is lost with its button."""
    one = visit()
    page = one.page
    assert page.locator("output").count() == 0, "each of them is a live region"
    page.fill("#prompt", "Count to a thousand.")
    one.set(max_tokens="3000")
    page.focus("#send")
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_focused()
    page.wait_for_function("() => document.querySelectorAll('.lane:first-child .token').length > 20")
    assert page.locator("output").count() == 0
    expect(page.locator("#round")).to_have_attribute("aria-live", "off")
    page.keyboard.press("Enter")
    one.settle()
    expect(page.locator("#send")).to_be_focused()
    expect(page.locator(".verdict")).to_have_text("Stopped: nothing to compare.")
    page.click("#before")
    expect(page.locator("#round")).to_have_attribute("aria-live", "polite")


def test_a_phone_has_room_for_all_of_it(visit: Visiting) -> None:
    """Guards against anything wider than 360 pixels, and controls too small for a finger."""
    one = visit(**PHONE)
    assert one.is_as_wide_as_the_window
    one.ask("x" * 300 + " " + QUESTION, max_tokens="24", temperature="0")
    assert one.is_as_wide_as_the_window
    one.page.locator(".token", has_text=re.compile(r"\w")).nth(4).tap()
    assert one.page.locator("#tree .node").count() > 0
    assert one.is_as_wide_as_the_window
    for name in ("#send", "#prompt"):
        box = one.page.locator(name).bounding_box()
        assert box is not None
        assert box["height"] >= 44
    boxes = [lane.bounding_box() for lane in one.page.locator(".lane").all()]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"], "one below the other"


def test_light_and_dark(visit: Visiting) -> None:
    """Guards against a page that ignores the system's choice."""
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = (visit(color_scheme=scheme).page for scheme in ("light", "dark"))
    assert light.evaluate(background) != dark.evaluate(background)


def stream(*pieces: tuple[int, str, str], end: str = "data: [DONE]\n\n") -> str:
    """The body of a streamed answer: an id, a text and an origin for each token, one round for each but the first."""
    chunks = []
    for place, (token, text, origin) in enumerate(pieces):
        drawn = {"tokens": ["a", text], "ids": [1, token], "parents": [-1, 0], "origins": ["pending", origin]}
        rounds = [{**drawn, "path": [0, 1]}] if place else []
        told = {"tokens": [{"id": token, "text": text, "origin": origin}], "rounds": rounds}
        chunks.append({"choices": [{"index": 0, "delta": {"content": text}, "outpace": told}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end


def answering(one: Visit, *answers: dict[str, object]) -> None:
    """Let the next requests be answered so, the last one for all that follow; an empty answer is none at all."""
    left = list(answers)

    def fulfil(route: Route) -> None:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if answer:
            route.fulfill(**answer)  # type: ignore[arg-type]
        else:
            route.abort()

    one.page.route("**/v1/chat/completions", fulfil)


def test_what_the_model_says_is_never_markup(visit: Visiting) -> None:
    """Guards against an answer, a question, a tree or an error that runs as a script in the visitor's page."""
    one = visit()
    body = stream((1, EVIL, "bonus"), (2, EVIL, "matched"))
    answering(one, {"body": body}, {"body": body}, {"status": 400, "json": {"error": {"message": EVIL, "param": EVIL}}})
    one.ask(EVIL)
    assert one.answers() == [EVIL + EVIL] * 2
    assert one.page.inner_text(".question") == EVIL
    assert one.page.locator("#tree title").last.text_content() == f"{EVIL.replace(' ', '␣')}: matched, accepted"
    one.ask("again")
    assert EVIL in one.page.inner_text("#alert")
    for name in ("main img", "main script", "form img"):
        assert one.page.locator(name).count() == 0
    assert one.page.title() == "Outpace playground"


def test_right_to_left_text_is_set_so(visit: Visiting) -> None:
    """Guards against Hebrew and Arabic sentences whose full stops stand at their beginnings."""
    one = visit()
    answering(one, {"body": stream((1, "\u05e9\u05dc", "bonus"), (2, "\u05d5\u05dd.", "matched"))})
    one.ask("\u05e9\u05dc\u05d5\u05dd.")
    left = """([name, place]) => {
        const walker = document.createTreeWalker(document.querySelector(name), NodeFilter.SHOW_TEXT);
        const [node, range] = [place ? walker.lastChild() : walker.firstChild(), document.createRange()];
        const start = place ? node.length - 1 : 0;
        range.setStart(node, start);
        range.setEnd(node, start + 1);
        return range.getBoundingClientRect().left;
    }"""
    for name in (".question", ".answer"):
        first, last = (one.page.evaluate(left, [name, place]) for place in (0, 1))
        assert last < first, name


@pytest.mark.parametrize("own", [[(2, " you", "drafted")], []], ids=["another token", "the beginning alone"])
def test_a_difference_is_called_one(visit: Visiting, own: list[tuple[int, str, str]]) -> None:
    """Guards against a verdict that says equal whatever it sees, such as equal texts of unequal tokens, and against a
    comparison that stops where the shorter answer does."""
    one, first = visit(), (1, "Hi", "bonus")
    answering(one, {"body": stream(first, *own)}, {"body": stream(first, (3, " you", "bonus"))})
    one.ask("Hi")
    assert one.page.inner_text(".verdict .told").startswith("Different from token 2 on.")


@pytest.mark.parametrize(
    ("answer", "said", "field"),
    [
        (
            {"status": 429, "headers": {"Retry-After": "7"}, "json": {"error": {"message": "the queue is full"}}},
            "The server is busy; try again in 7 s. The queue is full.",
            None,
        ),
        (
            {"status": 400, "json": {"error": {"message": "temperature: too hot", "param": "temperature"}}},
            "The server refuses temperature: too hot.",
            "temperature",
        ),
        (
            {"status": 400, "json": {"error": {"message": "no such method", "param": "outpace.method"}}},
            "The server refuses outpace.method: no such method.",
            "method",
        ),
        ({"status": 502, "body": "<h1>Bad gateway</h1>"}, "The server answered with status 502.", None),
        ({}, "The connection to the server was lost. Is it still running?", None),
        (
            {"body": stream((1, "Hi", "bonus"), end="")},
            "The connection to the server was lost. Is it still running? What had come until then is shown.",
            None,
        ),
        (
            {"body": stream((1, "Hi", "bonus"), end='data: {"error": {"message": "it took too long"}}\n\n')},
            "It took too long.",
            None,
        ),
    ],
    ids=["busy", "field", "method", "proxy", "gone", "lost", "late"],
)
def test_errors_are_said_in_words(visit: Visiting, answer: dict[str, object], said: str, field: str | None) -> None:
    """Guards against answers that fail in silence, lose what the visitor typed, or do not say which field it was, and
    against a page that waits for ever where nobody answers."""
    one = visit()
    answering(one, answer)
    one.ask("Hello?")
    expect(one.page.locator("#alert")).to_have_text(said)
    marked = one.page.locator("[aria-invalid=true]")
    assert [element.get_attribute("id") for element in marked.all()] == ([field] if field else [])
    if "Hi" in str(answer.get("body", "")):
        states = [lane.get_attribute("data-state") for lane in one.page.locator(".lane").all()]
        assert states == ["failed", "skipped"]
        assert one.answers()[0] == "Hi"
    else:
        assert one.page.locator(".turn").count() == 0
        assert one.page.input_value("#prompt") == "Hello?"
    one.page.unroute_all()
    one.ask("And now?", max_tokens="4")
    expect(one.page.locator("#alert")).to_be_hidden()
    assert one.page.locator("[aria-invalid=true]").count() == 0


def test_the_servers_own_refusal_names_the_field(visit: Visiting) -> None:
    """Guards against a page and a server that call the same field by different names."""
    one = visit()
    for name, value in (("temperature", "-1"), ("max_tokens", "0"), ("options", "nonsense=1"), ("seed", "-4")):
        before = one.page.input_value(f"#{name}")
        one.ask("Hello?", **{name: value})
        invalid = one.page.locator("[aria-invalid=true]").first.get_attribute("id")
        assert invalid == {"options": "method"}.get(name, name), one.page.inner_text("#alert")
        one.set(**{name: before})


def test_a_schema_is_kept_and_forces(visit: Visiting) -> None:
    """Guards against a schema that is not sent, is no JSON, or whose forced tokens are not seen."""
    one = visit()
    one.page.fill("#prompt", "Describe Ada as JSON.")
    one.set(response_format="{not JSON")
    one.page.press("#prompt", "Enter")
    expect(one.page.locator("#alert")).to_contain_text("not valid JSON")
    one.ask("Describe Ada as JSON.", response_format=json.dumps(SCHEMA), max_tokens="60", temperature="0")
    own, plain = one.answers()
    assert own == plain
    assert set(json.loads(own)) == {"first_name", "is_happy"}
    assert int(one.page.locator("#legend [data-origin=forced] b").inner_text()) > 0
    assert one.page.inner_text(".verdict .told").startswith("Equal")


def test_a_key_is_asked_for_where_there_is_one(visit: Visiting, real: Model) -> None:
    """Guards against a page that is of no use on a server with keys, and one that shows the field to everybody."""
    assert visit().page.locator("#key-field").is_hidden()
    with serving(real, api_keys=("secret",)) as guarded:
        one = visit(guarded.url)
        expect(one.page.locator("#alert")).to_contain_text("API key")
        one.page.fill("#key", "secret")
        one.page.press("#key", "Tab")
        expect(one.page.locator("#model")).to_contain_text("exact")
        one.ask("Hello?", max_tokens="4")
        assert one.page.inner_text(".verdict .told").startswith("Equal")
        assert "secret" not in one.page.evaluate("JSON.stringify({...localStorage, ...sessionStorage}) + location.href")


def test_a_server_that_was_away_when_the_page_came_is_asked_again(visit: Visiting, server: Served) -> None:
    """Guards against a page that needs a reload before it can name a method, and one that loses the question."""
    one = visit()
    one.page.route("**/v1/outpace/*", lambda route: route.fulfill(status=502))
    one.page.reload()
    expect(one.page.locator("#model")).to_have_text("not connected")
    one.page.fill("#prompt", "Hello?")
    one.page.press("#prompt", "Enter")
    expect(one.page.locator("#alert")).to_have_text("The server answered with status 502.")
    assert one.page.input_value("#prompt") == "Hello?"
    one.page.unroute_all()
    one.set(max_tokens="4")
    one.page.press("#prompt", "Enter")
    expect(one.page.locator(".verdict .told")).to_have_text(re.compile("^Equal"), timeout=60_000)


def test_what_is_typed_while_a_question_is_refused_is_kept(visit: Visiting) -> None:
    """Guards against the next message overwritten by the one that comes back."""
    one = visit()
    waiting: list[Route] = []
    one.page.route("**/v1/chat/completions", lambda route: waiting.append(route))
    with one.page.expect_request("**/v1/chat/completions"):
        one.page.fill("#prompt", "First?")
        one.page.press("#prompt", "Enter")
    one.page.fill("#prompt", "Second?")
    waiting[0].fulfill(status=503, json={"error": {"message": "the model is loading"}})
    one.settle()
    assert one.page.input_value("#prompt") == "First?\nSecond?"


def test_a_new_chat_while_an_answer_comes(visit: Visiting) -> None:
    """Guards against a turn of the conversation before that is sent along with the first one of a new conversation."""
    one = visit()
    bodies = bodies_of(one)
    one.set(max_tokens="400", temperature="0", race="both")
    one.page.fill("#prompt", QUESTION)
    one.page.press("#prompt", "Enter")
    expect(one.page.locator(".token").nth(5)).to_be_visible()
    one.page.click("#fresh")
    one.settle()
    one.ask("Hello.", max_tokens="4")
    assert bodies[-1]["messages"] == bodies[-2]["messages"] == [{"role": "user", "content": "Hello."}]
    expect(one.page.locator(".verdict .told")).to_have_text(re.compile("^Equal"))
    assert one.errors == []
