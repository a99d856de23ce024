"""Distillation into a draft model: the loss is the one stated, and what is learned is what the engine accepts."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import outpace
from outpace.core.params import SamplingParams
from outpace.drafters.build_context import BuildContext
from outpace.drafters.draft_lm.net import BareLM, DraftLmNetSettings, SmallLM
from outpace.drafters.draft_lm.objective import DraftLmObjective, DraftLmObjectiveSettings, build_draft_lm
from outpace.drafters.training.batch import TrainingSample, all_anchors, collate
from outpace.lib.checkpoint import INDEX, WEIGHTS, read_object
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.methods.catalog import build_proposer, parse_method
from outpace.models.draft import load_draft_model
from outpace.models.frozen import FrozenTarget
from outpace.models.tokenizer import TextCodec
from outpace.train.trainer import simulate
from tests.unit.drafters.training import pairs, tiny
from tests.unit.models.tiny import byte_tokenizer, random_ids, save_tiny_model

CODEC = TextCodec(byte_tokenizer(), "tiny")
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "own": ({"layers": 1}, {}),
    "bare": ({"layers": 1, "embedding": "target", "intermediate_size": 64}, {}),
    "bare-short": ({"layers": 1, "embedding": "target"}, {"chain_depth": 5}),
}

SMALL: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 24},
    "small on the target's embedding": {"embedding": "target", "intermediate_size": 24},
}


def fresh(kind: str, seed: int = 0) -> DraftLmObjective:
    net, objective = KINDS[kind]
    return build_draft_lm(
        DraftLmNetSettings(**net), DraftLmObjectiveSettings(**objective), tiny.frozen(), tiny.facts(), seed
    )


@cache
def trained(kind: str) -> DraftLmObjective:
    objective = fresh(kind)
    tiny.train(objective, 10, 3e-3)
    return objective


def scores_of(net: SmallLM, ids: Tensor) -> Tensor:
    """[V] behind a sequence, by transformers alone."""
    if not isinstance(net, BareLM):
        scores: Tensor = net.model(ids[None]).logits[0, -1]
        return scores
    hidden: Tensor = net.model(inputs_embeds=tiny.frozen().embedding[ids][None]).last_hidden_state[0, -1]
    return tiny.frozen().head @ hidden


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_every_position_by_itself(kind: str) -> None:
    """Guards against positions a token off, prompts or padding in the loss, what comes later being seen."""
    objective, batch = fresh(kind), tiny.held_out((3,))
    batch = replace(batch, ids=batch.ids[:3], mask=batch.mask[:3], features=batch.features[:3])
    with torch.no_grad():
        for weight in objective.net.parameters():
            weight.mul_(2)  # a distribution far from uniform
    terms = objective(batch, 0.5)
    loss, count, right = 0.0, 0, 0
    for ids, mask, features in zip(batch.ids, batch.mask, batch.features.double(), strict=True):
        for at in range(int(mask.nonzero()[0]) - 1, int(mask.nonzero()[-1])):
            with torch.no_grad():
                scores = scores_of(objective.net, ids[: at + 1]).double()
            aim = int(ids[at + 1])
            q, p = scores.softmax(dim=0), (tiny.frozen().head.double() @ features[at]).softmax(dim=0)
            loss -= float((p * (q / p).log()).sum())
            count, right = count + 1, right + int(scores.argmax() == aim)
    assert (terms["weight"].item(), terms["right"].item()) == (count, right)
    assert terms["loss"].item() == pytest.approx(loss, rel=2e-5)
    assert count == 3 * tiny.ANSWER, "the first token of an answer is to be foreseen too"


@pytest.mark.parametrize(("kind", "gain"), [("own", 0.75), ("bare", 0.6), ("bare-short", 0.4)])
def test_training_helps_and_simulated_rounds_are_the_engines(kind: str, gain: float, tmp_path: Path) -> None:
    """Guards against a loss that falls while nothing useful is learned, figures of training that drafting does not
    keep, and a file that is not what was trained. Measured gains are 1.25 times the bound, but of the last.
    """
    objective, target = trained(kind), tiny.target()
    objective.net.write(tmp_path / "draft", CODEC, torch.float32)
    draft = load_draft_model(str(tmp_path / "draft"), target, CODEC)
    around = BuildContext(target.vocab_size, target.device, lambda: draft, target)
    proposer = build_proposer(parse_method(f"linear:budget={objective.depth}"), around)
    before, after = (pairs.played(one) for one in (fresh(kind), objective))
    pairs.assert_engine_agrees(after, proposer)
    assert before.tokens_per_step < 1.1
    assert after.tokens_per_step > before.tokens_per_step + gain


def test_hits_do_not_depend_on_how_anchors_are_grouped() -> None:
    """Guards against figures that change with the size of a group: rows cut too short, or of another sequence."""
    objective, batch = trained("own"), tiny.held_out((3,))
    anchors = all_anchors(batch)
    whole = objective.hits(batch, anchors)
    assert 0 < whole.sum() < whole.numel()
    for size in (1, 7, 100):
        assert torch.equal(torch.cat([objective.hits(batch, group) for group in anchors.split(size)]), whole)


@pytest.mark.parametrize("kind", SMALL)
def test_a_folder_drafts_for_a_loaded_model(kind: str, tmp_path: Path) -> None:
    """Guards against a drafter that `outpace.load` does not take."""
    folder = save_tiny_model(tmp_path / "target", "qwen2", num_hidden_layers=2)
    model = outpace.load(str(folder), "plain", dtype="float32", device="cpu")
    target = FrozenTarget(model.target)  # type: ignore[arg-type]
    objective = build_draft_lm(DraftLmNetSettings(**SMALL[kind]), DraftLmObjectiveSettings(), target, tiny.facts(), 0)
    objective.net.write(tmp_path / "draft", model.codec, torch.float32)
    drafting = outpace.load(
        str(folder), "linear:budget=8", drafter=str(tmp_path / "draft"), dtype="float32", device="cpu"
    )
    prompt = random_ids(9, 1)
    answer, plain = (
        one.generate(prompt, SamplingParams(max_new_tokens=40, ignore_eos=True)) for one in (drafting, model)
    )
    assert answer.token_ids == plain.token_ids
    ids = torch.tensor([*prompt, *plain.token_ids])
    sample = TrainingSample("0", ids, torch.arange(len(ids)) >= len(prompt))
    batch = collate([sample], (1,), [target.features(ids[None], (len(ids),), objective.taps)[0]])
    played = simulate(objective, [batch])
    assert (played.tokens, played.rounds) == (39, answer.metrics.steps)


def test_other_engines_take_no_ranked_vocabulary_for_weights(tmp_path: Path) -> None:
    """Guards against a draft model whose ids vLLM and SGLang load as a weight: its folder lists no weights."""
    settings = DraftLmNetSettings(layers=1), DraftLmObjectiveSettings(vocabulary=20)
    objective = build_draft_lm(*settings, tiny.frozen(), tiny.facts(), 0)
    objective.write(objective.net.state_dict(), tmp_path, CODEC, "float32")
    listed = read_object(tmp_path / INDEX)["weight_map"]
    assert listed == dict.fromkeys(load_file(tmp_path / WEIGHTS), WEIGHTS)


@pytest.mark.parametrize("kind", [PreTrainedModel, PreTrainedTokenizerFast])
def test_a_full_disk_is_named(kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback out of a library after hours of training, in place of what to do."""

    def full(saved: Any, folder: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(kind, "save_pretrained", full)
    with pytest.raises(ModelError, match=r"draft: cannot be written .*No space left on device.*free some space"):
        fresh("own").net.write(tmp_path / "draft", CODEC, torch.float32)


def test_sizes_that_do_not_fit_the_target_are_refused() -> None:
    """Guards against layers that nothing fills, a traceback in the first step, and a width that is quietly another than
    asked for."""
    deep = DraftLmNetSettings(layers=4)
    wrong, right = (DraftLmNetSettings(embedding="target", hidden_size=size) for size in (24, 48))
    own = DraftLmObjectiveSettings(), tiny.frozen(), tiny.facts(), 0
    with pytest.raises(InvalidRequest, match="layers=4: the target has 3"):
        build_draft_lm(deep, *own)
    with pytest.raises(InvalidRequest, match=r"hidden_size=24: embedding='target' has vectors of 48"):
        build_draft_lm(wrong, *own)
    build_draft_lm(right, *own)


def test_the_targets_embedding_is_no_part_of_what_is_trained() -> None:
    """Guards against a target that training changes, and against states and optimizers that hold its embedding."""
    shared = [*tiny.target().decoder.parameters(), tiny.frozen().head]
    before = [weight.clone() for weight in shared]
    objective = fresh("bare")
    tiny.train(objective, 1, 3e-3)
    assert all(torch.equal(one, other) for one, other in zip(shared, before, strict=True))
    own = {weight.data_ptr() for weight in objective.state_dict().values()}
    assert not own & {weight.data_ptr() for weight in shared}
    names = {name.removeprefix("net.model.") for name in objective.state_dict()}
    assert {name for name in names if not name.startswith("layers.0.")} == {"norm.weight"}
