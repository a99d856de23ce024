"""Answers over HTTP: a real server in front of a tiny model, well-behaved and otherwise."""

import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest

import outpace
from outpace.core.params import SamplingParams
from outpace.data.answers import AnswerStore, read_answers
from outpace.data.workload import WorkItem
from outpace.endpoint import client
from outpace.lib.errors import ModelError
from outpace.models.tokenizer import TextCodec
from outpace.train.answers import EndpointAnswerer, EngineAnswerer, regenerate
from tests.unit.endpoint.fake import Reply, serving
from tests.unit.models.tiny import byte_tokenizer
from tests.unit.serve.served import serving as serving_ours

ITEMS = [
    WorkItem("one", "d", ("Hi.",)),
    WorkItem("talk", "d", ("First?", "And then?")),
    WorkItem("raw", "d", ("def f(",), raw=True),
]
PARAMS = SamplingParams(max_new_tokens=9, temperature=0.9, top_k=50, seed=4)
ABOUT = {"vocab_size": 264}


@pytest.fixture(scope="module")
def model(folder: str) -> outpace.Model:
    return outpace.load(folder, "plain", dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.0)


def honest(model: outpace.Model) -> Callable[[str, dict[str, Any]], Reply]:
    """A server of the model, as vLLM."""
    lock = Lock()

    def answer(path: str, body: dict[str, Any]) -> Reply:
        is_chat = path == "/v1/chat/completions"
        assert is_chat or path == "/v1/completions"
        names = {"max_tokens": "max_new_tokens", "temperature": "temperature", "top_k": "top_k", "seed": "seed"}
        options = {ours: body[theirs] for theirs, ours in names.items()}
        with lock:
            made = model.generate(body["messages" if is_chat else "prompt"], **options)
        choice: dict[str, Any] = {"finish_reason": made.finish_reason, "index": 0}
        choice |= {"message": {"role": "assistant", "content": made.text}} if is_chat else {"text": made.text}
        if body.get("return_token_ids"):
            choice["token_ids"] = list(made.token_ids)
        return Reply([{"object": "chat.completion", "choices": [choice]}])

    return answer


def answerer_of(url: str, model: outpace.Model, concurrency: int = 3) -> EndpointAnswerer:
    return EndpointAnswerer(url, "tiny", model.codec, model.target.eos_token_ids, PARAMS, concurrency)


def test_our_own_server_returns_ids(model: outpace.Model, tmp_path: Path) -> None:
    """Guards against options, turns or seeds that a request does not carry, and a server of ours that refuses one."""
    engine = AnswerStore(tmp_path / "engine", ABOUT)
    expected = {one.id: one for one in regenerate(ITEMS, engine, EngineAnswerer(model, PARAMS))}
    with serving_ours(model) as ours:
        answerer = answerer_of(f"{ours.url}/v1", model)
        made = {one.id: one for one in regenerate(ITEMS, AnswerStore(tmp_path / "http", ABOUT), answerer)}
    assert (made, answerer.cut, answerer.encoded) == (expected, {}, 0)


def test_a_server_adds_no_option_of_its_own(model: outpace.Model, tmp_path: Path) -> None:
    """Guards against answers with the truncation or the penalty of a model's generation_config.json, greedy ones too: a
    drafter would learn from another distribution than the target's, and the store would not say so."""
    with serving(honest(model)) as seen:
        list(regenerate(ITEMS[:1], AnswerStore(tmp_path, ABOUT), answerer_of(seen.url, model)))
    (body,) = seen.bodies
    assert body.items() >= {"top_k": 50, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}.items()


def test_text_is_encoded_where_there_are_no_ids(model: outpace.Model, tmp_path: Path) -> None:
    """Guards against answers without the EOS that ended them: a drafter would never learn to stop."""
    said = {"ends": ("hello", "stop"), "goes on": ("hello", "length")}

    def answer(path: str, body: dict[str, Any]) -> Reply:
        text, reason = said[body["messages"][0]["content"]]
        return Reply([{"choices": [{"message": {"content": text}, "finish_reason": reason}]}])

    items = [WorkItem(name, "d", (name,)) for name in said]
    with serving(answer) as seen:
        answerer = answerer_of(seen.url, model)
        made = {one.id: one.answers for one in regenerate(items, AnswerStore(tmp_path, ABOUT), answerer)}
    text = tuple(model.codec.encode("hello"))
    assert made == {"ends": ((*text, model.target.eos_token_ids[0]),), "goes on": (text,)}
    assert answerer.encoded == 2


def test_an_answer_ends_as_the_chat_template_ends_it(tmp_path: Path) -> None:
    """Guards against the end of a text behind an answer that ended a turn: Llama 3 and Gemma have an id for each, and a
    drafter would learn one that never comes. Phi 3 also names the id that begins an answer."""
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}<assistant!"
    codec, items = TextCodec(byte_tokenizer(template), "tiny"), [ITEMS[0], ITEMS[2]]
    (begins,) = codec.encode("!")
    reply = Reply([{"choices": [{"text": "hi", "finish_reason": "stop"}]}])
    with serving(lambda path, body: reply) as seen:
        answerer = EndpointAnswerer(seen.url, "tiny", codec, (7, begins, 0), PARAMS, concurrency=1)
        made = {one.id: one.answers for one in regenerate(items, AnswerStore(tmp_path, ABOUT), answerer)}
    text = tuple(codec.encode("hi"))
    assert made == {"one": ((*text, 0),), "raw": ((*text, 7),)}


