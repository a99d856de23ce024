"""What vLLM's plugin reads of a drafter's folder, and which uses it refuses: without vLLM."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outpace.drafters.kinds import write_net
from outpace.drafters.ranked_vocabulary import FILE_NAME, save_vocabulary
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.vllm.drafter import check_use, is_domino, read_drafter
from tests.unit.drafters.net.block_nets import small_domino


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """24 wide, for a target of 9 layers and 61 ids, in blocks of 5."""
    write_net(small_domino(torch.float32), tmp_path / "drafter", "sglang")
    return tmp_path / "drafter"


def target(width: int = 24, layers: int = 9, vocab_size: int = 61) -> SimpleNamespace:
    return SimpleNamespace(
        get_hidden_size=lambda: width,
        get_total_num_hidden_layers=lambda: layers,
        get_vocab_size=lambda: vocab_size,
    )


def asked(drafts: int, schedule: Any = None) -> SimpleNamespace:
    return SimpleNamespace(num_speculative_tokens=drafts, num_speculative_tokens_per_batch_size=schedule)


def test_a_drafter_that_suits_is_taken(folder: Path) -> None:
    """Guards against an alignment or a vocabulary that the folder states and nobody reads."""
    drafter = read_drafter(str(folder))
    assert (drafter.config.shift_label, drafter.config.block_size, drafter.ids) == (True, 5, None)
    save_vocabulary(folder / FILE_NAME, torch.tensor([1, 5, 60]), 61)
    assert read_drafter(str(folder)).ids.tolist() == [1, 5, 60]  # type: ignore[union-attr]
    check_use(drafter, target(), asked(4))
    check_use(drafter, target(), asked(1))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"width": 32}, "target_hidden_size=24: the target's hidden size is 32"),
        ({"layers": 8}, "target_layers=9: the target has 8 layers"),
        ({"vocab_size": 64}, "vocab_size=61: the target's vocabulary has 64 ids"),
    ],
)
def test_a_drafter_for_another_model_is_refused(folder: Path, sizes: dict[str, int], said: str) -> None:
    """Guards against a drafter that reads another model's hidden states and is never right."""
    with pytest.raises(ModelError, match=said):
        check_use(read_drafter(str(folder)), target(**sizes), asked(4))


def test_a_drafter_that_reads_the_last_layer_is_refused(folder: Path) -> None:
    """Guards against a drafter that was trained behind the final norm and gets what is before it."""
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"][-1] = 8
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match=r"target_layer_ids=.*, 8\]: .* after the final norm"):
        check_use(read_drafter(str(folder)), target(), asked(4))


def test_numbers_of_drafts_that_it_does_not_have_are_refused(folder: Path) -> None:
    """Guards against blocks longer than it was trained on, and anchors looked for where they are not."""
    drafter = read_drafter(str(folder))
    with pytest.raises(InvalidRequest, match=r"num_speculative_tokens=5: .* drafts at most 4; ask for no more"):
        check_use(drafter, target(), asked(5))
    with pytest.raises(InvalidRequest, match=r"num_speculative_tokens_per_batch_size: .*; leave it out"):
        check_use(drafter, target(), asked(4, [(1, 8, 4), (9, 64, 2)]))


def test_what_is_no_domino_drafter_is_left_to_vllm(folder: Path) -> None:
    """Guards against a plugin that takes plain DFlash, or a projector unknown here, for its own."""
    config = json.loads((folder / "config.json").read_text())
    assert is_domino(SimpleNamespace(**config))
    plain = {key: value for key, value in config["dflash_config"].items() if key in ("mask_token_id",)}
    for inner in (plain, plain | {"projector_type": "another"}, None):
        assert not is_domino(SimpleNamespace(architectures=["DFlashDraftModel"], dflash_config=inner))
    assert is_domino(SimpleNamespace(architectures=["DFlashDominoDraftModel"], dflash_config=plain))


def test_files_that_are_not_there_are_named(folder: Path) -> None:
    """Guards against a traceback of Python's where a folder holds no drafter, or a field is left to be guessed."""
    config = json.loads((folder / "config.json").read_text())
    del config["dflash_config"]["shift_label"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="shift_label is missing"):
        read_drafter(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        read_drafter(str(folder))
