"""The openai package, unchanged: sync, async, streams, tools, structured output; and an agent framework."""

import asyncio
import json
from typing import Any, Literal

import agents
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import decoders

from outpace.serve.requests import ChatRequest, Function
from outpace.serve.tool_calls import CallReader, call_grammar
from tests.unit.serve.served import NAME, Served

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is outside",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}


class Verdict(BaseModel):
    """What an answer is parsed into."""

    model_config = ConfigDict(extra="forbid")

    mood: Literal["good", "bad"]
    points: list[Literal[1, 2]] = Field(max_length=2)


def test_whole_and_streamed_answers_are_the_same_and_the_engines(served: Served) -> None:
    """Guards against a stream that loses, doubles or splits characters: the tiny model says bytes that are none."""
    said = served.model.generate([{"role": "user", "content": "Hi"}], max_new_tokens=60)
    assert "\ufffd" in said.text, "the test is about broken characters"
    whole = served.chat(max_tokens=60)
    chunks = served.chat(max_tokens=60, stream=True, stream_options={"include_usage": True})
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    usage = [chunk.usage for chunk in chunks if chunk.usage][-1]
    assert whole.choices[0].message.content == text == said.text
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason] == [said.finish_reason]
    assert usage == whole.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(said.prompt_ids), len(said.token_ids))


def test_samples_seeds_and_several_prompts(served: Served) -> None:
    """Guards against choices in the wrong order, samples that are alike, and a seed that is not kept."""
    with served.client(_strict_response_validation=False) as client:  # its type of chunks wants a finish reason in each
        body: Any = {"model": NAME, "prompt": ["one", "two"], "n": 2, "seed": 7, "max_tokens": 9}
        first, again = (client.completions.create(**body) for _ in range(2))
        chunks = list(client.completions.create(**body, stream=True))
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 4
    for index, prompt in enumerate(("one", "two")):
        samples = served.model.generate(prompt, max_new_tokens=9, n=2, seed=7, temperature=1.0).samples
        assert texts[2 * index : 2 * index + 2] == [sample.text for sample in samples]
    for index, text in enumerate(texts):
        pieces = [choice.text for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(pieces) == text
    assert first.usage is not None
    assert first.usage.prompt_tokens == 6, "each prompt is counted once"


def test_a_stop_string_ends_text_counts_and_log_probabilities_together(served: Served) -> None:
    """Guards against counts that pass a stop: a round of several tokens goes on behind it."""
    plain = served.model.generate([{"role": "user", "content": "Hi"}], max_new_tokens=40)
    stop = plain.text[10:12]
    ids = served.model.generate([{"role": "user", "content": "Hi"}], max_new_tokens=40, stop=(stop,)).token_ids
    answer = served.chat(max_tokens=40, stop=[stop], logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert choice.message.content == plain.text[: plain.text.index(stop)]
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == len(ids) == len(choice.logprobs.content)
    said = b"".join(bytes(one.bytes) for one in choice.logprobs.content)
    assert said.decode(errors="replace").startswith(choice.message.content)
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob >= one.logprob - 1e-6
               for one in choice.logprobs.content)  # fmt: skip


def test_log_probabilities_of_completions(served: Served) -> None:
    """Guards against clients that look a sampled token up among the likely ones and do not find it, and offsets that do
    not point at their tokens, whole and in pieces, behind characters of several tokens and behind special ones."""
    body: Any = {"model": NAME, "prompt": "abc", "max_tokens": 8, "logprobs": 1}
    with served.client(_strict_response_validation=False) as client:
        sampled = client.completions.create(**body, temperature=1.5, seed=1).choices[0].logprobs
        ask = body | {"extra_body": {"structured_outputs": {"choice": ["aé☃b"]}}}
        whole = client.completions.create(**ask).choices[0].logprobs
        parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**ask, stream=True)]
        eos = served.model.codec.tokenizer.eos_token_id
        ends = body | {"logit_bias": {str(eos): 100}, "extra_body": {"ignore_eos": True}}
        silent = client.completions.create(**ends).choices[0].logprobs
    for token, logprob, top in zip(sampled.tokens, sampled.token_logprobs, sampled.top_logprobs, strict=True):
        assert (top[token], len(top) <= 2) == (logprob, True)
        assert logprob <= 0
    assert any(len(top) == 2 for top in sampled.top_logprobs), "the likeliest alone show nothing"
    assert (whole.text_offset, whole.tokens[6]) == ([0, 1, 1, 2, 2, 2, 3, 4], "b")
    assert [at for part in parts for at in part.text_offset] == whole.text_offset
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [set(top) for part in parts for top in part.top_logprobs] == list(map(set, whole.top_logprobs))
    assert (silent.text_offset, len(set(silent.tokens))) == ([0] * 8, 1)


