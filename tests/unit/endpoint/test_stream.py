"""Server-sent events: bytes to the data of events."""

from outpace.endpoint.client import events

TALK = (
    'data: {"text": "a\u2028b\x85ö"}\r\n\r\n: a comment\nevent: chunk\ndata:first\ndata: second\n\n\n\ndata: [DONE]\n\n'
)
SAID = ['{"text": "a\u2028b\x85ö"}', "first\nsecond", "[DONE]"]


def test_events_do_not_depend_on_where_the_network_cuts() -> None:
    """Guards against characters and lines that are lost where a packet ends, and lines that end at U+2028."""
    content = TALK.encode()
    for size in range(1, len(content) + 1):
        chunks = [content[start : start + size] for start in range(0, len(content), size)]
        assert list(events(chunks)) == SAID, size


def test_half_an_event_is_none() -> None:
    """Guards against half a chunk taken for a whole one where a server breaks off."""
    assert list(events([b"data: whole\n\ndata: ha"])) == ["whole"]
