"""Outpace inside transformers' `generate`: the same answers, the same shapes, and a model left as it was."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import outpace
from outpace.core.events import RequestMetrics
from outpace.core.params import SamplingParams
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.lib.errors import InvalidRequest, NonFiniteLogits
from outpace.models.layers.linear import can_pack
from outpace.plugins.transformers import BatchRow, BatchRows
from outpace.trees.proposer import EmptyDraft
from tests.pairwise import covering
from tests.unit.engine.doubles import PROMPT, PoisonedTarget
from tests.unit.engine.doubles import VOCAB as TOY_VOCAB
from tests.unit.models.tiny import FAMILIES, VOCAB, random_ids, save_tiny_model, stock_model, tiny_config

PAD = 5
METHODS = ["plain", "lookup:budget=3", "recycle:budget=12"]
WITH_DRAFTER = ["linear:budget=3", "fixed:depth=3,budget=9", "dynatree:budget=9", "outpace:draft=linear,budget=9"]
LENGTHS = (9, 4, 17)


def model_of(family: str) -> PreTrainedModel:
    # Stock scaled-dot-product attention leaves out Gemma 2's cap on scores; the door refuses it.
    return stock_model(tiny_config(family), "eager" if family == "gemma2" else "sdpa")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """For what no family does otherwise."""
    return model_of("llama")


def padded(lengths: Sequence[int] = LENGTHS, first_seed: int = 0) -> dict[str, Tensor]:
    """Random prompts as a tokenizer with left padding returns them."""
    width = max(lengths)
    rows = [random_ids(length, first_seed + index) for index, length in enumerate(lengths)]
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: PreTrainedModel, inputs: dict[str, Tensor], method: str | None = None, **options: Any) -> Any:
    """Stock `generate`, or ours through the same door."""
    if method is not None:
        ours = {name: options.pop(name) for name in ("seed", "budget", "pack") if name in options}
        options["custom_generate"] = outpace.custom_generate(method=method, **ours)
    options = {"max_new_tokens": 24, "pad_token_id": PAD} | options
    return model.generate(**inputs, **options)  # type: ignore[operator]


def some_eos(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[int]:
    """Two ids with which rows of the stock answer end at different places."""
    new = generate(model, inputs)[:, inputs["input_ids"].shape[1] :]
    return [int(new[0, 5]), int(new[1, 11])]


Asked = tuple[dict[str, Tensor], dict[str, Any], Tensor]
"""Prompts, options, and what stock `generate` says."""


@cache
def stock(family: str) -> tuple[PreTrainedModel, list[Asked]]:
    """A model and its greedy answers: without an end, with two and with one, without a mask, and up to a length."""
    model, inputs = model_of(family), padded()
    ends, single = some_eos(model, inputs), {"input_ids": inputs["input_ids"][2:]}
    asked: list[tuple[dict[str, Tensor], dict[str, Any]]] = [
        (inputs, {}), (inputs, {"eos_token_id": ends}), (inputs, {"eos_token_id": ends[0]}), (single, {}),
        (inputs, {"max_new_tokens": None, "max_length": 20}),
    ]  # fmt: skip
    return model, [(given, options, generate(model, given, **options)) for given, options in asked]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_are_those_of_stock_generate(family: str, method: str, pack: bool) -> None:
    """Guards against wrong positions under left padding, and rows that are cut or filled otherwise."""
    model, asked = stock(family)
    for inputs, options, expected in asked:
        actual = generate(model, inputs, method, pack=pack, **options)
        assert torch.equal(actual, expected), (inputs.keys(), options)
        assert (actual.dtype, actual.is_inference()) == (torch.int64, False)


def test_drafts_are_accepted(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a door that returns the right ids because it never drafts."""
    metrics: list[RequestMetrics] = []
    cancel = Engine.cancel

    def listening(self: Engine, session: Session) -> None:
        metrics.append(session.metrics)
        cancel(self, session)

    monkeypatch.setattr(Engine, "cancel", listening)
    generate(model, padded(), "recycle:budget=12", max_new_tokens=40)
    assert sum(each.accepted for each in metrics) > 0


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 0, "renormalize_logits": True},
]


