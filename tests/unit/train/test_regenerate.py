"""Regenerated answers: the target's own, whatever the batch, the order and the interruptions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.core.params import SamplingParams
from outpace.data.answers import AnswerStore, read_answers
from outpace.data.workload import WorkItem
from outpace.drafters.training.settings import RegenerateSettings
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.train import answers as module
from outpace.train.answers import EngineAnswerer, check_made, regenerate, seed_of
from outpace.train.data import training_samples

ITEMS = [
    WorkItem("one", "d", ("Hi.",)),
    WorkItem("talk", "d", ("First?", "And then?", "So?")),
    WorkItem("raw", "d", ("def f(",), raw=True),
    WorkItem("long", "d", ("word " * 20,)),
]
PARAMS = SamplingParams(max_new_tokens=9, temperature=0.9, seed=4)
ABOUT = {"vocab_size": 264}


def model_of(folder: str, slots: int = 3) -> outpace.Model:
    return outpace.load(folder, "plain", dtype="float32", device="cpu", max_num_seqs=slots)


@pytest.mark.parametrize(
    ("slots", "method", "step"), [(3, "plain", 1), (1, "plain", -1), (4, "lookup", -1), (2, "recycle", -1)]
)
def test_answers_are_those_of_the_target(folder: str, slots: int, method: str, step: int, tmp_path: Path) -> None:
    """Guards against answers to another prompt, of another seed, or to a conversation that lost its turns; and against
    answers that depend on their neighbours or order, so that a resumed run would not be the whole one."""
    model, store = model_of(folder, slots), AnswerStore(tmp_path, ABOUT)
    made = {one.id: one for one in regenerate(ITEMS[::step], store, EngineAnswerer(model, PARAMS, method))}
    assert {one.id: one for one in read_answers(tmp_path)} == made
    for item in ITEMS:
        texts: list[str] = []
        for turn, answer in enumerate(made[item.id].answers):
            options: dict[str, Any] = {"max_new_tokens": 9, "temperature": 0.9, "seed": seed_of(4, item.id, turn)}
            expected = model.generate(item.prompt(turn, texts), **options)
            assert answer == expected.token_ids
            texts.append(expected.text)
        assert len(texts) == len(item.turns)


def test_an_interrupted_run_loses_nothing(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against answers made and not stored when a run stops, and against answering them again."""
    monkeypatch.setattr(module, "PART", 2)
    model, store = model_of(folder, 1), AnswerStore(tmp_path, ABOUT)
    run = regenerate(ITEMS, store, EngineAnswerer(model, PARAMS))
    first = [next(run) for _ in range(3)]
    run.close()
    assert list(read_answers(tmp_path)) == first
    assert model.engine.is_idle, "what was under way is cancelled, and its slot free"
    rest = list(regenerate(ITEMS, AnswerStore(tmp_path, ABOUT), EngineAnswerer(model, PARAMS)))
    assert {one.id for one in first + rest} == {item.id for item in ITEMS}
    assert len(rest) == 1


