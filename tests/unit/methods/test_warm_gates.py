"""Gates in the file of a warm-up: saved, checked, and taken where no option names others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import outpace
from outpace.core.drafting import Gates
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.trees.grafting import GraftedProposer
from outpace.trees.proposer import GrowingProposer
from outpace.trees.retrieval.transition_matrix import TransitionMatrix
from outpace.trees.retrieval.warm_file import KIND, Calibration, load_gates, load_matrix, save_matrix
from outpace.trees.shapes.gates import GatedConfig
from tests.unit.methods.test_trained_drafters import load, write_drafter
from tests.unit.models.tiny import save_tiny_model

CPU = torch.device("cpu")
GATES = Gates((1, 3, 4), (0.15, 0.0, 0.51))
OTHER = "Eagle3Net-000000000000"


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> outpace.Model:
    return load(checkpoint, "plain", write_drafter("eagle3", tmp_path_factory.mktemp("eagle3")))


@pytest.fixture
def drafter(model: outpace.Model) -> str:
    return model.drafters.fingerprint("eagle3")


@pytest.fixture
def file(tmp_path: Path, drafter: str) -> Path:
    return saved(tmp_path / "warm", GATES, drafter)


def saved(file: Path, gates: Gates | None, drafter: str = OTHER, vocab_size: int = 264) -> Path:
    matrix = TransitionMatrix(vocab_size, CPU)
    matrix.update(torch.tensor([5]), torch.arange(8)[None])
    save_matrix(file, matrix, None if gates is None else Calibration(gates, drafter, 15, 0.5))
    return file


def settings(model: outpace.Model, method: str) -> Any:
    proposer = model.proposer(method)
    base = proposer.base if isinstance(proposer, GraftedProposer) else proposer
    assert isinstance(base, GrowingProposer)
    return base.shape.config  # type: ignore[attr-defined]


def test_gates_are_kept_to_the_last_digit(file: Path, drafter: str, tmp_path: Path) -> None:
    """Guards against thresholds rounded on the way, a matrix unread for its company."""
    assert load_gates(file, 264, drafter) == GATES
    assert load_matrix(file, 264, CPU).rows()[0].tolist() == [5]
    assert load_gates(saved(tmp_path / "without", None), 264, drafter) is None


def test_a_files_gates_take_effect_unless_others_are_named(model: outpace.Model, file: Path, tmp_path: Path) -> None:
    """Guards against a calibration that is written and never read, one that overrules what the user says."""
    assert settings(model, "graft") == GatedConfig()
    assert settings(model, f"graft:warm={file}") == GatedConfig(checkpoints=(1, 3, 4), thresholds=(0.15, 0.0, 0.51))
    other = settings(model, f"eagle3:shape=gated,retrieve=both,warm={file},depth=5,kept=6/7/9")
    assert other == GatedConfig(checkpoints=(1, 3, 4), thresholds=(0.15, 0.0, 0.51), depth=5, kept=(6, 7, 9))
    explicit = settings(model, f"graft:warm={file},checkpoints=2/5,thresholds=0.3/0.4,kept=8/24")
    assert explicit == GatedConfig(checkpoints=(2, 5), thresholds=(0.3, 0.4), kept=(8, 24))
    named = settings(model, f"graft:warm={file},thresholds=0.3/0.4/0.5")
    assert named == GatedConfig(checkpoints=(1, 3, 4), thresholds=(0.3, 0.4, 0.5))
    assert settings(model, f"graft:warm={file},checkpoints=2/3/7").thresholds == GATES.thresholds
    assert settings(model, f"graft:warm={saved(tmp_path / 'without', None)}") == GatedConfig()
    assert not hasattr(settings(model, f"graft:shape=beam,reserved=0.5,warm={file}"), "checkpoints")


def test_what_does_not_fit_the_files_gates_is_refused(model: outpace.Model, drafter: str, tmp_path: Path) -> None:
    """Guards against options and file mixed in silence where they have different numbers of gates."""
    file = saved(tmp_path / "two", Gates((1, 3), (0.1, 0.2)), drafter)
    for options in ("", ",thresholds=0.1/0.2/0.3", ",checkpoints=1/2/3"):
        with pytest.raises(InvalidRequest, match=r"must be .*; warm=.* has Gates.*: name checkpoints, thresholds and"):
            model.proposer(f"graft:warm={file}{options}")
    assert settings(model, f"graft:warm={file},checkpoints=1/2/3,thresholds=0/0/0").checkpoints == (1, 2, 3)


@pytest.mark.parametrize(
    ("depths", "thresholds"),
    [
        ([1, 2], None), (None, [0.1, 0.2]), ([], []), ([2, 1], [0.1, 0.2]), ([0, 1], [0.1, 0.2]), ([1, 65], [0.1, 0.2]),
        ([1, 2], [0.1]), ([1, 2], [0.1, 1.5]), ([1, 2], [float("nan"), 0.2]), ([[1, 2]], [[0.1, 0.2]]),
    ],
)  # fmt: skip
def test_files_that_hold_no_gates_that_could_be_are_refused(depths: Any, thresholds: Any, tmp_path: Path) -> None:
    """Guards against half a calibration, or one that never closes for a reason nobody sees."""
    tensors = {"tokens": torch.empty(0, dtype=torch.int32), "successors": torch.empty(0, 8, dtype=torch.int32)}
    if depths is not None:
        tensors["gate_checkpoints"] = torch.tensor(depths, dtype=torch.int32)
    if thresholds is not None:
        tensors["gate_thresholds"] = torch.tensor(thresholds, dtype=torch.float64)
    save_file(tensors, tmp_path / "bad", {"format": KIND.format, "vocab_size": "264"})
    with pytest.raises(ModelError, match="gate_checkpoints must be ascending int32 depths from 1 to 64, and"):
        load_gates(tmp_path / "bad", 264, OTHER)


def test_files_of_others_are_refused(model: outpace.Model, tmp_path: Path) -> None:
    """Guards against gates of another vocabulary's warm-up, a file that is missing, and tensors nobody knows."""
    with pytest.raises(ModelError, match="made for 300 ids, and the target has 264"):
        model.proposer(f"graft:warm={saved(tmp_path / 'other', GATES, vocab_size=300)}")
    with pytest.raises(ModelError, match="cannot be read"):
        model.proposer(f"graft:warm={tmp_path / 'none'}")
    save_file({"tokens": torch.zeros(1), "more": torch.zeros(1)}, tmp_path / "more", {"format": KIND.format})
    with pytest.raises(ModelError, match="not a transition matrix"):
        load_gates(tmp_path / "more", 264, OTHER)


