"""Training that goes on from a drafter that was trained before."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.drafters.domino.net import DominoNet
from outpace.drafters.load import load_net
from outpace.drafters.training.losses import LossVocabulary
from outpace.drafters.training.objective import Objective
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.models.tokenizer import TextCodec
from outpace.train.run import begin_with, weights_hash
from tests.unit.drafters.training import test_dart as dart
from tests.unit.drafters.training import test_dflash_objective as dflash
from tests.unit.drafters.training import test_domino_objective as domino
from tests.unit.drafters.training import test_draft_lm_objective as draft_lm
from tests.unit.drafters.training import test_eagle3 as eagle3
from tests.unit.drafters.training import tiny
from tests.unit.models.tiny import byte_tokenizer

CODEC = TextCodec(byte_tokenizer(), "tiny")
KINDS: dict[str, Any] = {
    "dflash": lambda seed: dflash.fresh(seed),
    "domino": lambda seed: domino.fresh(seed),
    "eagle3": lambda seed: eagle3.objective_of(seed, {"draft_vocab_size": 30}),
    "headless": lambda seed: eagle3.objective_of(seed, {"own_head": False}),
    "dart": lambda seed: dart.objective_of(seed, {"draft_vocab_size": 30}),
    "draft-lm": lambda seed: draft_lm.fresh("own", seed),
    "bare": lambda seed: draft_lm.fresh("bare", seed),
}


def written(objective: Objective, folder: Path) -> str:
    folder.mkdir()
    tensors = {name: tensor.clone() for name, tensor in objective.net.state_dict().items()}
    objective.write(tensors, folder, CODEC, "float32")
    return str(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_begins_where_another_ended(kind: str, tmp_path: Path) -> None:
    """Guards against a start that is ignored, in part too, and weights that no longer learn."""
    before, after = KINDS[kind](0), KINDS[kind](1)
    begin_with(after, written(before, tmp_path / "drafter"))
    wanted, found = before.net.state_dict(), after.net.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert any(not torch.equal(KINDS[kind](1).net.state_dict()[name], wanted[name]) for name in wanted)
    assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in after.net.parameters())


def test_domino_begins_with_a_dflash_backbone(tmp_path: Path) -> None:
    """Guards against a new causal head that is left empty, and a backbone that is not taken."""
    before, after = dflash.fresh(3), domino.fresh(1)
    head = {name: weight.clone() for name, weight in after.net.head.state_dict().items()}
    begin_with(after, written(before, tmp_path / "drafter"))
    assert torch.equal(after.net.fc.weight, before.net.fc.weight)
    assert all(torch.equal(after.net.head.state_dict()[name], weight) for name, weight in head.items())
    with pytest.raises(InvalidRequest, match=r"head.prefix_gru.* is unknown here"):
        begin_with(dflash.fresh(), written(domino.fresh(), tmp_path / "other"))


@pytest.mark.parametrize(("size", "kept"), [(6, True), (8, False)])
def test_what_is_drafted_stays_the_same(size: int, kept: bool, tmp_path: Path) -> None:
    """Guards against a drafter whose answers to other prompts choose other ids."""
    before, after = dflash.fresh(0), dflash.fresh(1)
    ids, others = torch.arange(3, 9), torch.arange(20, 20 + size)
    before.compare(LossVocabulary(ids, tiny.VOCAB, 4))
    after.compare(LossVocabulary(others, tiny.VOCAB, 5))
    begin_with(after, written(before, tmp_path / "drafter"))
    wanted = ids if kept else others
    compared = after.vocabulary.draw(0).ids
    assert compared is not None
    assert torch.equal(compared[: len(wanted)], wanted)
    assert len(compared) == len(wanted) + 5
    best = after.scores(torch.randn(9, after.target.hidden_size)).argmax(dim=-1)
    assert torch.isin(best, wanted).all()


def test_rows_stay_with_their_ids(tmp_path: Path) -> None:
    """Guards against W2's rows of ids that are never drafted in an optimizer, rows read as those of other ids, and a
    drafter written with other rows than zeros there."""
    limits: dict[str, Any] = {"vocabulary": 12, "sampled": 4}
    before, after = domino.fresh(0, **limits), domino.fresh(1, **limits)
    weight, ids = before.net.head.vocabulary_weight, before.vocabulary.ranked
    assert ids is not None
    assert weight.shape[0] == 12
    with torch.no_grad():
        weight.copy_(torch.arange(1.0, 13.0)[:, None].expand_as(weight))
    after.compare(LossVocabulary((ids + 1) % tiny.VOCAB, tiny.VOCAB, 4))
    folder = written(before, tmp_path / "drafter")
    net = load_net(folder)
    assert isinstance(net, DominoNet)
    stored = net.head.vocabulary_weight
    assert stored.shape[0] == tiny.VOCAB
    assert torch.equal(stored[ids], weight)
    assert not stored[[at for at in range(tiny.VOCAB) if at not in ids]].any()
    begin_with(after, folder)
    assert torch.equal(after.net.head.vocabulary_weight, weight)
    assert after.vocabulary.ranked is not None
    assert torch.equal(after.vocabulary.ranked, ids)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """Guards against weights of another drafter, block or taps that happen to have the right shapes."""
    folder = written(dflash.fresh(), tmp_path / "drafter")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"block_size": 6}, "block_size=5 there, 6 here"),
        ({"mask_token_id": 3}, "mask_token_id=47 there, 3 here"),
        ({"layers": 2}, "layers=1 there, 2 here"),
    ]
    for net, complaint in cases:
        with pytest.raises(InvalidRequest, match=f"start=.*{complaint}.*the same net settings"):
            begin_with(dflash.fresh(**net), folder)
    with pytest.raises(InvalidRequest, match=r"midlayer.* is missing there"):
        begin_with(eagle3.objective_of(), folder)
    with pytest.raises(InvalidRequest, match=r"is missing there"):
        begin_with(draft_lm.fresh("own"), folder)
    with pytest.raises(ModelError, match="nowhere"):
        begin_with(dflash.fresh(), str(tmp_path / "nowhere" / "at" / "all"))


def test_what_a_run_began_with_is_known_by_its_weights(tmp_path: Path) -> None:
    """Guards against a record that names the hash of no file for kinds whose weights have another name."""
    hashes = []
    for content in (b"one", b"two"):
        folder = tmp_path / content.decode()
        folder.mkdir()
        (folder / "medusa_lm_head.safetensors").write_bytes(content)
        (folder / "vocabulary.safetensors").write_bytes(b"the same")
        hashes.append(weights_hash(str(folder)))
    assert hashes[0] != hashes[1]
    (folder / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ModelError, match="no file of weights there"):
        weights_hash(str(folder))


@pytest.mark.parametrize(
    ("kind", "left_out"), [("dflash", ["num_target_layers"]), ("eagle3", ["eagle_aux_hidden_state_layer_ids"])]
)
def test_what_a_file_may_leave_out_is_no_difference(kind: str, left_out: list[str], tmp_path: Path) -> None:
    """Guards against a refusal that names a setting nobody can give."""
    folder = written(KINDS[kind](0), tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    for name in left_out:
        del config[name]
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    begin_with(KINDS[kind](1), folder)