@pytest.mark.parametrize("options", SAMPLED, ids=str)
def test_sampled_ids_are_those_of_plain_decoding(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Guards against a warper lost on the way, and against methods that draw other tokens."""
    inputs = padded()
    options = {"do_sample": True, "seed": 3, **options}
    plain = generate(model, inputs, "plain", **options)
    for method in METHODS[1:]:
        assert torch.equal(generate(model, inputs, method, **options), plain)
    assert not torch.equal(plain, generate(model, inputs, "plain", **options | {"seed": 4}))
    assert not torch.equal(plain, generate(model, inputs))


def test_sampling_is_that_of_a_loaded_model(tmp_path: Path) -> None:
    """Guards against two doors that mean different things by the same options."""
    save_tiny_model(tmp_path, vocab_size=VOCAB)
    loaded = outpace.load(str(tmp_path), dtype="float32", device="cpu")
    inputs = padded()
    model = stock_model(tiny_config("llama", max_position_embeddings=256))
    new = generate(model, inputs, "recycle", do_sample=True, temperature=0.8, top_k=20, seed=9)[:, max(LENGTHS) :]
    for row, length in enumerate(LENGTHS):
        prompt = inputs["input_ids"][row, -length:].tolist()
        options: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "seed": 9, "max_new_tokens": 24}
        answer = loaded.generate(prompt, method="plain", eos_token_ids=(), **options)
        assert answer.token_ids == tuple(new[row].tolist())


def test_a_seed_comes_from_torch_unless_it_is_given(model: PreTrainedModel) -> None:
    """Guards against answers that `torch.manual_seed` does not reproduce, and against greedy calls that use it up."""
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        generate(model, padded(), "plain")
        drawn.append(generate(model, padded(), "recycle", do_sample=True))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("seed", [None, 3])
def test_equal_prompts_are_different_samples(model: PreTrainedModel, seed: int | None) -> None:
    """Guards against n copies of one answer, from num_return_sequences or from prompts repeated by hand."""
    inputs = padded()
    samples = generate(model, inputs, "recycle", do_sample=True, seed=seed, num_return_sequences=3, temperature=1.5)
    assert samples.shape == (9, max(LENGTHS) + 24)
    assert len({tuple(row.tolist()) for row in samples}) == 9
    assert torch.equal(samples[:, : max(LENGTHS)], inputs["input_ids"].repeat_interleave(3, dim=0))
    repeated = {name: tensor[[0, 1, 0]] for name, tensor in inputs.items()}
    first, _, again = generate(model, repeated, "plain", do_sample=True, seed=seed, temperature=1.5)
    assert not torch.equal(first, again)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[list[Any]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_hears_what_stock_generate_tells_it(model: PreTrainedModel) -> None:
    """Guards against a streamer that waits for ever: transformers does not pass it on to a callable by itself."""
    inputs = padded()
    eos = some_eos(model, inputs)
    for batch in (inputs, padded(LENGTHS[:1])):
        stock, ours = Recorder(), Recorder()
        generate(model, batch, streamer=stock, eos_token_id=eos)
        generate(model, batch, "recycle:budget=12", streamer=ours, eos_token_id=eos)
        assert ours.puts == stock.puts
        assert (ours.ended, stock.ended) == (1, 1)


@pytest.mark.parametrize("pad", [PAD, None])
def test_a_row_that_fails_ends_the_call(pad: int | None) -> None:
    """Guards against rows that are decoded to their end for nothing or, without an EOS, wait forever."""
    target = PoisonedTarget(PROMPT[0], len(PROMPT) + 1, float("nan"), vocab_size=TOY_VOCAB, seed=13, max_slots=2)
    engine, prompts = Engine(target), (PROMPT, [9, 9])
    sessions = [engine.add(prompt, SamplingParams(max_new_tokens=10), EmptyDraft())[0] for prompt in prompts]
    rows = [BatchRow(one, torch.tensor(prompt), ()) for one, prompt in zip(sessions, prompts, strict=True)]
    with pytest.raises(NonFiniteLogits):
        BatchRows(rows, pad, None).decode(engine)
    assert len(sessions[1].generated) < 10


def test_a_dictionary_is_returned_on_request(model: PreTrainedModel) -> None:
    """Guards against a tensor where code written for transformers looks for `.sequences`."""
    stock, ours = (generate(model, padded(), method, return_dict_in_generate=True) for method in (None, "recycle"))
    assert type(ours) is type(stock)
    assert torch.equal(ours.sequences, stock.sequences)


def fingerprint(model: PreTrainedModel) -> list[Any]:
    """Everything that makes up a model object: modules, their attributes, tensors and settings."""
    modules = [
        (name, id(module), type(module), module.training, sorted(vars(module)))
        for name, module in model.named_modules()
    ]
    tensors = [(name, id(tensor), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()]
    return [modules, tensors, model.config.to_dict(), model.config._attn_implementation]


@pytest.mark.parametrize("pack", [False, True])
def test_the_model_is_left_as_it_was(pack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against layers, attention or modes changed in a model that is not ours, on errors too."""
    model, inputs = stock_model(tiny_config("qwen2"), "eager"), padded()
    model.train()
    before, logits = fingerprint(model), model(**inputs).logits
    generate(model, inputs, "recycle", pack=pack)
    assert fingerprint(model) == before
    seen: list[Tensor] = []
    step = Engine.step

    def failing(self: Engine) -> None:
        step(self)
        seen.append(model(**inputs).logits)  # the user's own forward, in the middle of ours
        raise RuntimeError("planted")

    monkeypatch.setattr(Engine, "step", failing)
    with pytest.raises(RuntimeError, match="planted"):
        generate(model, inputs, "recycle", pack=pack)
    assert fingerprint(model) == before
    assert torch.equal(seen[0], logits)
    model(**inputs).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_changed_between_calls_are_seen() -> None:
    """Guards against answers from before the last training step, packed or not, in place or exchanged."""
    model, inputs = stock_model(tiny_config("llama"), "sdpa"), padded()
    doors = [outpace.custom_generate(pack=pack) for pack in (False, True)]
    answers = []
    for change in range(4):
        with torch.no_grad():
            if change == 1:
                model.lm_head.weight.mul_(-0.7)  # type: ignore[operator, union-attr]
            elif change == 2:
                head: Any = model.get_output_embeddings()
                head.weight = torch.nn.Parameter(head.weight.roll(3, 0))
            elif change == 3:
                model.to(torch.float64)  # type: ignore[arg-type]
        answers.append(generate(model, inputs))
        for door in doors:
            assert torch.equal(generate(model, inputs, custom_generate=door), answers[-1])
    assert not torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[1], answers[2])


