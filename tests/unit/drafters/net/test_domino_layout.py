"""Domino checkpoints in their public layouts: there and back, generations, stripping, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.drafters.dflash.files import export_dflash, read_dflash
from outpace.drafters.domino.files import export_domino, is_domino, read_domino
from outpace.lib.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from outpace.lib.errors import ModelError
from tests.unit.drafters.net.block_nets import small_dflash, small_domino
from tests.unit.drafters.net.test_dflash_layout import Edit, add, assert_refused, both, in_memory, put, rename

HEAD_NAMES = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight")


def exported(layout: str = "domino", edit: Edit | None = None, **changes: Any) -> Checkpoint:
    return in_memory(*export_domino(small_domino(torch.float32, **changes), layout), edit)


@pytest.mark.parametrize(
    "edit",
    [
        put("emb_dim", value=None),
        put("dflash_config", "emb_dim", value=None),
        both(put("dflash_config", "projector_type", value=None), put("projector_type", value="domino")),
        both(*(rename(name, f"logit_head.{name}") for name in HEAD_NAMES)),
    ],
    ids=["rank inside", "rank at the top", "projector at the top", "early names"],
)
def test_other_generations_mean_the_same(edit: Edit) -> None:
    """Guards against reading one generation of the layout only."""
    back, net = read_domino(exported(edit=edit)), small_domino(torch.float32)
    assert back.config == net.config
    assert all(torch.equal(back.state_dict()[key], tensor) for key, tensor in net.state_dict().items())


SPOILT: dict[str, tuple[Edit, list[str]]] = {
    "long prefix": (put("dflash_config", "pure_draft_prefix_len", value=5), ["pure_draft_prefix_len=5", "block_size"]),
    "legacy": (put("dflash_config", "projector_type", value="causal_v5"), ["causal_v5", "early"]),
    "other projector": (put("dflash_config", "projector_type", value="dspark"), ["dspark", "'domino'"]),
    "no projector": (put("dflash_config", "projector_type", value=None), ["projector_type is missing"]),
    "two ranks": (put("emb_dim", value=256), ["emb_dim=256", "emb_dim=7", "agree"]),
    "no rank": (
        both(put("emb_dim", value=None), put("dflash_config", "emb_dim", value=None)),
        ["dflash_config", "emb_dim is missing"],
    ),
    "rank and weights": (
        both(put("emb_dim", value=8), put("dflash_config", "emb_dim", value=8)),
        ["embed_proj.0.weight has shape [7, 34], its config says [8, 34]"],
    ),
    "state and weights": (put("dflash_config", "gru_hidden_dim", value=12), ["weight_hh_l0 has shape [30, 10]"]),
    "alignment no flag": (put("dflash_config", "shift_label", value="yes"), ["shift_label='yes'"]),
    "mask outside": (put("dflash_config", "mask_token_id", value=61), ["mask_token_id=61", "vocab_size=61"]),
    "unknown field": (put("dflash_config", "use_correction_target_fusion", value=True), ["use_correction_target"]),
    "twice": (add("logit_head.embed_proj.0.weight", torch.zeros(7, 34)), ["embed_proj.0.weight twice"]),
    "early nonsense": (add("logit_head.gate.weight", torch.zeros(3)), ["unexpected logit_head.gate.weight"]),
    "other net": (put("architectures", value=["DSparkDraftModel"]), ["DSparkDraftModel"]),
}


@pytest.mark.parametrize(("edit", "named"), SPOILT.values(), ids=SPOILT.keys())
def test_what_does_not_fit_is_named(edit: Edit, named: list[str]) -> None:
    """Guards against a head read with guessed conventions: it would correct towards the wrong tokens."""
    assert_refused(read_domino, exported(edit=edit), named)


def test_kinds_are_told_apart() -> None:
    """Guards against a Domino drafter run without its head, and a plain one asked for one."""
    plain = Checkpoint("plain", *export_dflash(small_dflash()))
    assert not is_domino(plain.config)
    with pytest.raises(ModelError, match="read it as DFlash"):
        read_domino(plain)
    for layout in ("domino", "sglang"):
        with pytest.raises(ModelError, match=r"Domino|DominoDraftModel"):
            read_dflash(exported(layout))


RANKED = torch.tensor([0, 3, 4, 9])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_of_ids_that_are_never_drafted_may_stay_away(dtype: torch.dtype, tmp_path: Path) -> None:
    """Guards against rows that come back under other ids, and corrections of ids that have none."""
    net = small_domino(torch.float32)
    write_checkpoint(tmp_path, *export_domino(net, "domino", ids=RANKED))
    checkpoint = read_checkpoint(tmp_path)
    assert list(checkpoint.tensors["embed_proj.2.weight"].shape) == [4, 7]
    tensors = {**checkpoint.tensors, "embed_proj.ids": RANKED.to(dtype)}
    back = read_domino(Checkpoint("ranked", checkpoint.config, tensors))
    assert back.config == net.config
    for key, tensor in net.state_dict().items():
        if key != "head.embed_proj.2.weight":
            assert torch.equal(back.state_dict()[key], tensor), key
    assert torch.equal(back.head.vocabulary_weight[RANKED], net.head.vocabulary_weight[RANKED])
    others = torch.ones(net.config.vocab_size, dtype=torch.bool).index_fill(0, RANKED, False)
    assert not bool(back.head.vocabulary_weight[others].any())


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (torch.tensor([0, 3, 4]), "names 3 rows"),
        (torch.tensor([0, 3, 3, 9]), "ascending ids"),
        (torch.tensor([-1, 3, 4, 9]), "ascending ids"),
        (torch.tensor([0, 3, 4, 10**6]), "ascending ids"),
        (torch.tensor([0.0, 3.0, 4.0, 9.0]), "list of ids"),
        (torch.tensor([], dtype=torch.int32), "list of ids"),
    ],
)
def test_rows_of_unclear_ids_are_refused(ids: Tensor, named: str) -> None:
    """Guards against corrections of the wrong tokens, which cost speed and say nothing."""
    config, tensors = export_domino(small_domino(torch.float32), "domino", ids=RANKED)
    tensors["embed_proj.ids"] = ids
    with pytest.raises(ModelError, match=named):
        read_domino(Checkpoint("ranked", config, tensors))
    del tensors["embed_proj.2.weight"]
    with pytest.raises(ModelError, match=r"embed_proj"):
        read_domino(Checkpoint("ranked", config, tensors))


def test_what_a_public_layout_cannot_say_is_not_written() -> None:
    """Guards against a prefix that a server would ignore, and an export without some rows, which none can read."""
    with pytest.raises(ModelError, match="pure_draft_prefix_len=0"):
        export_domino(small_domino(pure_draft_prefix_len=0), "sglang")
    with pytest.raises(ModelError, match="layout 'domino', or all rows"):
        export_domino(small_domino(shift_label=False), "sglang", ids=RANKED)
