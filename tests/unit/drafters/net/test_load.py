"""Drafter nets told apart by their configs, and read by the name of a folder."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.drafters.domino.net import DominoNet
from outpace.drafters.kinds import kind_of_config, write_net
from outpace.drafters.load import fingerprint, is_net, load_net
from outpace.lib.checkpoint import write_checkpoint
from outpace.lib.errors import ModelError
from tests.unit.drafters.net.block_nets import small_dflash, small_domino, speculators_files
from tests.unit.drafters.net.small import dart_net, eagle3_net
from tests.unit.drafters.net.test_every_kind import NETS
from tests.unit.drafters.net.test_medusa import medusa
from tests.unit.models.tiny import save_tiny_model


def write_all(folder: Path) -> None:
    """One checkpoint of every layout of five kinds."""
    folder.mkdir(exist_ok=True)
    for layout in ("midlayer", "speculators"):
        write_net(eagle3_net(torch.float32), folder / f"eagle3-{layout}", layout)
    write_net(small_dflash(torch.float32), folder / "dflash-z-lab")
    write_checkpoint(folder / "dflash-speculators", *speculators_files(small_dflash(torch.float32)))
    for layout in ("domino", "sglang"):
        write_net(small_domino(torch.float32), folder / f"domino-{layout}", layout)
    for layout in ("authors", "vllm"):
        write_net(medusa(torch.float32), folder / f"medusa-{layout}", layout)
    write_net(dart_net(torch.float32), folder / "dart-own")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": None},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000},
        {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36, "layer_types": ["full_attention"] * 36},
        {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "draft_vocab_size": 32000},
        {"speculators_model_type": "mtp", "hidden_size": 24, "vocab_size": 50},
        {"architectures": "LlamaForCausalLMEagle3"},
    ],
)
def test_a_config_of_an_unknown_kind_has_no_kind(config: dict[str, Any]) -> None:
    """Guards against a language model taken for a net, and against another method's fields that look alike."""
    assert kind_of_config(config) is None


def test_a_language_model_is_no_net_and_is_refused_by_name(tmp_path: Path) -> None:
    """Guards against a draft model for `linear` read as a net, and an error that does not say what could be read."""
    folder = str(save_tiny_model(tmp_path))
    assert not is_net(folder)
    with pytest.raises(
        ModelError,
        match=r"LlamaForCausalLM.*known kinds are dspark, dflash2, domino, lattice, dflash, dart, eagle3, medusa",
    ):
        load_net(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"3"])
def test_a_damaged_config_is_no_net_yet(content: bytes, tmp_path: Path) -> None:
    """Guards against a traceback from the question alone; whoever reads the folder will say what is wrong."""
    assert not is_net(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_bytes(content)
    assert not is_net(str(tmp_path))
    with pytest.raises(ModelError, match=r"config\.json: (not JSON|must hold an object)"):
        load_net(str(tmp_path))


@pytest.mark.parametrize("kind", NETS)
def test_every_weight_counts(kind: str) -> None:
    """Guards against a drafter trained on from another one, in all of its layers or one, passing for it."""
    net = NETS[kind]()
    own = fingerprint(net)
    assert own == fingerprint(NETS[kind]())
    assert own.startswith(f"{type(net).__name__}-")
    for name, weight in net.named_parameters():
        before = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(1.01)
        assert fingerprint(net) != own, name
        with torch.no_grad():
            weight.copy_(before)
    assert fingerprint(net) == own


def test_kind_and_config_count() -> None:
    """Guards against nets of the same weights that draft differently, as with labels shifted by one, taken for one."""
    domino, other = small_domino(), small_domino(shift_label=False)
    other.load_state_dict(domino.state_dict())
    assert isinstance(other, DominoNet)
    assert fingerprint(domino) != fingerprint(other)


def test_layout_and_wider_dtypes_do_not_count(tmp_path: Path) -> None:
    """Guards against gates refused by the drafter they were calibrated for, since its file was converted."""
    net = eagle3_net(torch.bfloat16)
    write_net(net, tmp_path / "one", "midlayer")
    write_net(net, tmp_path / "two", "speculators")
    first = fingerprint(load_net(str(tmp_path / "one")))
    assert first == fingerprint(load_net(str(tmp_path / "two")))
    assert first == fingerprint(load_net(str(tmp_path / "one")).float())
