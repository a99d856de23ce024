"""What is found of a method: on tiny models with drafters that nobody trained, and on figures that are made up."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.data.workload import read_workload
from outpace.doctor import method
from outpace.doctor.finding import Finding
from outpace.doctor.method import Comparison, DrafterFacts, compare, drafter, drafter_of, examine_method
from outpace.doctor.model import examine_model
from outpace.drafters.domino.net import DominoConfig, DominoNet
from outpace.drafters.kinds import write_net
from tests.unit.drafters.source.learned import BLOCK, random_net
from tests.unit.methods.test_trained_drafters import HEAD, OURS
from tests.unit.models.tiny import byte_tokenizer, save_tiny_model

PHASES_MS = {"draft_ms": 1.0, "forward_ms": 8.0, "verify_ms": 0.4, "commit_ms": 0.2, "observe_ms": 0.2}
PLAIN = dict.fromkeys(PHASES_MS, 0.0) | {"forward_ms": 7.5, "round_ms": 8.0, "tokens_per_step": 1.0, "rounds": 100}
DRAFTED: dict[str, Any] = PHASES_MS | {"round_ms": 10.0, "tokens_per_step": 2.0, "rounds": 100, "own_accepted": 1.0}
DRAFTED |= {"drafted_per_step": 9.0, "accepted_per_step": 1.0, "by_position": [0.7, 0.2, 0.1]}
RACE = Comparison("domino", 3, 0, PLAIN, DRAFTED)
FITS = DrafterFacts("DominoNet-0", (1, 2), 512, "m", 256, "m", "abc", "abc")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), eos_token_id=None, generation_eos=None)


@pytest.fixture(scope="module")
def random_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters") / "domino"
    sizes = OURS | {"max_positions": 128}
    write_net(random_net(DominoNet(DominoConfig(**sizes, **BLOCK, **HEAD))), folder, "sglang")
    run = {"target": "another", "chat_template": "0" * 16}
    (folder / "provenance.json").write_text(json.dumps({"run": run}))
    return folder


@pytest.mark.timeout(120)
def test_a_drafter_that_nobody_trained(target: Path, random_drafter: Path) -> None:
    """Guards against a drafter of another model, whose drafts are next to never right."""
    model = outpace.load(str(target), "domino", drafter=str(random_drafter), dtype="float32", device="cpu")
    found = {one.name: one for one in examine_method(model, "builtin:1", tokens=32)}
    assert found["method"].measured == "domino, named"
    assert list(found) == ["method", "plain round", "answers", "acceptance", "drafting", "gain", "drafter"]
    assert found["answers"].is_fine
    assert found["answers"].measured == "1 of 1 equal plain decoding's"
    assert found["acceptance"].remedy.startswith("see 'drafter'")
    remedy = found["drafter"].remedy
    assert "name a drafter that was trained for this model (it was trained for another)" in remedy
    assert "the model has another one" in remedy
    assert "--max-model-len 128" in remedy
    assert found["drafter"].figures["taps"] == (1, 2)
    assert found["drafter"].figures["computed_by"].keys() == {"block", "head"}, "what runs is reported"


def test_a_net_with_fewer_positions_is_announced_at_load(target: Path, random_drafter: Path) -> None:
    """Guards against a published EAGLE-3 drafter of 2,048 positions that drafts nothing behind longer prompts, as slow
    as plain decoding, of which only the doctor told."""
    options: dict[str, Any] = {"drafter": str(random_drafter), "dtype": "float32", "device": "cpu"}
    with pytest.warns(UserWarning, match=r"has positions for 128 tokens and requests may have 256: beyond 128 "):
        outpace.load(str(target), "domino", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outpace.load(str(target), "domino", max_model_len=128, **options)


def test_the_memory_of_a_table_of_gates_is_reported(target: Path, random_drafter: Path) -> None:
    """Guards against gigabytes that are not reported, or reported wrongly."""
    text = "domino:gate_table=on"
    model = outpace.load(str(target), text, drafter=str(random_drafter), dtype="float32", device="cpu")
    proposer: Any = model.proposer(text)
    facts, plain = drafter_of(model, text), drafter_of(model, "domino")
    assert facts is not None
    assert plain is not None
    assert (facts.table_bytes, plain.table_bytes) == (proposer.source._table.nbytes, 0)
    said = drafter(replace(facts, table_bytes=930_000_000), compare(model, text, read_workload("builtin:1"), 4).drafted)
    assert "0.93 GB of gates in a table" in said.measured


def test_a_model_without_a_chat_template(target: Path, random_drafter: Path, tmp_path: Path) -> None:
    """Guards against a doctor who cannot ask such a model, and a drafter used without what it was trained with."""
    folder = save_tiny_model(tmp_path / "bare", eos_token_id=None, generation_eos=None)
    byte_tokenizer(chat_template=None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    model = outpace.load(str(folder), "domino", drafter=str(random_drafter), dtype="float32", device="cpu")
    run = compare(model, "domino", read_workload("builtin:1"), tokens=4)
    facts = drafter_of(model, "domino")
    assert facts is not None
    assert facts.template is None
    assert "give the model's tokenizer a chat template" in drafter(facts, run.drafted).remedy


def test_plain_decoding_has_its_round_alone(target: Path) -> None:
    """Guards against a race of plain decoding with itself, and a model that cannot serve after it was examined."""
    model = outpace.load(str(target), "plain", dtype="float32", device="cpu", max_num_seqs=1)
    before = model.generate("abc", max_new_tokens=8).token_ids
    _, found = examine_method(model, "builtin:2", tokens=8)
    assert found.name == "plain round"
    assert found.figures["shares"]["forward"] > 0
    names = [one.name for one in examine_model(model)]
    assert names == ["dtype", "exactness", "one call", "pass of one row", "pass of 16 rows"]
    assert model.generate("abc", max_new_tokens=8).token_ids == before


def drafted(**changes: Any) -> Comparison:
    return replace(RACE, drafted=DRAFTED | changes)


@pytest.mark.parametrize(
    ("found", "measured", "remedy"),
    [
        (method.answers(RACE, True), "3 of 3 equal", ""),
        (method.answers(replace(RACE, different=1), True), "2 of 3 equal plain decoding's", "report it"),
        (method.answers(replace(RACE, different=1), False), "2 of 3", "ties are to be expected"),
        (method.acceptance(RACE, True), "2.00 tokens per step; accepted by position: 0.70 0.20 0.10", ""),
        (method.acceptance(drafted(accepted_per_step=0.02), True), "", "see 'drafter'"),
        (method.acceptance(drafted(accepted_per_step=0.02), False), "", "nothing of what was drafted was accepted"),
        (method.acceptance(drafted(accepted_per_step=0.0, drafted_per_step=0.0), False), "", "nothing was drafted"),
        (
            method.drafting(RACE, True),
            "takes 10.0 ms: draft 10%, forward 80%, verify 4%, commit 2%, observe 2%, between 2%",
            "",
        ),
        (method.drafting(drafted(draft_ms=3.0, forward_ms=6.0), True), "", "outpace methods domino"),
        (method.gain(RACE, True), "1.60x plain decoding's 8.0 ms per token; a round takes 1.25 plain rounds", ""),
        (method.gain(drafted(round_ms=20.0), True), "breaks even at 2.50", "use --method outpace:draft=none"),
        (method.gain(drafted(round_ms=20.0), False), "breaks even at 2.50", "use --method plain"),
        (method.plain_round(PLAIN), "a plain round takes 8.0 ms", ""),
        (method.plain_round(PLAIN | {"forward_ms": 3.0}), "", "decode several prompts together"),
    ],
)
def test_verdicts_on_figures(found: Finding, measured: str, remedy: str) -> None:
    """Guards against a method that changes answers, drafts for nothing, drafts too long or loses time and is called
    fine, and against shares that are not of the whole round."""
    assert measured in found.measured
    assert remedy in found.remedy
    assert found.is_fine is (not remedy)
    named = method.drafting(drafted(draft_ms=3.0), False).remedy
    assert "outpace:draft=none" not in named, "it may be the examined one"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"trained_template": None, "trained_for": None, "positions": None}, ""),
        ({"trained_for": "other"}, ""),  # by another name, and its drafts are right
        ({"template": None}, "give the model's tokenizer a chat template"),
        ({"template": "xyz"}, "use the chat template that the drafter was trained with"),
        ({"positions": 128}, "load with --max-model-len 128, or take a drafter with more positions: beyond 128 "),
    ],
)
def test_a_drafter_that_is_not_used_as_it_was_trained(changes: dict[str, Any], said: str) -> None:
    """Guards against each way to use a drafter as it was not made to be, and against alarm where nothing is wrong."""
    found = drafter(replace(FITS, **changes), DRAFTED)
    assert found.remedy.startswith(said)
    assert found.is_fine is (not said)


def test_retrieved_tokens_are_not_the_drafters() -> None:
    """Guards against a drafter that is never right behind retrieval that is."""
    found = drafter(FITS, DRAFTED | {"own_accepted": 0.01})
    assert "0.01 of its own drafts accepted per round" in found.measured
    assert found.remedy.startswith("name a drafter that was trained for this model, or")