@pytest.mark.parametrize(
    ("method", "family", "own_drafter"), covering(list(product(WITH_DRAFTER, FAMILIES, [False, True])))
)
def test_draft_models(method: str, family: str, own_drafter: bool) -> None:
    """Guards against a door without the methods that need a draft model, and against a drafter that is changed."""
    model = model_of(family)
    drafter = stock_model(tiny_config("llama", num_hidden_layers=1)) if own_drafter else None
    weights = {name: weight.clone() for name, weight in drafter.named_parameters()} if drafter else {}
    ways: list[dict[str, Any]] = [{}, {"do_sample": True, "temperature": 0.8}]
    for options in ways:
        door = outpace.custom_generate(method=method, drafter=drafter, seed=4)
        ours = generate(model, padded(), max_new_tokens=16, custom_generate=door, **options)
        assert torch.equal(ours, generate(model, padded(), "plain", seed=4, max_new_tokens=16, **options))
    if drafter:
        assert all(torch.equal(weight, weights[name]) for name, weight in drafter.named_parameters())
        with pytest.raises(InvalidRequest, match="method 'recycle' uses no draft model"):
            outpace.custom_generate(method="recycle", drafter=drafter)


def test_what_a_method_learned_is_kept_between_calls(model: PreTrainedModel) -> None:
    """Guards against a transition matrix that starts empty at every call."""
    door = outpace.custom_generate(method="recycle:budget=8")
    for _ in range(2):
        generate(model, padded(), custom_generate=door)
    (proposer,) = door._proposers.values()
    assert int((proposer.source.matrix.successors != 0).any(dim=1).sum()) > 20  # type: ignore[attr-defined]


def test_this_machine_tests_packing() -> None:
    """Guards against tests of `pack` that compare a thing with itself."""
    if torch.backends.mkldnn.is_available():
        assert can_pack(torch.float32, torch.device("cpu"))
