"""Gates in the file of a warm-up: saved, checked, and taken where no option names others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import outpace
from outpace.core.drafting import Gates
from outpace.core.errors import InvalidRequest, ModelError
from outpace.drafters.transition_matrix import KIND, TransitionMatrix, load_gates, load_matrix, save_matrix
from outpace.nets.eagle3 import Eagle3Config, Eagle3Net
from outpace.nets.layouts.eagle3_export import write_eagle3
from outpace.shaping.gates import GatedConfig
from outpace.shaping.grafted import GraftedProposer
from outpace.shaping.growing import GrowingProposer
from tests.unit.drafters.learned import random_net
from tests.unit.drafters.test_presets import OURS
from tests.unit.models.tiny import save_tiny_model

CPU = torch.device("cpu")
GATES = Gates((1, 3, 4), (0.15, 0.0, 0.51))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> outpace.Model:
    folder = tmp_path_factory.mktemp("eagle3")
    write_eagle3(random_net(Eagle3Net(Eagle3Config(**OURS, taps=(0, 1, 2), draft_vocab_size=264))), folder, "midlayer")
    target = save_tiny_model(tmp_path_factory.mktemp("target"))
    return outpace.load(str(target), "plain", drafter=str(folder), dtype="float32", device="cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return saved(tmp_path / "warm", GATES)


def saved(file: Path, gates: Gates | None, vocab_size: int = 264) -> Path:
    matrix = TransitionMatrix(vocab_size, CPU)
    matrix.update(torch.tensor([5]), torch.arange(8)[None])
    save_matrix(file, matrix, gates)
    return file


def settings(model: outpace.Model, method: str) -> Any:
    proposer = model.proposer(method)
    base = proposer.base if isinstance(proposer, GraftedProposer) else proposer
    assert isinstance(base, GrowingProposer)
    return base.shape.config  # type: ignore[attr-defined]


def test_gates_are_kept_to_the_last_digit(file: Path, tmp_path: Path) -> None:
    """Guards against thresholds rounded on the way, a matrix unread for its company, and files of a warm-up without
    gates, or from before there were any, being refused."""
    assert load_gates(file, 264) == GATES
    assert load_matrix(file, 264, CPU).rows()[0].tolist() == [5]
    assert load_gates(saved(tmp_path / "without", None), 264) is None


def test_a_files_gates_take_effect_unless_others_are_named(model: outpace.Model, file: Path, tmp_path: Path) -> None:
    """Guards against a calibration that is written and never read, one that overrules what the user says, and settings
    that it has nothing to do with."""
    assert settings(model, "graft") == GatedConfig()
    assert settings(model, f"graft:warm={file}") == GatedConfig(checkpoints=(1, 3, 4), thresholds=(0.15, 0.0, 0.51))
    other = settings(model, f"eagle3:shape=gated,fill=both,warm={file},depth=5,kept=6/7/9")
    assert other == GatedConfig(checkpoints=(1, 3, 4), thresholds=(0.15, 0.0, 0.51), depth=5, kept=(6, 7, 9))
    explicit = settings(model, f"graft:warm={file},checkpoints=2/5,thresholds=0.3/0.4,kept=8/24")
    assert explicit == GatedConfig(checkpoints=(2, 5), thresholds=(0.3, 0.4), kept=(8, 24))
    named = settings(model, f"graft:warm={file},thresholds=0.3/0.4/0.5")
    assert named == GatedConfig(checkpoints=(1, 3, 4), thresholds=(0.3, 0.4, 0.5))
    assert settings(model, f"graft:warm={file},checkpoints=2/3/7").thresholds == GATES.thresholds
    assert settings(model, f"graft:warm={saved(tmp_path / 'without', None)}") == GatedConfig()
    assert not hasattr(settings(model, f"graft:shape=beam,reserved=0.5,warm={file}"), "checkpoints")


def test_what_does_not_fit_the_files_gates_is_refused(model: outpace.Model, tmp_path: Path) -> None:
    """Guards against options and file mixed in silence where they have different numbers of gates."""
    file = saved(tmp_path / "two", Gates((1, 3), (0.1, 0.2)))
    for options in ("", ",thresholds=0.1/0.2/0.3", ",checkpoints=1/2/3"):
        with pytest.raises(InvalidRequest, match=r"must be .*; warm=.* has Gates.*: name checkpoints, thresholds and"):
            model.proposer(f"graft:warm={file}{options}")
    assert settings(model, f"graft:warm={file},checkpoints=1/2/3,thresholds=0/0/0").checkpoints == (1, 2, 3)


@pytest.mark.parametrize(
    ("depths", "thresholds"),
    [
        ([1, 2], None),
        (None, [0.1, 0.2]),
        ([], []),
        ([2, 1], [0.1, 0.2]),
        ([0, 1], [0.1, 0.2]),
        ([1, 65], [0.1, 0.2]),
        ([1, 2], [0.1]),
        ([1, 2], [0.1, 1.5]),
        ([1, 2], [float("nan"), 0.2]),
        ([[1, 2]], [[0.1, 0.2]]),
    ],
)
def test_files_that_hold_no_gates_that_could_be_are_refused(depths: Any, thresholds: Any, tmp_path: Path) -> None:
    """Guards against half a calibration, or one that never closes for a reason nobody sees."""
    tensors = {"tokens": torch.empty(0, dtype=torch.int32), "successors": torch.empty(0, 8, dtype=torch.int32)}
    if depths is not None:
        tensors["gate_checkpoints"] = torch.tensor(depths, dtype=torch.int32)
    if thresholds is not None:
        tensors["gate_thresholds"] = torch.tensor(thresholds, dtype=torch.float64)
    save_file(tensors, tmp_path / "bad", {"format": KIND.format, "vocab_size": "264"})
    with pytest.raises(ModelError, match="gate_checkpoints must be ascending int32 depths from 1 to 64, and"):
        load_gates(tmp_path / "bad", 264)


def test_files_of_others_are_refused(model: outpace.Model, tmp_path: Path) -> None:
    """Guards against gates of another vocabulary's warm-up, a file that is missing, and tensors nobody knows."""
    with pytest.raises(ModelError, match="made for 300 ids, and the target has 264"):
        model.proposer(f"graft:warm={saved(tmp_path / 'other', GATES, 300)}")
    with pytest.raises(ModelError, match="cannot be read"):
        model.proposer(f"graft:warm={tmp_path / 'none'}")
    save_file({"tokens": torch.zeros(1), "more": torch.zeros(1)}, tmp_path / "more", {"format": KIND.format})
    with pytest.raises(ModelError, match="not a transition matrix"):
        load_gates(tmp_path / "more", 264)
