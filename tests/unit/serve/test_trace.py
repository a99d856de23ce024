"""What a streamed answer tells of its tokens and rounds, where it is asked to."""

from typing import Any

import pytest

from outpace.core.events import StepEvent
from outpace.serve.answers import Trace
from tests.unit.serve.served import Served

ORIGINS = {"drafted", "retrieved", "matched", "forced", "bonus"}


class BytePieces:
    """A vocabulary in which each id is a byte, and 0 is special."""

    def shown(self, token: int) -> bytes:
        return bytes([token]) if token else b""

    def text_of(self, token: int) -> str:
        return f"byte {token}"


def step(tokens: bytes, text: str) -> StepEvent:
    return StepEvent(0, 0, tuple(tokens), text, None)


def texts(*events: StepEvent) -> list[list[str]]:
    trace = Trace(BytePieces())  # type: ignore[arg-type]
    return [[token["text"] for token in trace.describe(event)["tokens"]] for event in events]


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    """Guards against halves of characters that are shown twice, as question marks, or never."""
    word = "aéb€".encode()
    assert texts(step(word, "aéb€")) == [["a", "", "é", "b", "", "", "€"]]
    cut = texts(step(word[:2], "a"), step(word[2:5], "éb"), step(word[5:], "€"))
    assert cut == [["a", ""], ["é", "b", ""], ["", "€"]]


def test_what_is_held_back_for_a_stop_string_comes_later() -> None:
    """Guards against tokens whose text is not in the answer yet, or never will be."""
    assert texts(step(b"ab", "a"), step(b"cd", "bcd")) == [["a", ""], ["bc", "d"]]
    assert texts(step(b"ab\0", "a")) == [["a", "", ""]]


def test_text_that_no_bytes_explain_goes_to_the_last_token() -> None:
    """Guards against a chunk whose tokens say something else than the chunk, and errors on odd tokenizers."""
    assert texts(step(b"\xff\xfe", "��"), step(b"ab", "ab")) == [["", "��"], ["a", "b"]]


@pytest.mark.parametrize("method", ["outpace:draft=none,budget=8", "plain"])
def test_a_trace_is_of_the_answer(served: Served, method: str) -> None:
    """Guards against tokens, texts and rounds that are not those of the answer, and reports that count others."""
    wish = {"method": method, "trace": True, "report": True}
    chunks = served.chat("one two one two one two", stream=True, max_tokens=40, extra_body={"outpace": wish})
    plain = served.chat("one two one two one two", max_tokens=40)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    told: list[dict[str, Any]] = [choice.outpace for choice in choices if getattr(choice, "outpace", None)]
    report = next(one for one in told if "by_origin" in one)
    traced = [one for one in told if "tokens" in one]
    tokens = [token for one in traced for token in one["tokens"]]
    assert len(tokens) == 40
    assert [one["computed_by"].keys() for one in traced if "computed_by" in one] == [{"target"}], "in the first chunk"
    assert "".join(token["text"] for token in tokens) == plain.choices[0].message.content
    rounds = [one for about in traced for one in about["rounds"]]
    assert len(rounds) == report["steps"]
    for one in rounds:
        assert len(one["tokens"]) == len(one["ids"]) == len(one["parents"]) == len(one["origins"])
        assert one["path"][0] == 0
    counts = dict.fromkeys(ORIGINS, 0)
    for token in tokens:
        counts[token["origin"]] += 1
    assert counts == report["by_origin"]
    assert (counts["bonus"] < 40) == (method != "plain")
