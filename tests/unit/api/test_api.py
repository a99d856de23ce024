"""The front door on a tiny model: forms of prompts, refusals and streams."""

from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.core.events import Generation
from outpace.core.params import SamplingParams
from outpace.core.protocols import Target
from outpace.core.tree import DraftTree
from outpace.engine import pricing
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import budget_with, parse_method
from tests.unit.models.tiny import save_tiny_model

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> outpace.Model:
    folder = save_tiny_model(tmp_path_factory.mktemp(request.param), family=request.param)
    return outpace.load(str(folder), dtype="float32", device="cpu", max_num_seqs=3)


def assert_nothing_runs(model: outpace.Model) -> None:
    """No request waits or runs, and every slot can be had."""
    assert model.engine.is_idle
    assert model.engine.free_slots == model.target.max_slots


def test_every_form_of_a_prompt_means_the_same_ids(model: outpace.Model) -> None:
    """Guards against a batch taken for one prompt of ids or vice versa, and against a template on plain text."""
    text, ids = "Hi there", model.encode("Hi there")
    rendered = "<user>Hi\n<assistant>"
    single = model.generate(text, max_new_tokens=5)
    assert isinstance(single, Generation)
    assert single.prompt_ids == tuple(ids)
    assert len(ids) == len(text), "the test's tokenizer has a token per byte"
    assert model.generate(ids, max_new_tokens=5).token_ids == single.token_ids
    assert model.generate(CHAT, max_new_tokens=5).prompt_ids == tuple(model.encode(rendered))
    batches: list[Any] = [[text, text], [ids, ids], [text, ids]]
    for batch in batches:
        both = model.generate(batch, max_new_tokens=5)
        assert [generation.token_ids for generation in both] == [single.token_ids] * 2
    chats = model.generate([CHAT, CHAT], max_new_tokens=5)
    assert [generation.prompt_ids for generation in chats] == [tuple(model.encode(rendered))] * 2
    assert isinstance(model.generate([text], max_new_tokens=5), list), "a list of one prompt is answered by a list"


def test_a_result_is_consistent_in_itself(model: outpace.Model) -> None:
    """Guards against text, ids and counts that belong to different tokens, and against the seed of the wrong sample."""
    generation = model.generate("abc", max_new_tokens=30, temperature=1.0, seed=8, n=3)
    assert len({sample.token_ids for sample in generation.samples}) == 3
    for sample in generation.samples:
        assert sample.text == model.codec.decode(sample.token_ids)
        assert sample.metrics.new_tokens == len(sample.token_ids)
        assert sample.metrics.prompt_tokens == 3
        assert sample.seed == 8
        assert sample.finish_reason == ("stop" if sample.token_ids[-1] == 0 else "length")
    assert generation.text == generation.samples[0].text


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"method": "guess"}, "method='guess': unknown; choose one of plain, lookup, recycle"),
        ({"method": "plain:budget=3"}, "budget=3: plain decoding drafts nothing"),
        ({"method": "plain", "budget": 3}, "budget=3: plain decoding drafts nothing"),
        ({"method": "lookup:budget=-1"}, "budget=-1: input should be greater than or equal to 0"),
        ({"budget": 512}, "budget=512: must be from 0 to 511"),
        ({"method": "recycle:budget=8", "budget": 3}, "budget=3 and method='recycle:budget=8' were both given"),
        ({"temprature": 1.0}, "temprature=1.0: unknown option, or not supported; options are"),
        ({"logit_bias": {5000: 1.0}}, "logit_bias: token id 5000 is outside the vocabulary"),
        ({"params": SamplingParams(), "temperature": 0.5}, "params and temperature were both given"),
    ],
)
def test_what_is_unknown_or_contradictory_is_refused_by_name(
    model: outpace.Model, options: dict[str, Any], complaint: str
) -> None:
    """Guards against an option that is dropped in silence, and one that leaves a request behind in the queue."""
    for call in (model.generate, model.stream):
        with pytest.raises(InvalidRequest, match=complaint):
            call("x", **options)
    assert model.engine.is_idle


