"""DSpark's checkpoints in three public layouts. Its heads are held against the paper's equations by their training."""

import pytest
import torch

from outpace.drafters.dspark.files import NAMES, export_dspark, read_dspark
from outpace.drafters.dspark.net import DSparkNet
from outpace.drafters.kinds import KINDS, kind_of_config
from outpace.lib.checkpoint import Checkpoint
from tests.unit.drafters.net.block_nets import MARKOV, small_dspark, speculators_files
from tests.unit.drafters.net.test_dflash_layout import Edit, add, assert_refused, both, in_memory, put, rename


def written(layout: str, net: DSparkNet, edit: Edit | None = None) -> Checkpoint:
    """A drafter as each project writes it, spoilt by `edit`."""
    config, tensors = export_dspark(net, "specforge")
    if layout == "deepspec":
        inner = config.pop("dflash_config")
        del inner["attention_mode"], inner["projector_type"]
        config |= inner | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
        tensors |= {"embed_tokens.weight": torch.zeros(61, 24), "lm_head.weight": torch.zeros(61, 24)}
    if layout == "speculators":
        config = speculators_files(net, "dspark")[0] | MARKOV | {"markov_head_type": "vanilla"}
        config["sample_from_anchor"] = True
    return in_memory(config, tensors, edit)


PUBLIC = list(NAMES)
FILES: dict[str, tuple[str, Edit | None]] = {
    "specforge": ("specforge", None),
    "deepspec": ("deepspec", None),
    "speculators": ("speculators", None),
    "early names": ("specforge", both(*(rename(name, f"logit_head.{name}") for name in PUBLIC))),
    "projector alone": ("specforge", put("architectures", value=None)),
    "a head reads the token before": ("specforge", put("dflash_config", "confidence_head_with_markov", value=None)),
    "a loss's weight decides": (
        "specforge",
        both(
            put("dflash_config", "enable_confidence_head", value=None),
            put("dflash_config", "confidence_head_alpha", value=1.0),
        ),
    ),
}


@pytest.mark.parametrize(("layout", "edit"), FILES.values(), ids=FILES.keys())
def test_every_layout_and_generation_means_the_same(layout: str, edit: Edit | None) -> None:
    """Guards against files that people have and that load as a plain DFlash drafter, or not at all."""
    net = small_dspark(torch.float32, target_layers=None)
    checkpoint = written(layout, net, edit)
    assert kind_of_config(checkpoint.config) is KINDS["dspark"]
    again = read_dspark(checkpoint)
    assert again.config == net.config
    assert again.state_dict().keys() == net.state_dict().keys()
    assert all(torch.equal(again.state_dict()[key], weight) for key, weight in net.state_dict().items())


SPOILT: dict[str, tuple[str, Edit, list[str]]] = {
    "head": ("specforge", put("dflash_config", "markov_head_type", value="gated"), ["'gated'", "vanilla"]),
    "attention": ("specforge", put("dflash_config", "attention_mode", value="mla"), ["'mla'", "gqa or mha"]),
    "projector": ("specforge", put("dflash_config", "projector_type", value="domino"), ["'domino'", "dspark"]),
    "no rank": ("specforge", put("dflash_config", "markov_rank", value=None), ["markov_rank is missing"]),
    "rank": ("specforge", put("dflash_config", "markov_rank", value=8), ["head.predecessors has shape [61, 7]"]),
    "rank 0": ("specforge", put("dflash_config", "markov_rank", value=0), ["markov_rank=0"]),
    "twice": ("specforge", add(f"logit_head.{PUBLIC[0]}", torch.zeros(61, 7)), ["markov_w1.weight twice"]),
    "unknown": ("specforge", put("dflash_config", "predecessor_context", value=1), ["predecessor_context", "unknown"]),
    "anchor": ("speculators", put("sample_from_anchor", value=False), ["sample_from_anchor=false"]),
    "pruned": ("speculators", put("draft_vocab_size", value=50), ["draft_vocab_size=50"]),
}


@pytest.mark.parametrize(("layout", "edit", "named"), SPOILT.values(), ids=SPOILT.keys())
def test_what_does_not_fit_is_named(layout: str, edit: Edit, named: list[str]) -> None:
    """Guards against heads read with guessed conventions: they would correct towards the wrong tokens."""
    assert_refused(read_dspark, written(layout, small_dspark(torch.float32, target_layers=None), edit), named)