def test_gates_hold_for_the_drafter_they_were_calibrated_for(
    model: outpace.Model, checkpoint: Path, file: Path, drafter: str, tmp_path: Path
) -> None:
    """Guards against thresholds for another drafter's confidence taken in silence, or for nobody knows whose."""
    with safe_open(file, framework="pt") as opened:
        about = opened.metadata()
    assert (about["gates_drafter"], about["gates_budget"], about["gates_temperature"]) == (drafter, "15", "0.5")
    weights = write_drafter("eagle3", tmp_path / "another") / "model.safetensors"
    trained = load_file(weights)
    trained["fc.weight"] += 0.01
    save_file(trained, weights, {"format": "pt"})
    another = load(checkpoint, "plain", tmp_path / "another")
    own = another.drafters.fingerprint("eagle3")
    assert own != drafter
    with pytest.raises(InvalidRequest, match=f"gates for drafter {drafter}, and this drafter is {own}; make a file"):
        another.proposer(f"graft:warm={file}")
    assert settings(another, f"graft:warm={file},checkpoints=1/2,kept=8/24,thresholds=0/0").checkpoints == (1, 2)
    assert another.proposer(f"recycle:warm={file}").budget
    assert another.proposer(f"graft:shape=beam,reserved=0.5,warm={file}").budget
    rounded = load(checkpoint, f"graft:warm={file}", model.drafter, dtype="bfloat16")
    assert settings(rounded, rounded.method_name).checkpoints == GATES.checkpoints
    save_file(load_file(file), tmp_path / "old", {"format": KIND.format, "vocab_size": "264"})
    with pytest.raises(InvalidRequest, match=r"does not say for which drafter its gates are, .* checkpoints= and thr"):
        model.proposer(f"graft:warm={tmp_path / 'old'}")
    assert model.proposer(f"recycle:warm={tmp_path / 'old'}").budget


def test_a_draft_model_takes_gates_that_were_calibrated_for_it(checkpoint: Path, tmp_path: Path) -> None:
    """Guards against gates of a language model that no file can hold."""
    other = save_tiny_model(tmp_path / "other")
    trained = load_file(other / "model.safetensors")
    trained["model.norm.weight"] *= 1.01
    save_file(trained, other / "model.safetensors", {"format": "pt"})
    prints = {}
    for drafter in ("early-exit:1", "early-exit:2", str(checkpoint), str(other)):
        model = load(checkpoint, "plain", drafter)
        prints[drafter] = model.drafters.fingerprint("draft-lm")
        file = saved(tmp_path / str(len(prints)), GATES, prints[drafter])
        assert settings(model, f"linear:shape=gated,retrieve=matrix,warm={file}").checkpoints == GATES.checkpoints
    assert len(set(prints.values())) == 4
    again = load(checkpoint, "plain", checkpoint)
    own = again.drafters.fingerprint("draft-lm")
    assert own == prints[str(checkpoint)]
    with pytest.raises(InvalidRequest, match=f"and this drafter is {own}; make a file"):
        again.proposer(f"linear:shape=gated,warm={file}")


def test_gates_are_taken_whatever_fills(model: outpace.Model, file: Path, tmp_path: Path) -> None:
    """Guards against a calibration that methods without a matrix cannot use."""
    for method in ("graft:retrieve=none", "graft:retrieve=suffix", "eagle3:shape=gated"):
        assert settings(model, f"{method},warm={file}").checkpoints == GATES.checkpoints
    partly = settings(model, f"eagle3:shape=gated,warm={file},thresholds=0.2/0.3/0.4")
    assert partly == GatedConfig(checkpoints=GATES.checkpoints, thresholds=(0.2, 0.3, 0.4))
    named = "eagle3:shape=gated,checkpoints=1/2/3,thresholds=0/0/0,"
    for method in ("eagle3:", "graft:shape=beam,retrieve=none,", named):
        with pytest.raises(InvalidRequest, match=r"warm=.*: does nothing with retrieve=none; choose another retrieve"):
            model.proposer(f"{method}warm={file}")
    without = saved(tmp_path / "without", None)
    with pytest.raises(InvalidRequest, match="holds no gates, and with retrieve=suffix nothing else of it is used"):
        model.proposer(f"graft:retrieve=suffix,warm={without}")