def test_a_completion_begins_with_its_space(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against "The capital isParis": decoders of SentencePiece's vocabularies drop the space of a first word;
    and against a stop string that begins with that space and is never found."""
    codec = served.model.codec
    backend, (space,) = codec.tokenizer.backend_tokenizer, codec.encode(" ")
    dropping = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    monkeypatch.setattr(backend, "decoder", dropping)
    ask: Any = {"model": NAME, "prompt": "x", "max_tokens": 3, "logit_bias": {str(space): 100}, "temperature": 0}
    with served.client(_strict_response_validation=False) as client:
        assert client.completions.create(**ask).choices[0].text == "   "
        chunks = client.completions.create(**ask, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "   "
        stopped = client.completions.create(**ask, stop="   ").choices[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop"), "the first space is part of what a stop string is"
    assert served.chat(max_tokens=3, logit_bias={str(space): 100}).choices[0].message.content == "  "


def test_every_option_reaches_the_engine(served: Served) -> None:
    """Guards against an option that is read and dropped: each answer is the engine's with the same option."""
    messages = [{"role": "user", "content": "Hi"}]
    common: Any = {"temperature": 1.3, "seed": 3}
    plain = served.model.generate(messages, max_new_tokens=40, **common)
    token = plain.token_ids[0]
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"presence_penalty": 2.0}, {"presence_penalty": 2.0}),
        ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
        ({"logit_bias": {str(token): -100}}, {"logit_bias": {token: -100}}),
        ({"top_p": 0.2}, {"top_p": 0.2}),
        ({"extra_body": {"top_k": 2}}, {"top_k": 2}),
        ({"extra_body": {"min_p": 0.9}}, {"min_p": 0.9}),
        ({"extra_body": {"repetition_penalty": 50.0}}, {"repetition_penalty": 50.0}),
        ({"extra_body": {"repetition_penalty": 50.0, "penalty_window": 30}},
         {"repetition_penalty": 50.0, "penalty_window": 30}),
        ({"extra_body": {"bad_words": [chr(97 + index) for index in range(26)]}},
         {"bad_words": [chr(97 + index) for index in range(26)]}),
        ({"extra_body": {"stop_token_ids": [token]}}, {"eos_token_ids": (0, token)}),
        ({"extra_body": {"stop_token_ids": [token], "ignore_eos": True}}, {"eos_token_ids": (token,)}),
        ({"max_completion_tokens": 5, "max_tokens": openai.omit}, {"max_new_tokens": 5}),
    ]  # fmt: skip
    for sent, own in cases:
        expected = served.model.generate(messages, **({"max_new_tokens": 40} | common | own)).text
        assert served.chat(**({"max_tokens": 40} | common | sent)).choices[0].message.content == expected, sent
        assert expected != plain.text, f"{own} changes nothing, so that the test shows nothing"


def test_what_speculation_did_is_reported_where_it_is_asked(served: Served) -> None:
    """Guards against a report of another answer's figures, or of plain decoding that claims drafts."""
    body: Any = {"outpace": {"report": True, "method": "recycle:budget=6,warm=none", "verification": "match"}}
    told = served.chat("hello hello hello", max_tokens=40, extra_body=body).choices[0].outpace
    assert told["method"] == "recycle:budget=6,warm=none", "a word, no file of the server"
    assert told["accepted"] == sum(told["accepted_per_depth"]) > 0
    assert sum(told["by_origin"].values()) == 40
    assert told["tokens_per_step"] == pytest.approx(39 / told["steps"])
    body["outpace"]["method"] = "plain"
    last = list(served.chat(max_tokens=9, stream=True, extra_body=body))[-1].choices[0].outpace
    assert (last["drafted"], last["tokens_per_step"], last["steps"]) == (0, 1.0, 8)
    assert getattr(served.chat().choices[0], "outpace", None) is None


