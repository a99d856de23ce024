"""Damaged drafters: refused by name, or harmless, for whatever a drafter says the answer is the target's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import outpace
from outpace.models.draft import build_bare, write_bare
from outpace.models.loading.load import load_target
from tests.fuzz.mutation import byte_mutants, deep, factor, json_mutants, tensor_mutants
from tests.fuzz.outcome import Campaign
from tests.unit.methods.test_trained_drafters import write_drafters
from tests.unit.models.tiny import save_tiny_model, tiny_config

NETS = ("eagle3", "dflash", "domino", "medusa", "dart")
METHODS = {"draft-lm": "linear:budget=3", "bare": "linear:budget=3"} | {kind: f"{kind}:budget=4" for kind in NETS}
MORE = ("rope_scaling", "rope_parameters", "sliding_window", "layer_types", "num_labels", "eagle_config", "num_heads",
        "dflash_config", "speculators_model_type", "num_hidden_layers", "head_dim", "outpace_embedding")  # fmt: skip
each_kind = pytest.mark.parametrize("kind", METHODS)


@pytest.fixture
def drafter(kind: str, checkpoint: Path, tmp_path: Path) -> Path:
    """A fresh drafter of a kind, to be damaged."""
    if kind == "draft-lm":
        return save_tiny_model(tmp_path / kind, num_hidden_layers=1)
    if kind == "bare":
        config = tiny_config("llama", vocab_size=264, num_hidden_layers=1)
        codec = load_target(str(checkpoint), "float32", "cpu", None, 1)[1]
        write_bare(build_bare(config, torch.float32, "eager", 1), tmp_path / kind, codec, torch.float32)
        return tmp_path / kind
    return write_drafters(tmp_path)[kind]


def weights_of(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def answer(target: Path, drafter: Path, kind: str) -> Any:
    """Ids with a drafter, which must be those without one."""
    model = outpace.load(str(target), METHODS[kind], drafter=str(drafter), dtype="float32", device="cpu")
    return model.generate([5, 60, 7, 8, 130], max_new_tokens=6).token_ids


def plain(target: Path) -> Any:
    model = outpace.load(str(target), "plain", dtype="float32", device="cpu")
    return model.generate([5, 60, 7, 8, 130], max_new_tokens=6).token_ids


@pytest.mark.costly
@each_kind
def test_configs_of_drafters(kind: str, checkpoint: Path, drafter: Path) -> None:
    """Guards against a traceback for odd values, as for scaled rotations with keys missing, or for JSON that is nested
    without end, and against answers that change."""
    config = json.loads((drafter / "config.json").read_text())
    wanted, campaign = plain(checkpoint), Campaign(f"configs of {kind} drafters")
    assert answer(checkpoint, drafter, kind) == wanted
    for what, mutant in json_mutants(config, 40 * factor(), 11, MORE):
        (drafter / "config.json").write_text(json.dumps(mutant))
        campaign.run(what, lambda: answer(checkpoint, drafter, kind), wanted)
    (drafter / "config.json").write_text(deep())
    campaign.run("nested", lambda: answer(checkpoint, drafter, kind), wanted)
    campaign.finish(least_refused=5)


@pytest.mark.costly
@each_kind
def test_weights_of_drafters(kind: str, checkpoint: Path, drafter: Path) -> None:
    """Guards against a traceback in the middle of an answer, for a weight of another shape or kind."""
    file = weights_of(drafter)
    tensors, whole = load_file(file), file.read_bytes()
    wanted, campaign = plain(checkpoint), Campaign(f"weights of {kind} drafters")
    for what, mutant in tensor_mutants(tensors, 20 * factor(), 12):
        save_file({name: one.contiguous() for name, one in mutant.items()}, file, {"format": "pt"})
        campaign.run(what, lambda: answer(checkpoint, drafter, kind), wanted)
    for what, damaged in byte_mutants(whole, 8 + int.from_bytes(whole[:8], "little"), 15 * factor(), 13):
        file.write_bytes(damaged)
        campaign.run(what, lambda: answer(checkpoint, drafter, kind), wanted)
    campaign.finish(least_refused=20)


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["draft-lm", "eagle3", "medusa"])  # files are read before layouts are known
def test_torch_files_of_drafters(kind: str, checkpoint: Path, drafter: Path) -> None:
    """Guards against pickles damaged byte by byte, and tensors that declare more than the file holds."""
    file = weights_of(drafter)
    tensors = load_file(file)
    file.unlink()
    file = file.with_name("medusa_lm_head.pt" if kind == "medusa" else "pytorch_model.bin")
    wanted, campaign = plain(checkpoint), Campaign(f"torch files of {kind} drafters")
    torch.save(tensors, file)
    assert answer(checkpoint, drafter, kind) == wanted
    whole = file.read_bytes()
    for what, damaged in byte_mutants(whole, whole.index(b"data.pkl") + 3000, 15 * factor(), 14):
        file.write_bytes(damaged)
        campaign.run(what, lambda: answer(checkpoint, drafter, kind), wanted)
    campaign.finish(least_refused=5)