def test_a_prompt_that_cannot_be_served_is_refused(model: outpace.Model) -> None:
    """Guards against an empty answer to an empty prompt, against prompts of types that happen to iterate, and against a
    trace that is recorded and lost."""
    prompts: list[Any] = ["", []]
    for empty in prompts:
        with pytest.raises(InvalidRequest, match="prompt is empty"):
            model.generate(empty)
    with pytest.raises(InvalidRequest, match="prompt of type float"):
        model.generate([[0.5, 1.5]])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="n=2: a stream carries one sample"):
        model.stream("x", n=2)
    for traced in ({"trace": True}, {"params": SamplingParams(trace=True)}):
        with pytest.raises(InvalidRequest, match="trace=True: generate returns no rounds; use stream, whose events"):
            model.generate("x", **traced)
    with pytest.raises(InvalidRequest, match=r"prompt=\['a', 'b'\]: this call takes one prompt"):
        model.stream(["a", "b"])  # type: ignore[arg-type]
    assert model.engine.is_idle


def test_a_refused_prompt_takes_its_batch_with_it(model: outpace.Model) -> None:
    """Guards against prompts before the bad one left in the queue, where they would slow down later calls unseen."""
    batch: list[Any] = ["good", "also good", [264]]
    with pytest.raises(InvalidRequest, match="token id 264 is outside the vocabulary"):
        model.generate(batch, max_new_tokens=50)
    assert_nothing_runs(model)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}, {"stop": "\ufffd"}], ids=str)
def test_a_stream_adds_up_to_what_generate_returns(model: outpace.Model, options: dict[str, Any]) -> None:
    """Guards against pieces lost, repeated or cut inside a character on their way through a stream."""
    whole = model.generate("Hi there", max_new_tokens=40, **options)
    stream = model.stream("Hi there", max_new_tokens=40, **options)
    events = list(stream)
    assert "".join(event.text for event in events) == whole.text
    assert tuple(token for event in events for token in event.tokens) == whole.token_ids
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [whole.finish_reason]
    assert stream.result is not None
    assert (stream.result.text, stream.result.finish_reason) == (whole.text, whole.finish_reason)


def test_the_keys_of_a_dictionary_are_a_batch(model: outpace.Model) -> None:
    """Guards against views of dictionaries refused as sets, which they pass for, though they have an order."""
    texts: Any = {"one": 1, "two": 2}
    found = [model.generate(prompts, max_new_tokens=3) for prompts in (texts.keys(), list(texts))]
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in found[1]]


@pytest.mark.parametrize("method", [5, object, ["recycle"]], ids=str)
def test_what_is_no_method_is_refused_before_the_model_is_read(method: Any) -> None:
    """Guards against minutes of loading for a mistake in an argument."""
    with pytest.raises(InvalidRequest, match=r"method=.*: give a name, outpace.method\(\.\.\.\) or an object"):
        outpace.load("/no/such/folder", method)


@pytest.mark.parametrize("method", ["recycle:budget=8", "recycle:as=paper", outpace.method("recycle", budget=8)])
def test_two_budgets_are_refused_before_the_model_is_read(method: Any) -> None:
    """Guards against a budget in a method's options that another one replaces without a word."""
    with pytest.raises(InvalidRequest, match=r"budget=3 and method='recycle:.*budget=.* were both given: leave one"):
        outpace.load("/no/such/folder", method, budget=3)
    with pytest.raises(InvalidRequest, match="were both given"):
        outpace.custom_generate(method=method, budget=3)