def test_the_extensions_other_fields_reach_the_engine(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a budget, of a request or of the server's start, and a verification that are read and dropped."""
    wish = {"report": True, "method": "recycle"}
    few = served.chat("go go go", max_tokens=40, extra_body={"outpace": wish | {"budget": 1}}).choices[0].outpace
    assert 0 < few["drafted"] <= few["steps"]
    monkeypatch.setattr(served.model, "_budget", 1)
    few = served.chat("go go go", max_tokens=40, extra_body={"outpace": {"report": True}}).choices[0].outpace
    assert 0 < few["drafted"] <= few["steps"]
    how: Any = {"max_tokens": 40, "temperature": 1.0, "seed": 3}
    rules = [{"outpace": {"method": "plain", "verification": rule}} for rule in ("match", "rejection")]
    said = [served.chat(**how, extra_body=rule).choices[0].message.content for rule in rules]
    options: Any = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3, "method": "plain", "verification": "rejection"}
    own = served.model.generate([{"role": "user", "content": "Hi"}], **options)
    assert said[0] != said[1] == own.text


def test_ids_and_cached_tokens_are_reported(served: Served) -> None:
    """Guards against training on text that is split anew, and reuse that is counted once for each sample."""
    own = served.model.generate([{"role": "user", "content": "Hi"}], max_new_tokens=12)
    asked: Any = {"extra_body": {"return_token_ids": True}}
    assert served.chat(**asked).choices[0].token_ids == list(own.token_ids)
    chunks = [choice for chunk in served.chat(**asked, stream=True) for choice in chunk.choices]
    assert [one for choice in chunks for one in getattr(choice, "token_ids", ())] == list(own.token_ids)
    prompt = served.model.encode([{"role": "user", "content": "Hi"}])
    assert served.chat(**asked).prompt_token_ids == prompt
    named = [getattr(chunk, "prompt_token_ids", None) for chunk in served.chat(**asked, stream=True)]
    assert [ids for ids in named if ids] == [prompt]
    assert getattr(served.chat(), "prompt_token_ids", None) is None
    body: Any = {"model": NAME, "prompt": ["one", "two"], "n": 2, "max_tokens": 2, "return_token_ids": True}
    prompts = [served.model.encode(text) for text in ("one", "one", "two", "two")]
    choices = served.post(body, "/v1/completions").json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    lines = served.post(body | {"stream": True}, "/v1/completions").text.split("\n\n")
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == prompts
    usage = [served.chat("abc" * 30, n=2, temperature=1).usage for _ in range(2)][1]
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_the_model_list(served: Served) -> None:
    """Guards against clients that ask for the models first and find none."""
    with served.client() as client:
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).owned_by == "outpace"
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("gpt-9")
    assert caught.value.body["code"] == "model_not_found"  # type: ignore[index]


def test_structured_output_is_parsed_by_the_openai_package(served: Served) -> None:
    """Guards against answers that do not fit their schema, whole and streamed, and differ from plain's."""
    schema = Verdict.model_json_schema()
    with served.client() as client:
        ask: Any = {"model": NAME, "messages": [{"role": "user", "content": "?"}], "max_tokens": 60, "seed": 1}
        parsed = client.chat.completions.parse(**ask, response_format=Verdict).choices[0].message
        assert isinstance(parsed.parsed, Verdict)
        with client.chat.completions.stream(**ask, response_format=Verdict) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == parsed.parsed
        ask["extra_body"] = {"outpace": {"method": "plain"}}
        plain = client.chat.completions.parse(**ask, response_format=Verdict)
        assert plain.choices[0].message.content == parsed.content
        for outputs, fits in (
            ({"json": schema}, lambda text: Verdict.model_validate_json(text)),
            ({"choice": ["red", "green"]}, lambda text: text in ("red", "green")),
            ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdecimal()),
            ({"grammar": 'start: "a" "b"+ "c"'}, lambda text: text.startswith("ab") and text.endswith("bc")),
        ):
            wish = {"structured_outputs": outputs}
            answer = client.completions.create(model=NAME, prompt="x", max_tokens=60, seed=2, extra_body=wish)
            assert answer.choices[0].finish_reason == "length" or fits(answer.choices[0].text), outputs
            assert answer.choices[0].finish_reason == "stop" or "grammar" in outputs, outputs


def test_answers_of_the_openai_package_can_be_sent_back(served: Served) -> None:
    """Guards against a second turn that is refused: `parse` leaves what it parsed in its messages and their calls, and
    `stream` the index of each call, and the package sends all of it."""
    asked: Any = [{"role": "user", "content": "Hi"}]
    schema: Any = {"model": NAME, "messages": asked, "max_tokens": 60, "seed": 1, "response_format": Verdict}
    named: Any = {"type": "function", "function": {"name": "weather"}}
    strict: Any = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    call: Any = {"model": NAME, "messages": asked, "max_tokens": 150, "tools": [strict], "tool_choice": named}
    with served.client() as client:
        said: list[Any] = [client.chat.completions.parse(**ask).choices[0].message for ask in (schema, call)]
        with client.chat.completions.stream(**call) as stream:
            said.append(stream.get_final_completion().choices[0].message)
        assert said[0].parsed is not None
        assert all(one.tool_calls and one.tool_calls[0].function.parsed_arguments for one in said[1:])
        for one in said:
            client.chat.completions.create(model=NAME, messages=[*asked, one], max_tokens=1)


