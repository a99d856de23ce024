"""The fingerprint of a drafter: the same for the same net, however it was written, and another for any other net."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from outpace.drafters.domino.net import DominoNet
from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.drafters.kinds import write_net
from outpace.drafters.load import fingerprint, load_net
from outpace.drafters.medusa.net import MedusaConfig, MedusaNet
from tests.unit.drafters.net.block_nets import small_dflash, small_domino
from tests.unit.drafters.source.learned import SIZES, random_net


def eagle3() -> Eagle3Net:
    net: Eagle3Net = random_net(Eagle3Net(Eagle3Config(**SIZES, taps=(0, 1, 2), draft_vocab_size=160)))
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "eagle3": eagle3,
    "dflash": small_dflash,
    "domino": small_domino,
    "medusa": lambda: random_net(MedusaNet(MedusaConfig(hidden_size=8, vocab_size=60, draft_vocab_size=60, heads=2))),
}


@pytest.mark.parametrize("kind", NETS)
def test_every_weight_counts(kind: str) -> None:
    """Guards against a drafter trained on from another one, in all of its layers or one, passing for it."""
    net: nn.Module = NETS[kind]()
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
    """Guards against nets of the same weights that draft differently, as with labels shifted by one, told as one."""
    domino, other = small_domino(), small_domino(shift_label=False)
    other.load_state_dict(domino.state_dict())
    assert isinstance(other, DominoNet)
    assert fingerprint(domino) != fingerprint(other)


def test_layout_and_wider_dtypes_do_not_count(tmp_path: Path) -> None:
    """Guards against gates refused by the drafter they were calibrated for, since its file was converted."""
    net = eagle3().to(torch.bfloat16)
    write_net(net, tmp_path / "one", "midlayer")
    write_net(net, tmp_path / "two", "speculators")
    first = fingerprint(load_net(str(tmp_path / "one")))
    assert first == fingerprint(load_net(str(tmp_path / "two")))
    assert first == fingerprint(load_net(str(tmp_path / "one")).float())
