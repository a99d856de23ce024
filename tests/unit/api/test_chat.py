"""Conversations: the answers of single requests, a history that can be trusted, turns that are computed once."""

from collections.abc import Sequence
from typing import Any

import pytest

import outpace
from outpace.lib.errors import InvalidRequest
from outpace.lib.quick import without_collection
from outpace.models.packed import PackedModel, PassPart
from tests.unit.api.test_api import assert_nothing_runs
from tests.unit.models.tiny import byte_tokenizer, save_tiny_model

LINES = ["Hello", "And then? " * 3, "é, 世"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[outpace.Model, outpace.Model]:
    """The same model twice, with a prefix cache and without."""
    folder = str(save_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024))
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 2}
    return outpace.load(folder, **options), outpace.load(folder, **options, enable_prefix_caching=False)


@pytest.fixture
def model(models: tuple[outpace.Model, outpace.Model]) -> outpace.Model:
    models[0].engine.forget_prefixes()
    return models[0]


def said(conversation: outpace.Chat, text: str) -> outpace.Sample:
    with conversation.send(text) as stream:
        pieces = [event.text for event in stream]
    assert stream.result is not None
    assert "".join(pieces) == stream.result.text
    return stream.result


@pytest.mark.parametrize("method", ["recycle:budget=8", "lookup", "plain", "linear:budget=4", "dynatree:budget=9"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_every_answer_is_that_of_the_whole_conversation(
    model: outpace.Model, models: tuple[outpace.Model, outpace.Model], method: str, options: dict[str, Any]
) -> None:
    """Guards against answers that depend on cached KV. The tiny model writes bytes that are no text."""
    options = {"max_new_tokens": 30, **options}
    with model.chat("Be brief.", method=method, **options) as conversation:
        reused = []
        for text in LINES:
            messages = [*conversation.messages, {"role": "user", "content": text}]
            fresh = models[1].generate(messages, method="plain", **options)
            sample = said(conversation, text)
            assert sample.token_ids == fresh.token_ids
            assert conversation.messages == [*messages, {"role": "assistant", "content": sample.text}]
            reused.append((sample.metrics.reused_tokens, len(fresh.prompt_ids)))
    assert reused[0][0] == 0
    opening = len(model.encode("<system>Be brief.\n<user>Hello\n<assistant>"))
    assert all(opening <= count < total for count, total in reused[1:])
    assert_nothing_runs(model)


def test_a_draft_models_kv_is_kept_too(model: outpace.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a draft model that reads the conversation again at every turn."""
    draft, rows, run = model.drafters.language_model(), list[int](), PackedModel.run_tapped

    def count(self: PackedModel, parts: Sequence[PassPart], taps: Any, captured: bool = True) -> Any:
        if self is draft:
            rows.append(sum(len(part.tokens) for part in parts))
        return run(self, parts, taps, captured)

    monkeypatch.setattr(PackedModel, "run_tapped", count)
    with model.chat(method="dynatree", max_new_tokens=8) as conversation:
        said(conversation, "Hello, a long first message. " * 8)
        rows.clear()
        second = said(conversation, "x")
        assert 0 < sum(rows) < second.metrics.prompt_tokens - second.metrics.reused_tokens + 8 * 20
        assert second.metrics.reused_tokens > 200
    assert_nothing_runs(model)


def test_retokenised_history_is_reused_up_to_where_it_differs(model: outpace.Model) -> None:
    """Guards against KV reused by length instead of by id: the text of an answer may encode to other ids."""
    with model.chat(max_new_tokens=40, temperature=2.0, seed=1) as conversation:
        first = said(conversation, "x")
        again = model.encode(first.text)
        agreed = next(place for place, ids in enumerate(zip(again, first.token_ids)) if ids[0] != ids[1])
        prompt = first.metrics.prompt_tokens
        assert said(conversation, "y").metrics.reused_tokens == prompt + agreed < prompt + len(first.token_ids) - 1


def test_reset_begins_anew_and_close_may_be_repeated(model: outpace.Model) -> None:
    """Guards against a conversation that remembers what it was asked to forget, and one that cannot go on."""
    conversation = model.chat("Be brief.", max_new_tokens=12)
    first = said(conversation, "Hi")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    again = said(conversation, "Hi")
    assert again.token_ids == first.token_ids
    assert again.metrics.reused_tokens == again.metrics.prompt_tokens - 1
    conversation.close()
    conversation.close()
    assert_nothing_runs(model)
    assert said(conversation, "Still there?").finish_reason in ("stop", "length")
    conversation.close()
    assert_nothing_runs(model)


def test_an_answer_stopped_early_is_part_of_the_conversation(model: outpace.Model) -> None:
    """Guards against a history without the half answer the user has read, and a slot lost with it."""
    with model.chat(max_new_tokens=200, eos_token_ids=()) as conversation:
        stream = conversation.send("Hi")
        for _ in range(5):
            next(stream)
        stream.stop()
        events = list(stream)
        assert events[-1].finish_reason == "cancelled"
        assert stream.result is not None
        assert conversation.messages[-1] == {"role": "assistant", "content": stream.result.text}
        second = conversation.send("Go on")
        next(second)
        third = conversation.send("Never mind")  # closes the answer before
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
        next(third)
        third.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        assert len(conversation.messages) == 6
        assert third.result is not None
        assert third.result.metrics.reused_tokens > 0
    assert_nothing_runs(model)


def test_an_answer_that_is_dropped_ends(model: outpace.Model) -> None:
    """Guards against an answer that runs on because the conversation holds it."""
    with without_collection():
        conversation = model.chat(max_new_tokens=500, eos_token_ids=())
        next(conversation.send("Hi"))
        model.generate("x", max_new_tokens=2)
        assert model.engine.is_idle
        assert said(conversation, "Go on").metrics.reused_tokens > 0
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
        stream = conversation.send("And?")
        next(stream)
        del conversation, stream
        assert_nothing_runs(model)


def test_a_full_context_is_refused_and_the_conversation_goes_on(model: outpace.Model) -> None:
    """Guards against a conversation that can neither go on nor be reset once it has filled the context."""
    with model.chat(max_new_tokens=5) as conversation:
        said(conversation, "Hi")
        before = list(conversation.messages)
        with pytest.raises(InvalidRequest, match=r"limit is 1024: begin a new one with reset\(\), in the terminal /re"):
            conversation.send("long " * 400)
        assert conversation.messages == before
        assert said(conversation, "short").metrics.reused_tokens > 0
        conversation.reset()
        said(conversation, "anew")


def test_what_cannot_be_a_conversation_is_refused_at_once(
    model: outpace.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a prompt that invites the user to type before it turns out that the model cannot chat."""
    with pytest.raises(InvalidRequest, match="n=2: a conversation carries one sample"):
        model.chat(n=2)
    with pytest.raises(InvalidRequest, match="temprature=1: unknown option"):
        model.chat(temprature=1)
    monkeypatch.setattr(model.codec, "tokenizer", byte_tokenizer(chat_template=None))
    with pytest.raises(InvalidRequest, match="has no chat template"):
        model.chat()