def test_tools_are_called_as_asked(served: Served) -> None:
    """Guards against calls that do not fit their function, by name, required, or one of several, and streamed ones."""
    tools = [WEATHER, TIME]
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        answer = served.chat(tools=tools, tool_choice=choice, max_tokens=150, parallel_tool_calls=False, seed=5)
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name in ("weather", "time") if choice == "required" else call.function.name == "weather"
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == ({"city", "days"} if call.function.name == "weather" else set())
    with served.client() as client, client.chat.completions.stream(
        model=NAME, messages=[{"role": "user", "content": "Hi"}], tools=tools, tool_choice=named, max_tokens=150,
        temperature=0,
    ) as stream:  # fmt: skip
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    assert final.finish_reason == "tool_calls"


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_calls_are_read_out_of_text(step: int) -> None:
    """Guards against text before or behind a call that is lost, marks cut by pieces that are shown, text within marks
    that is no call, and a call that is taken for text because it speaks of calls."""
    plain, speaking = (json.dumps({"a": value}) for value in (1, 'say "</tool_call>" and <tool_call>'))
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    text = f"Hi {call % ('f', plain)} x <tool_call>bad</tool_call> <too {call % ('g', speaking)} <tool_call>"
    reader, deltas = CallReader(), list[dict[str, Any]]()
    for start in range(0, len(text), step):
        deltas += reader.push(text[start : start + step])
        assert not any("<tool_" in delta.get("content", "").replace("<tool_call>b", "") for delta in deltas)
    deltas += reader.close()
    calls = [one for delta in deltas for one in delta.get("tool_calls", ())]
    named = [(one["index"], one["function"]["name"], one["function"]["arguments"]) for one in calls]
    assert named == [(0, "f", plain), (1, "g", speaking)]
    said = "".join(delta.get("content", "") for delta in deltas)
    assert said.split() == ["Hi", "x", "<tool_call>bad</tool_call>", "<too", "<tool_call>"]
    assert reader.has_called


@pytest.mark.parametrize("step", [1, 1000])
def test_a_text_may_speak_of_the_mark(step: int) -> None:
    """Guards against a stream that stands still behind a mark without a call, and a call after it that is lost."""
    reader, text = CallReader(), "Write <tool_call> first."
    deltas = [delta for start in range(0, len(text), step) for delta in reader.push(text[start : start + step])]
    assert "".join(delta["content"] for delta in deltas) == text
    (delta,) = reader.push('\n<tool_call>\n{"name": "f"}\n</tool_call>')
    assert delta["tool_calls"][0]["function"]["name"] == "f"


@pytest.mark.parametrize("step", [1, 1000])
def test_the_last_call_needs_no_closing_mark(step: int) -> None:
    """Guards against a call that is sent as text: vLLM reads one that the end of the answer closes. One
    that is not complete stays text, with all that comes before it."""
    for rest, is_call in (("}}\n", True), ("}}\n</tool_", False), ("}", False)):
        reader, text = CallReader(), 'Write <tool_call>: <tool_call>\n{"name": "f", "arguments": {"a": 1' + rest
        deltas = [delta for start in range(0, len(text), step) for delta in reader.push(text[start : start + step])]
        deltas += reader.close()
        said = "".join(delta.get("content", "") for delta in deltas)
        assert said == ("Write <tool_call>:" if is_call else text)
        assert [one["function"]["arguments"] for delta in deltas for one in delta.get("tool_calls", ())] == (
            ['{"a": 1}'] if is_call else []
        )
        assert reader.has_called == is_call


