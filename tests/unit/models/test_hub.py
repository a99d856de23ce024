"""Models on the hub: how often it is asked, and what happens without it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

import outpace
from outpace.models.loading import registry
from outpace.models.loading.load import load_vocabulary_facts
from tests.unit.models.fake_hub import Hub, asked_instead
from tests.unit.models.tiny import save_tiny_model

NAME = "org/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, and an empty cache."""
    registry._snapshot.cache_clear()
    save_tiny_model(tmp_path / "served" / NAME)
    with Hub(tmp_path / "served") as server:
        asked_instead(server, monkeypatch, tmp_path / "hub")
        yield server
    registry._snapshot.cache_clear()


def test_the_hub_is_asked_once_for_each_file_and_not_at_all_for_weights_that_are_not_read(hub: Hub) -> None:
    """Guards against a request for each file at each of config, tokenizer and weights, and against gigabytes that are
    downloaded for a tokenizer."""
    facts = load_vocabulary_facts(NAME)
    assert facts[1] == 264
    assert not [line for line in hub.asked if "safetensors" in line]
    model = outpace.load(NAME, "plain", dtype="float32", device="cpu")
    for verb in ("HEAD", "GET"):
        files = [line for line in hub.asked if line.startswith(f"{verb} /{NAME}/resolve/")]
        assert len(files) == len(set(files)) == len(list((hub.folder / NAME).iterdir()))
    same = outpace.load(hub.folder / NAME, "plain", dtype="float32", device="cpu")
    answers = [one.generate([5, 9, 7], max_new_tokens=8).token_ids for one in (model, same)]
    assert answers[0] == answers[1]


def test_without_a_connection_what_was_downloaded_loads_at_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against 70 seconds of retries for files of a tokenizer that no model has."""
    outpace.load(NAME, "plain", dtype="float32", device="cpu")
    registry._snapshot.cache_clear()
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert outpace.load(NAME, "plain", dtype="float32", device="cpu").generate([5, 9, 7], max_new_tokens=2).token_ids
    assert not waits