def test_a_killed_run_loses_minutes(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against 256 slow answers that only memory holds."""
    monkeypatch.setattr(module, "PART_SECONDS", 0.0)
    run = regenerate(ITEMS, AnswerStore(tmp_path, ABOUT), EngineAnswerer(model_of(folder, 1), PARAMS))
    first = [next(run) for _ in range(2)]
    assert list(read_answers(tmp_path)) == first, "before the run is closed"


def test_a_budget_that_is_named_is_kept(folder: str) -> None:
    """Guards against `--method lookup:budget=3` whose budget follows prices, as one that is left open does."""
    model = model_of(folder)
    for method, follows in (("lookup", True), ("lookup:budget=3", False)):
        session = EngineAnswerer(model, PARAMS, method)._ask(ITEMS[0], [])
        assert session is not None
        assert session.is_sized == follows
        model.engine.cancel(session)


def test_prompts_without_room_are_named(folder: str, tmp_path: Path) -> None:
    """Guards against prompts that vanish, answers cut by the context, and turns lost with the one that did not fit."""
    model = outpace.load(folder, "plain", dtype="float32", device="cpu", max_model_len=110)
    answerer = EngineAnswerer(model, PARAMS)
    items = [*ITEMS, WorkItem("grows", "d", ("Hi.", "word " * 15))]
    made = {one.id: one for one in regenerate(items, AnswerStore(tmp_path, ABOUT), answerer)}
    assert "exceed 110" in answerer.cut["long"]
    assert "long" not in made
    assert answerer.cut["grows"].startswith("turn 2")
    assert len(made["grows"].answers) == 1
    with pytest.raises(ModelError, match=r"every prompt is left out, such as 'long': turn 1: .* exceed 110"):
        list(regenerate(ITEMS[3:], AnswerStore(tmp_path / "none", ABOUT), EngineAnswerer(model, PARAMS)))


def test_settings_of_answers_that_are_there(tmp_path: Path) -> None:
    """Guards against `regenerate.max_new_tokens=12` next to answers of 9 tokens, which was ignored; and against a
    refusal of what they were made with, of defaults, or of a batch size."""
    AnswerStore(tmp_path, ABOUT | {"sampling": {"max_new_tokens": 9, "temperature": 0.9, "seed": 4}})
    for how in (RegenerateSettings(), RegenerateSettings(max_new_tokens=9, seed=4, batch_size=2)):
        check_made(str(tmp_path), how)
    with pytest.raises(InvalidRequest, match=r"regenerate\.max_new_tokens=12: the answers in .* were made with 9;"):
        check_made(str(tmp_path), RegenerateSettings(max_new_tokens=12))


def test_answers_to_another_prompt_of_the_id_are_refused(folder: str, tmp_path: Path) -> None:
    """Guards against answers joined with wrong prompts, after lines without ids have moved in their file."""
    model = model_of(folder)
    list(regenerate(ITEMS, AnswerStore(tmp_path, ABOUT), EngineAnswerer(model, PARAMS)))
    moved = [replace(ITEMS[0], turns=("Ho.",)), *ITEMS[1:]]
    with pytest.raises(InvalidRequest, match="'one' was another prompt when it was answered"):
        list(regenerate(moved, AnswerStore(tmp_path, ABOUT), EngineAnswerer(model, PARAMS)))
    with pytest.raises(InvalidRequest, match="'one' was another prompt when it was answered"):
        list(training_samples(moved, read_answers(tmp_path), model.codec, 1000))
    unrecorded = [replace(one, prompt=0) for one in read_answers(tmp_path)]
    keys = [
        {one.name: one.key for one in training_samples(items, unrecorded, model.codec, longest)}
        for items, longest in ((ITEMS, 1000), (moved, 1000), (ITEMS, 40))
    ]
    assert keys[0].items() ^ keys[1].items() == {("one/0", which["one/0"]) for which in keys[:2]}
    assert len(keys[0]) == len(keys[1]) == 6
    assert keys[2].items() < keys[0].items(), "features of longer sequences serve"


def test_samples_are_what_the_target_saw(folder: str, tmp_path: Path) -> None:
    """Guards against a mask off by one, turns joined wrongly, and samples of which only the prompt is left."""
    model = model_of(folder)
    made = list(regenerate(ITEMS, AnswerStore(tmp_path, ABOUT), EngineAnswerer(model, PARAMS)))
    answers = {one.id: one.answers for one in made}
    for sample in training_samples(ITEMS, made, model.codec, 1000):
        name, _, turn = sample.name.partition("/")
        item = next(item for item in ITEMS if item.id == name)
        texts = [model.codec.decode(ids) for ids in answers[name][: int(turn)]]
        assert sample.ids[~sample.mask].tolist() == model.encode(item.prompt(int(turn), texts))
        assert tuple(sample.ids[sample.mask].tolist()) == answers[name][int(turn)]
    whole = {sample.name: len(sample.ids) for sample in training_samples(ITEMS, made, model.codec, 1000)}
    assert len(whole) == 6
    cut = {sample.name: len(sample.ids) for sample in training_samples(ITEMS, made, model.codec, 40)}
    assert all(cut[name] == min(whole[name], 40) for name in cut)
    assert "long/0" not in cut
    with pytest.raises(InvalidRequest, match=r"no prompt '(talk|long|raw)'"):
        list(training_samples(ITEMS[:1], made, model.codec, 1000))
