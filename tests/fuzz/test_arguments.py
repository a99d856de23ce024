"""Python arguments of every type at every door: answered as they should be, or refused by name in one line."""

import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outpace
from outpace.methods.catalog import methods, option_kinds
from tests.fuzz import right
from tests.fuzz.campaign import Tally, counts
from tests.fuzz.values import anything, said


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> outpace.Model:
    return outpace.load(checkpoint, dtype=torch.float32, device="cpu", max_num_seqs=np.int64(3))  # type: ignore[arg-type]


def finished(answer: Any) -> Any:
    """Ids of an answer, or of a stream, which is read to its end."""
    if isinstance(answer, outpace.Generation):
        return answer.token_ids
    return tuple(token for event in answer for token in event.tokens)


def asked(call: Any, *given: Any, **options: Any) -> Any:
    return finished(call(*given, **options))


def talked(model: outpace.Model, text: Any, system: Any = None, **options: Any) -> Any:
    with model.chat(system, **options) as chat:
        return finished(chat.send(text))


def under_grammar(model: outpace.Model, kind: str, value: Any) -> Any:
    grammar = getattr(outpace.Grammar, kind)(value)
    return model.generate("Hi", grammar=grammar, max_new_tokens=3).token_ids


def prompt_ids(call: Any, prompt: Any, **options: Any) -> list[int]:
    """Ids of a prompt, of several one after the other; of a stream, which does not tell, none."""
    answer = call(prompt, **options)
    if isinstance(answer, outpace.TokenStream):
        finished(answer)
        return []
    answers = answer if isinstance(answer, list) else [answer]
    return [token for one in answers for token in (one.prompt_ids if isinstance(one, outpace.Generation) else [one])]


@counts(150, 2500)
def test_options_of_requests(model: outpace.Model, cases: int) -> None:
    """Guards against an option of the wrong type that is answered, that ends in a traceback, or that costs another
    caller: a bystander's stream goes on throughout, and says what it would have said."""
    tally, rng = Tally("options of requests"), random.Random(2301)
    whole = model.generate("once", max_new_tokens=200, ignore_eos=True).token_ids
    stream, heard = model.stream("once", max_new_tokens=200, ignore_eos=True), list[int]()
    for case in range(cases):
        name, value = rng.choice(list(right.REQUEST)), anything(rng)
        is_right = right.REQUEST[name](value)
        options = {name: value, "max_new_tokens": right.TOKENS}
        if name == "params" and not is_right:
            options = {name: value}
        door, what = rng.randrange(3), f"{case}: {name}={said(value)}"
        call = [partial(asked, model.generate), partial(asked, model.stream), partial(talked, model)][door]
        may = name == "repetition_penalty" and is_right and not 1e-30 < value < 1e30  # may leave no finite score
        may |= name == "trace" and is_right  # which `generate` refuses
        answer = tally.attempt(what, partial(call, "Hi", **options), None if is_right else (name,), may)
        if answer is not None and is_right and door < 2 and not may:
            is_drawn = options.get("seed") is None and float(options.get("temperature", 0)) >= 1e-8
            others = {key: one for key, one in options.items() if key != "budget"}  # which is not for plain decoding
            plain = model.generate("Hi", **{**others, "method": "plain"}).token_ids
            if not is_drawn and answer != plain:
                tally.failures.append(f"unequal: {what}: {answer} and {plain}")
        event = next(stream, None) if case % 10 == 0 else None
        heard += event.tokens if event else ()
    stream.close()
    assert tuple(heard) == whole[: len(heard)]
    assert len(heard) > cases // 20 or len(heard) == len(whole)
    assert model.engine.is_idle
    tally.check()


def flat(value: Any) -> list[Any]:
    """Whatever is in a value, containers opened."""
    if isinstance(value, Mapping):
        return flat(value["input_ids"]) if "input_ids" in value else [value]
    found = right.items(value)
    return [value] if found is None else [one for item in found for one in flat(item)]