@pytest.mark.parametrize("method", ["outpace:priced=true", outpace.method("outpace", draft="none", priced=True)])
def test_a_budget_next_to_prices_is_refused(method: Any) -> None:
    """Guards against priced=true that a budget of the call switches off without a word. Together in a method's options
    the one bounds the other, and budget=0 drafts nothing either way."""
    with pytest.raises(InvalidRequest, match=r"budget=3 and method='outpace:.*maximum in the method: .*true,budget=3"):
        outpace.load("/no/such/folder", method, budget=3)
    found = [parse_method(f"outpace:{options}").takes_budget for options in ("priced=true", "priced=false", "depth=2")]
    assert found == [False, True, True]
    assert budget_with(method, 0) == 0


def test_a_budget_is_not_for_plain_decoding(tmp_path: Path) -> None:
    """Guards against a budget that is taken where nothing is drafted, also where nobody names the model's own method,
    as if it drafted; a budget of 0 is right there."""
    said = "budget=3: plain decoding drafts nothing"
    with pytest.raises(InvalidRequest, match=said):
        outpace.load("/no/such/folder", "plain", budget=3)
    with pytest.raises(InvalidRequest, match=said):
        outpace.custom_generate(method="plain", budget=3)
    model = outpace.load(str(save_tiny_model(tmp_path)), "plain", dtype="float32", device="cpu")
    with pytest.raises(InvalidRequest, match=said):
        model.generate("Hi", budget=3)
    assert len(model.generate("Hi", max_new_tokens=2, budget=0, ignore_eos=True).token_ids) == 2


def test_the_budget_of_load_is_for_its_method_however_it_is_spelled(tmp_path: Path) -> None:
    """Guards against a budget that is dropped because a request names the model's own method in other characters."""
    folder = save_tiny_model(tmp_path)
    model = outpace.load(str(folder), "recycle", budget=3, dtype="float32", device="cpu")
    for spelling in (None, "recycle", " recycle", outpace.method("recycle")):
        assert model.drafting(spelling, None)[1] == 3
    assert model.drafting("recycle:budget=5", None)[1] == 5
    assert model.drafting("recycle", 2)[1] == 2


def test_no_answer_includes_the_timing_of_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a first answer that seems slower than plain decoding: on a new machine half a second of timing
    passes, with a 4-bit 1.5B more than one, came after its first token and counted as its own. And against loads that
    time passes for a method that needs no prices."""
    passes, stock = list[int](), pricing._seconds

    def seconds(target: Target, slot: int, tree: DraftTree) -> float:
        passes.append(len(tree))
        return stock(target, slot, tree)

    monkeypatch.setattr(pricing, "_seconds", seconds)
    folder = str(save_tiny_model(tmp_path))
    model = outpace.load(folder, dtype="float32", device="cpu")
    at_load = len(passes)
    assert at_load
    slots = range(model.target.max_slots)
    assert [(model.target.kv.lengths[slot], model.target.memory.held(slot)) for slot in slots] == [(0, 0)] * len(slots)
    assert model.generate("Hi there", max_new_tokens=8, ignore_eos=True).metrics.steps
    options: dict[str, Any]
    for options in ({"method": "plain"}, {"method": "recycle"}, {"budget": 3}):
        outpace.load(folder, dtype="float32", device="cpu", **options)
    assert len(passes) == at_load


def test_no_answer_includes_it_where_a_request_names_the_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against the same in the first answer of a method that the model was not loaded with, as where a program
    compares methods of one model."""
    were_idle, stock = list[bool](), pricing._seconds

    def seconds(target: Target, slot: int, tree: DraftTree) -> float:
        were_idle.append(loaded.engine.is_idle)
        return stock(target, slot, tree)

    monkeypatch.setattr(pricing, "_seconds", seconds)
    loaded = outpace.load(str(save_tiny_model(tmp_path)), "plain", dtype="float32", device="cpu", max_num_seqs=1)
    options: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
    with loaded.stream("Hi", **options) as stream:
        next(stream)
        loaded.drafting("outpace", None)  # with all slots taken
    assert not were_idle
    assert loaded.generate("Hi there", method="outpace", **options).metrics.steps
    assert were_idle
    assert all(were_idle)
