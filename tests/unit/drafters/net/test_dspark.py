"""DSpark: its heads by the paper's equations, and its checkpoints in three public layouts."""

import pytest
import torch

from outpace.drafters.dspark.files import NAMES, export_dspark, read_dspark
from outpace.drafters.dspark.net import DSparkNet
from outpace.drafters.kinds import kind_of_config
from outpace.lib.checkpoint import Checkpoint
from tests.unit.drafters.net.block_nets import MARKOV, small_dspark, speculators_files
from tests.unit.drafters.net.small import randn
from tests.unit.drafters.net.test_dflash_layout import Edit, add, assert_refused, both, in_memory, put, rename


def test_the_heads_are_the_papers_equations() -> None:
    """Guards against a bias of the token drafted instead of the one before, and a confidence of other inputs."""
    net, hidden = small_dspark(), randn(3, 24)
    weights, tokens = net.state_dict(), torch.tensor([5, 0, 60])
    base = randn(3, 61, seed=4)
    rows = net.head.predecessors[tokens]
    scores, confidence = net.head.scores(base, rows, hidden), net.head.confidence(rows, hidden)
    assert confidence is not None
    for row, token in enumerate(tokens.tolist()):
        before = weights["head.predecessors"][token]
        for word in range(61):
            expected = base[row, word] + before @ weights["head.successors"][word]
            assert scores[row, word].item() == pytest.approx(expected.item())
        logit = (
            weights["head.confidence_weight"][0] @ torch.cat((hidden[row], before)) + weights["head.confidence_bias"]
        )
        assert confidence[row].item() == pytest.approx(logit.item(), rel=1e-5)
    steps = [net.config.draft_position(depth) for depth in range(1, net.config.drafts_per_block() + 1)]
    assert steps == [0, 1, 2, 3, 4]  # the anchor's position drafts: as many drafts as the block has tokens


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


@pytest.mark.parametrize("layout", ["specforge", "deepspec", "speculators"])
def test_every_layout_means_the_same(layout: str) -> None:
    """Guards against files that people have and that load as a plain DFlash drafter, or not at all."""
    net = small_dspark(torch.float32, target_layers=None)
    checkpoint = written(layout, net)
    kind = kind_of_config(checkpoint.config)
    assert kind is not None
    assert kind.name == "dspark"
    again = read_dspark(checkpoint)
    assert again.config == net.config
    assert again.state_dict().keys() == net.state_dict().keys()
    assert all(torch.equal(again.state_dict()[key], weight) for key, weight in net.state_dict().items())


PUBLIC = list(NAMES)
OTHERS: dict[str, Edit] = {
    "early names": both(*(rename(name, f"logit_head.{name}") for name in PUBLIC)),
    "projector alone": put("architectures", value=None),
    "a loss's weight decides": both(
        put("dflash_config", "enable_confidence_head", value=None),
        put("dflash_config", "confidence_head_alpha", value=1.0),
    ),
}


@pytest.mark.parametrize("edit", OTHERS.values(), ids=OTHERS.keys())
def test_other_generations_mean_the_same(edit: Edit) -> None:
    """Guards against reading one generation of SpecForge's layout only."""
    net = small_dspark(torch.float32)
    checkpoint = written("specforge", net, edit)
    kind = kind_of_config(checkpoint.config)
    assert kind is not None
    assert kind.name == "dspark"
    assert read_dspark(checkpoint).config == net.config


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