@counts(150, 2500)
def test_prompts(model: outpace.Model, cases: int) -> None:
    """Guards against a prompt of any other type whose name, keys or bytes are answered, and against ids on the way to
    the model that are not those that were given."""
    tally, rng = Tally("prompts"), random.Random(2302)
    for case in range(cases):
        value = anything(rng)
        call = rng.choice([model.generate, model.stream, model.encode])
        options = {} if call == model.encode else {"max_new_tokens": 2}
        what = f"{case}: prompt={said(value)}"

        found = tally.attempt(what, partial(prompt_ids, call, value, **options), None, may=True)
        inside = flat(value)
        is_told = any(isinstance(one, Mapping | bytes | bytearray | memoryview) or one is None for one in inside)
        if found and all(isinstance(one, str) for one in inside):
            wanted = [token for text in inside for token in model.codec.tokenizer(text)["input_ids"]]
            if found != wanted:
                tally.failures.append(f"unequal: {what}: {found}")
        elif found and not is_told and found != [int(one) for one in inside if not isinstance(one, str)]:
            tally.failures.append(f"unequal: {what}: {found}")
        elif found and any(isinstance(one, bool | float | complex | bytes | type(None)) for one in inside):
            tally.failures.append(f"a mistake that was answered: {what}: {found}")
    assert model.engine.is_idle
    tally.check()


@counts(100, 700)
def test_arguments_of_load(checkpoint: Path, cases: int) -> None:
    """Guards against `load` with an argument of the wrong type that ends in a traceback, minutes later maybe, or that
    is true because it is not empty."""
    tally, rng = Tally("arguments of load"), random.Random(2303)
    usual: dict[str, Any] = {"method": "plain", "dtype": "float32", "device": "cpu", "profile": False}
    usual["model"] = checkpoint
    for case in range(cases):
        name, value = rng.choice(list(right.LOAD)), anything(rng)
        if right.LOAD[name](value):
            continue  # right ones are in tests/unit/api
        options = usual | {name: value}
        names = (name, str(value)[:40], repr(str(value))[:40]) if right.is_path(value) else (name,)
        tally.attempt(f"{case}: {name}={said(value)}", partial(outpace.load, **options), names)
    tally.check()


@counts(100, 2000)
def test_arguments_of_other_doors(model: outpace.Model, cases: int) -> None:
    """Guards against the door of transformers, methods, grammars and conversations that trust what they are given."""
    tally, rng = Tally("arguments of other doors"), random.Random(2304)
    for case in range(cases):
        value, door = anything(rng), rng.randrange(5)
        what = f"{case}: {said(value)}"
        if door == 0:
            name = rng.choice(list(right.DOOR))
            names = None if right.DOOR[name](value) else (name,)
            tally.attempt(f"{what} as {name}", partial(outpace.custom_generate, **{name: value}), names)
        elif door == 1:
            method = rng.choice(list(methods()))
            for named in [rng.choice(list(part.model_fields)) for part in option_kinds(methods()[method].options)]:
                tally.attempt(what, partial(outpace.method, method, **{named: value}), None, may=True)
        elif door == 2:
            tally.attempt(what, partial(outpace.method, value), ("method",))
        elif door == 3:
            kind = rng.choice(("json_schema", "regex", "lark", "choice"))
            tally.attempt(f"{what} as {kind}", partial(under_grammar, model, kind, value), ("grammar",), may=True)
        else:
            is_right = right.is_text(value) or (isinstance(value, str) and not value)

            given = {"system": value, "text": "Hi"} if case % 2 else {"text": value}
            names = None if is_right else ("content",)
            if value is not None:
                talk = partial(talked, model, **given, max_new_tokens=2)
                tally.attempt(f"{what} as a message", talk, names, may=is_right)
    assert model.engine.is_idle
    tally.check()