def test_a_mark_in_a_string_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an event loop that stands still: a string that repeats the closing mark was read anew up to each
    of them at each token, 2 s in all for 1,000 marks and a minute for 4,000."""
    seen = list[str]()

    def counted(text: str) -> bool:
        seen.append(text)
        return text.count('"') % 2 == 1

    monkeypatch.setattr("outpace.serve.tool_calls._is_in_string", counted)
    reader = CallReader()
    for call in range(2):
        assert not reader.push('<tool_call>{"name": "f", "arguments": {"a": "')
        assert not any(reader.push("</tool_call>") for _ in range(50))
        (delta,) = reader.push('"}}</tool_call>')
        assert json.loads(delta["tool_calls"][0]["function"]["arguments"]) == {"a": "</tool_call>" * 50}
        assert len(seen) == 51 * (call + 1)


@pytest.mark.parametrize("inside", ['{"name": "f", "parameters": {"a": 1}}', '{"name": "f", "a": 1}'])
def test_arguments_by_another_name_are_not_dropped(inside: str) -> None:
    """Guards against a tool that is called without the arguments that the model has written."""
    text = f"<tool_call>{inside}</tool_call>"
    assert CallReader().push(text) == [{"content": text}]


@pytest.mark.parametrize(
    ("value", "read"),
    [(r'"\ud83d!"', "\ufffd!"), (r'"\ud83d\ude00"', "😀"), ("NaN", None), ("1e999", None)],
)
def test_calls_that_the_model_writes_badly_can_be_sent(value: str, read: str | None) -> None:
    """Guards against a 500, or a stream that breaks off, for half a surrogate pair, and arguments that are no JSON."""
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'
    (delta,) = CallReader().push(text)
    assert json.dumps(delta, ensure_ascii=False).encode(), "it has no half of a pair"
    if read is None:
        assert delta == {"content": text}
    else:
        assert json.loads(delta["tool_calls"][0]["function"]["arguments"]) == {"a": read}


@pytest.mark.parametrize("name", ["get weather", "functions.weather", ""])
def test_calls_by_a_wrong_name_can_be_sent_back(name: str) -> None:
    """Guards against a conversation that the server ends with a 400 for its own answer: nothing keeps a model that
    writes freely from names that no tool can have, and clients send the call back with an error as its result."""
    (delta,) = CallReader().push(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>')
    call = {key: delta["tool_calls"][0][key] for key in ("id", "type", "function")}
    body = {"model": NAME, "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    (message,) = ChatRequest.model_validate_json(json.dumps(body)).rendered()
    assert message["tool_calls"][0]["function"] == {"name": name, "arguments": {}}


def test_arguments_of_calls_are_objects() -> None:
    """Guards against a grammar that makes what is then read as no call: schemas without a type allow any JSON."""
    functions = [Function(name="f", parameters={"properties": {"a": {"type": "integer"}}})]
    assert '"type": "object"' in call_grammar(functions, must_call=True, only_one=True).text


def test_tools_are_as_long_as_they_were_written() -> None:
    """Guards against 34,000 Chinese characters in the descriptions of tools that are over the limit of 200,000."""
    function = Function(name="f", parameters={"properties": {"a": {"description": "日本"}}})
    for must_call in (True, False):
        grammar = call_grammar([function], must_call, only_one=True, answer={"enum": ["東京"]})
        assert "日本" in grammar.text
        assert must_call or "東京" in grammar.text


def test_a_conversation_with_calls_is_encoded_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against agents whose long conversations are encoded anew for each check of the chat template."""
    kind, encoded = type(served.model.codec.tokenizer), list[str]()
    encode = kind.__call__

    def counted(self: Any, text: str, **options: Any) -> Any:
        encoded.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(kind, "__call__", counted)
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "Noon", "tool_call_id": "1"},
    ]
    with served.client() as client:
        client.chat.completions.create(model=NAME, messages=messages, tools=[TIME], max_tokens=2)
    (text,) = encoded
    assert "Tools: " in text
    assert "<tool_call>" in text.partition("When?")[2]


def test_an_agent_calls_a_tool_and_answers(served: Served) -> None:
    """Guards against an agent framework that does not get on with the server: its call, the tool's answer, its end."""
    asked: list[str] = []

    @agents.function_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """How it is outside."""
        asked.append(city)
        return f"Sunny in {city}"

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    agent = agents.Agent(
        name="Reporter",
        instructions="Answer with the weather.",
        tools=[weather],
        model=agents.OpenAIChatCompletionsModel(NAME, client),
        model_settings=agents.ModelSettings(
            tool_choice="required", parallel_tool_calls=False, max_tokens=120, temperature=0.0
        ),
    )
    result = asyncio.run(agents.Runner.run(agent, "Rome?", max_turns=4))
    assert asked in (["Rome"], ["Oslo"])
    assert [item.type for item in result.new_items][:2] == ["tool_call_item", "tool_call_output_item"]
    assert result.final_output