def test_thoughts_are_a_part_of_answers(model: outpace.Model, tmp_path: Path) -> None:
    """Guards against a run that ends at a thought without an end, and later turns that training joins otherwise."""
    ids, asked = model.codec.encode("well"), list[Any]()

    def answer(path: str, body: dict[str, Any]) -> Reply:
        asked.append(body["messages"])
        message = {"content": None, "reasoning": "well"}
        return Reply([{"choices": [{"message": message, "finish_reason": "length", "token_ids": ids}]}])

    with serving(answer) as seen:
        (made,) = regenerate(ITEMS[1:2], AnswerStore(tmp_path, ABOUT), answerer_of(seen.url, model))
    assert made.answers == (tuple(ids), tuple(ids))
    assert asked[1][1] == {"role": "assistant", "content": "well"}


def test_a_server_that_stops_half_way_loses_nothing(model: outpace.Model, tmp_path: Path) -> None:
    """Guards against answers that are paid for and thrown away, and a run that cannot go on."""
    left = [1]
    answer = honest(model)

    def failing(path: str, body: dict[str, Any]) -> Reply:
        left[0] -= 1
        return answer(path, body) if left[0] >= 0 else Reply([b"overloaded"], 503)

    with serving(failing) as seen, pytest.raises(ModelError, match=r"HTTP 503.*same command again"):
        list(regenerate(ITEMS, AnswerStore(tmp_path, ABOUT), answerer_of(seen.url, model, 1)))
    stored = [one.id for one in read_answers(tmp_path)]
    assert stored == ["one"]
    with serving(answer) as seen:
        rest = list(regenerate(ITEMS, AnswerStore(tmp_path, ABOUT), answerer_of(seen.url, model)))
    assert {one.id for one in rest} == {"talk", "raw"}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply([{"error": "no such model"}], 404), r"HTTP 404: no such model; is this the base"),
        (Reply([{"error": "no option min_p"}], 400), r"every prompt .* 'one': turn 1: HTTP 400.*min_p"),
        (Reply([b"<html>welcome</html>"], 200), "no OpenAI-compatible answer.*welcome"),
        (Reply([{"choices": []}], 200), "no OpenAI-compatible answer"),
        (Reply([{"choices": [{"message": {"content": None}}]}], 200), "no OpenAI-compatible answer"),
        (Reply([["choices"]], 200), "no OpenAI-compatible answer"),
        (Reply([{"choices": [{"message": {"content": "4", "reasoning": "2 + 2"}}]}], 200), "without a reasoning"),
    ],
)
def test_other_answers_are_errors(reply: Reply, said: str, model: outpace.Model, tmp_path: Path) -> None:
    """Guards against a traceback, or an empty answer stored, where the address is not that of a model."""
    with serving(lambda path, body: reply) as seen, pytest.raises(ModelError, match=said):
        list(regenerate(ITEMS[:1], AnswerStore(tmp_path, ABOUT), answerer_of(seen.url, model)))


def test_one_refused_prompt_does_not_end_the_run(model: outpace.Model, tmp_path: Path) -> None:
    """Guards against a prompt too long for the server that ends every run, also the one that resumes."""
    answer = honest(model)

    def strict(path: str, body: dict[str, Any]) -> Reply:
        said = body["messages" if path.endswith("chat/completions") else "prompt"]
        is_late = isinstance(said, list) and len(said) > 1
        return Reply([{"error": "too long"}], 400) if said == "def f(" or is_late else answer(path, body)

    with serving(strict) as seen:
        answerer = answerer_of(seen.url, model)
        made = {one.id: one.answers for one in regenerate(ITEMS, AnswerStore(tmp_path, ABOUT), answerer)}
        again = answerer_of(seen.url, model)
        assert not list(regenerate(ITEMS, AnswerStore(tmp_path, ABOUT), again))
    assert again.cut.keys() == {"raw"}
    assert made.keys() == {"one", "talk"}
    assert len(made["talk"]) == 1
    assert answerer.cut.keys() == {"talk", "raw"}
    assert answerer.cut["talk"].startswith("turn 2: HTTP 400")


def test_an_error_does_not_wait_for_the_others(model: outpace.Model) -> None:
    """Guards against a run that goes on for minutes, turn by turn, after it has failed or was interrupted."""
    is_over, asked = Event(), list[str]()

    def answer(path: str, body: dict[str, Any]) -> Reply:
        asked.append(str(body.get("messages", body.get("prompt"))))
        if "First?" not in asked[-1]:
            return Reply([{"error": {"message": "no"}}], 401)
        is_over.wait(60)
        return Reply([{"choices": [{"finish_reason": "length", "message": {"content": "well"}}]}])

    with serving(answer) as seen:
        answerer = EndpointAnswerer(seen.url, "tiny", model.codec, (), PARAMS, concurrency=3)
        started = time.perf_counter()
        try:
            with pytest.raises(ModelError, match="API key"):
                list(answerer.answer([ITEMS[1], ITEMS[0]]))
            assert time.perf_counter() - started < 30
        finally:
            is_over.set()
        time.sleep(0.5)
    assert not any("And then?" in one for one in asked)
