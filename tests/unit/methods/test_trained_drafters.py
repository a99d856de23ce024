"""Trained drafters through the front door: from a folder in a public layout to tokens, and refusals by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace.core.tree import DraftTree
from outpace.drafters.dart.net import DartConfig, DartNet
from outpace.drafters.dart.ngrams import count_ngrams, save_ngrams
from outpace.drafters.dflash.net import DFlashConfig, DFlashNet
from outpace.drafters.dflash.source import BlockSource
from outpace.drafters.domino.net import DominoConfig, DominoNet
from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.drafters.kinds import write_net
from outpace.drafters.lattice.net import LatticeConfig, LatticeNet
from outpace.drafters.medusa.net import MedusaConfig, MedusaNet
from outpace.drafters.ranked_vocabulary import save_vocabulary
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.methods.catalog import build_proposer, parse_method
from outpace.methods.defaults import with_draft
from outpace.models.loading.shipped import Shipment
from outpace.trees.proposer import GrowingProposer
from outpace.trees.shapes.beam import Beam, BeamConfig
from outpace.trees.shapes.gates import Gated
from outpace.trees.union.proposer import UnionProposer
from tests.unit.drafters.source.learned import BLOCK, PROMPTS, SIZES, random_net
from tests.unit.engine.doubles import heard
from tests.unit.models.tiny import random_ids, save_tiny_model
from tests.unit.trees.recorded import Trees, trees_of

OURS: dict[str, Any] = SIZES | {"vocab_size": 264}
HEAD: dict[str, Any] = {"emb_dim": 8, "gru_hidden_dim": 12, "shift_label": True, "pure_draft_prefix_len": 1}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_drafters(tmp_path_factory.mktemp("drafters"))


NETS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "eagle3": (Eagle3Net, Eagle3Config, OURS | {"taps": (0, 1, 2), "draft_vocab_size": 264}, "speculators"),
    # The layout says no taps: the usual three depend on the target, and of three layers 0, 1 and 2 are tapped.
    "dart": (DartNet, DartConfig, OURS | {"draft_vocab_size": 264, "draft_length": 3}, ""),
    "dflash": (DFlashNet, DFlashConfig, OURS | BLOCK, ""),
    "domino": (DominoNet, DominoConfig, OURS | BLOCK | HEAD, "sglang"),
    "medusa": (MedusaNet, MedusaConfig, {"hidden_size": 48, "vocab_size": 264, "heads": 4}, "authors"),
    "lattice": (LatticeNet, LatticeConfig, OURS | BLOCK | {"rank": 6, "candidates": 9}, ""),
}  # fmt: skip
"""Net, config, sizes for the model of `save_tiny_model`, and layout of each kind."""


def write_drafter(kind: str, folder: Path, **changes: Any) -> Path:
    """A random drafter, whose sizes may be others."""
    net, config, sizes, layout = NETS[kind]
    write_net(random_net(net(config(**sizes | changes))), folder, layout)
    return folder


def write_drafters(folder: Path) -> dict[str, Path]:
    """A random drafter of each kind, for the model of `save_tiny_model`."""
    return {kind: write_drafter(kind, folder / kind) for kind in NETS}


def load(target: Path, method: str, drafter: Path | str | None = None, dtype: str = "float32") -> outpace.Model:
    return outpace.load(target, method, drafter=drafter, dtype=dtype, device="cpu")


@pytest.mark.parametrize(
    "method",
    [
        "eagle3:budget=12,depth=4,breadth=3", "eagle3:shape=chain,budget=4", "eagle3:shape=dynatree,budget=12",
        "eagle3:shape=svip,budget=12,entropy_threshold=2", "ddd:budget=12,breadth=3,checkpoints=2,min_beam_prob=0.01",
        "echo:budget=12,breadth=3,thresholds=0.01/0.01/0.01", "graft:budget=12,breadth=3,thresholds=0.05/0.05/0.05",
        "graft:budget=12,shape=beam,reserved=0.5,retrieve=both,breadth=3", "graft-dflash:budget=6,min_prob=0.01",
        "graft-domino:budget=6,min_prob=0.01,retrieve=both",
        "domino:shape=beam,budget=12,depth=3,breadth=3,retrieve=suffix,reserved=0.3", "lattice",
        "lattice:shape=chain", "lattice:budget=9,depth=3,retrieve=suffix,reserved=0.3",
        "outpace:draft=lattice,budget=12", "outpace:draft=domino,budget=12",
        "outpace:draft=eagle3,budget=12,depth=2",
        "outpace:draft=dflash,budget=12,retrieve=none",
        "outpace:draft=eagle3,budget=12,matrix=private", "dart",
        "dart:budget=12,depth=4,breadth=3", "dart:shape=beam,budget=12,depth=4,breadth=3", "dart:shape=chain",
        "dart:shape=dynatree,budget=12", "medusa", "medusa:shape=beam,budget=12,depth=3,breadth=3",
        "tokenswift:keep=17,budget=12", "dflash", "dflash:shape=beam,budget=12,depth=3,breadth=3", "domino",
        "domino:head=false",
        "domino:shape=fixed,budget=12,pool=20,depth=3,breadth=2,min_path_prob=0",
        "domino:shape=gated,budget=12,breadth=3,checkpoints=1/2,kept=8/24,thresholds=0.01/0.01",
        "domino:shape=dynatree,budget=12,depth=3,base_depth=2,min_path_prob=1e-6",
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_drafters_are_lossless(method: str, options: dict[str, Any], target: Path, drafters: dict[str, Path]) -> None:
    """Guards against a method wired to the wrong embedding, head or hidden states: it would draft."""
    model = load(target, method, drafters[parse_method(method).drafter or ""])
    expected = [model.generate(prompt, max_new_tokens=20, method="plain", **options).token_ids for prompt in PROMPTS]
    answers = model.generate(PROMPTS, max_new_tokens=20, **options)
    assert [answer.token_ids for answer in answers] == expected
    assert all(answer.metrics.drafted for answer in answers)


def test_domino_without_its_head_drafts_the_block_alone(target: Path, drafters: dict[str, Path]) -> None:
    """Guards against an ablation of the causal head that still corrects."""
    for method, is_bare in (("domino:pool=0", False), ("domino:pool=0,head=false", True)):
        source = load(target, method, drafters["domino"]).proposer(method).source  # type: ignore[attr-defined]
        assert (type(source) is BlockSource) == is_bare


@pytest.mark.parametrize("kind", ["dflash", "domino"])
def test_grafted_blocks_verify_no_more_than_blocks(kind: str, target: Path, drafters: dict[str, Path]) -> None:
    """Guards against Graft on blocks measured with more rows than the block it is compared with: the paper's B."""
    model = load(target, "plain", drafters[kind])
    block, grafted = model.proposer(kind), model.proposer(f"graft-{kind}")
    assert grafted.budget == block.budget == 5
    most = []
    for method in (kind, f"graft-{kind}:min_prob=0.5"):
        answer = model.generate(PROMPTS[0], max_new_tokens=20, method=method)
        most.append(answer.metrics.drafted / answer.metrics.steps)
    assert 0 < most[1] <= most[0] <= 5


def test_graft_and_echo_draft_the_papers_tree(target: Path, drafters: dict[str, Path]) -> None:
    """Guards against Graft off the CPU in another tree than the paper's: 60 nodes, 8, 24 or 40 of them kept, 9 deep."""
    model = load(target, "plain", drafters["eagle3"])
    context = model.drafters.context_for("eagle3")
    elsewhere = replace(context, device=torch.device("cuda"))
    for method, trees in (
        ("echo", ((7, 8), (60, 9))),
        ("graft:retrieve=none", ((7, 8), (60, 9))),
        ("graft:retrieve=none,shape=beam", ((7, 8), (60, 9))),
        ("graft:retrieve=none,depth=7,budget=20", ((20, 7), (20, 7))),
        ("eagle3", ((7, 8), (59, 8))),
    ):
        for where, (budget, depth) in zip((context, elsewhere), trees, strict=True):
            proposer = build_proposer(parse_method(method), where)
            assert isinstance(proposer, GrowingProposer)
            assert isinstance(proposer.shape, Beam)
            assert (proposer.budget, proposer.shape.config.depth) == (budget, depth)
            if isinstance(proposer.shape, Gated) and budget == 60:
                assert [proposer.shape.share(60, stage) for stage in range(3)] == [8, 24, 40]


@pytest.mark.parametrize(
    ("options", "depth"), [("", 3), (",budget=9", 8), (",budget=9,priced=true", 3), (",budget=9,depth=2", 2)]
)
def test_a_budget_deepens_the_drafts_of_the_union_unless_a_depth_is_named(
    target: Path, drafters: dict[str, Path], options: str, depth: int
) -> None:
    """Guards against a tree of a given size whose deep nodes are guesses of retrieval, as its draft ends at depth 3;
    and against options that are read and then forgotten."""
    union = load(target, "plain", drafters["eagle3"]).proposer(f"outpace:draft=eagle3{options}")
    assert isinstance(union, UnionProposer)
    assert isinstance(union.base, GrowingProposer)
    assert isinstance(union.base.shape, Beam)
    assert union.base.shape.config == BeamConfig(depth=depth, breadth=10)
    assert "budget=9" not in options or union.budget == 9


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("vocabulary") / "ids.safetensors"
    save_vocabulary(file, torch.arange(0, 264, 2), 264)
    return file


FREQUENT = ("fr-spec", "eagle3", "dart", "medusa", "dflash", "domino", "linear", "fixed", "dynatree")


@pytest.mark.parametrize("method", [*FREQUENT, "outpace:draft=domino,retrieve=none"])
def test_frequent_tokens_alone_are_drafted(
    method: str, target: Path, drafters: dict[str, Path], vocabulary: Path
) -> None:
    """Guards against the option being dropped on the way, and against an answer restricted with the drafts."""
    name, drafted = f"{method}{',' if ':' in method else ':'}vocabulary={vocabulary}", list[DraftTree]()
    model = load(target, name, drafters.get(parse_method(method).drafter or ""))
    heard(model.proposer(name), lambda request, tree: drafted.append(tree))
    expected = [model.generate(prompt, max_new_tokens=20, method="plain").token_ids for prompt in PROMPTS]
    assert [answer.token_ids for answer in model.generate(PROMPTS, max_new_tokens=20)] == expected
    tokens = torch.cat([tree.tokens[1:] for tree in drafted])
    assert len(tokens)
    assert not bool((tokens % 2).any())
    assert any(token % 2 for ids in expected for token in ids)


def test_fr_spec_needs_a_vocabulary_and_a_full_head(target: Path, drafters: dict[str, Path], tmp_path: Path) -> None:
    """Guards against FR-Spec by name that drafts from everything, or thins out what is thinned out already."""
    eagle = random_net(Eagle3Net(Eagle3Config(**OURS, taps=(0, 1, 2), draft_vocab_size=60)))
    eagle.d2t.zero_()
    write_net(eagle, tmp_path / "ranked", "speculators")
    save_vocabulary(tmp_path / "other", torch.arange(100), 300)
    for method, drafter, complaint in (
        ("fr-spec", drafters["eagle3"], "vocabulary=FILE is missing; make one"),
        ("fr-spec:vocabulary=x", tmp_path / "ranked", "draft_vocab_size=60 of 264; use method 'eagle3'"),
        ("fr-spec:vocabulary=x", drafters["dflash"], "'fr-spec:vocabulary=x' needs a drafter of kind eagle3"),
        ("fr-spec:vocabulary=x", drafters["eagle3"], "vocabulary=x: cannot be read"),
        (f"eagle3:vocabulary={tmp_path / 'other'}", drafters["eagle3"], "made for 300 ids, and the target has 264"),
    ):
        with pytest.raises((InvalidRequest, ModelError), match=complaint):
            load(target, method, drafter)


def test_the_wrong_kind_of_drafter_is_refused(target: Path, drafters: dict[str, Path]) -> None:
    """Guards against a net of one kind run as another, a language model read as a net, or the reverse."""
    wanted = {"linear": "a language model"} | {kind: f"a drafter of kind {kind}" for kind in drafters}
    union = ("domino", "dflash", "eagle3", "lattice")
    wanted |= {f"outpace:draft={kind}": f"a drafter of kind {kind}" for kind in union}
    wanted |= {"samd:draft=eagle3": wanted["eagle3"], "graft-dflash": wanted["dflash"]}
    wanted |= {"graft": wanted["eagle3"], "fixed": wanted["linear"]}
    remedy = {kind: f"outpace:draft={kind}" for kind in union} | {"language": "outpace:draft=linear"}
    for kind, drafter in (*drafters.items(), ("language", target)):
        model = load(target, "plain", drafter)
        named = "a language model" if kind == "language" else f"a drafter of kind {kind}"
        for method, needs in wanted.items():
            if needs == named or (kind == "domino" and needs == wanted["dflash"]):
                model.proposer(method)
                continue
            with pytest.raises(InvalidRequest) as refused:
                model.proposer(method)
            assert str(refused.value) == (
                f"drafter={str(drafter)!r} is {named}, and method {method!r} needs {needs}: name another drafter, or "
                f"use this one with method {remedy.get(kind, kind)!r}"
            )
    with pytest.raises(InvalidRequest, match="needs a trained drafter of kind domino: name its checkpoint"):
        load(target, "domino")
    with pytest.raises(InvalidRequest, match="is a language model, and method 'eagle3' needs a drafter of kind eagle3"):
        load(target, "eagle3", "early-exit:1")


def test_the_union_drafts_with_what_was_given(target: Path, drafters: dict[str, Path]) -> None:
    """Guards against a union that wants Domino whatever drafter it gets, and one that leaves a drafter aside."""
    for kind in ("domino", "dflash", "eagle3", "lattice"):
        model = load(target, "outpace:budget=9", drafters[kind])
        assert model.method_name == f"outpace:budget=9,draft={kind}"
        assert model.proposer("outpace:budget=9") is model.proposer(model.method), "one, under both names"
    assert load(target, "outpace", target).method_name == "outpace:draft=linear"
    assert load(target, "outpace").method_name == "outpace:draft=none"
    with pytest.raises(InvalidRequest, match=r"is a drafter of kind medusa, .* use this one with method 'medusa'"):
        load(target, "outpace", drafters["medusa"])
    with pytest.raises(InvalidRequest, match="depth=2: does nothing with draft=none; choose a draft"):
        load(target, "outpace:depth=2")


def test_a_chain_longer_than_the_block_is_refused(target: Path, drafters: dict[str, Path]) -> None:
    """Guards against a request for more drafts than a block has that is cut in silence, and one whose further nodes
    retrieval fills that is refused."""
    for method in ("dflash", "domino"):
        with pytest.raises(InvalidRequest, match="budget=6, but a block of this drafter drafts 5 tokens"):
            load(target, f"{method}:budget=6", drafters[method])
        load(target, f"{method}:budget=5", drafters[method])
        load(target, f"{method}:budget=6,retrieve=suffix", drafters[method])


VOCABULARY = {"vocab_size": 300, "draft_vocab_size": 300}, "vocab_size=300 of the drafter: the target has 264"
WIDTH = {"hidden_size": 32, "target_hidden_size": 32}, "target_hidden_size=32 of the drafter: the target has 48"


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        ("dflash", {"vocab_size": 300}, "vocab_size=300"),
        ("dflash", {"hidden_size": 32, "target_hidden_size": 32}, "hidden_size=32"),
        ("dflash", {"target_layers": 9, "target_layer_ids": (0, 8)}, "target_layers=9"),
        ("eagle3", *VOCABULARY),
        ("eagle3", *WIDTH),
        ("eagle3", {"taps": (0, 1, 3)}, r"taps \(0, 1, 3\) do not fit a target of 3 layers: 0 to 2 exist"),
        ("dart", *VOCABULARY),
        ("dart", *WIDTH),
        ("medusa", {"hidden_size": 32}, "hidden_size=32 of the drafter: the target has 48"),
    ],
)
def test_a_drafter_for_another_target_is_refused(
    kind: str, changes: dict[str, Any], complaint: str, target: Path, tmp_path: Path
) -> None:
    """Guards against other widths, vocabularies or taps than the target's, caught at the first product or never."""
    with pytest.raises(ModelError, match=complaint):
        load(target, kind, write_drafter(kind, tmp_path, **changes))


def test_a_net_is_read_in_the_targets_dtype(target: Path, drafters: dict[str, Path]) -> None:
    """Guards against a product of two dtypes at the first round."""
    model = load(target, "domino", drafters["domino"], dtype="bfloat16")
    assert {weight.dtype for weight in model.drafters.net("domino").parameters()} == {model.target.dtype}
    plain = model.generate(PROMPTS[0], max_new_tokens=10, method="plain").token_ids
    assert model.generate(PROMPTS[0], max_new_tokens=10).token_ids == plain


@pytest.mark.parametrize("shape", ["search", "beam", "dynatree", "chain"])
def test_dart_takes_an_ngram_table(shape: str, target: Path, drafters: dict[str, Path], tmp_path: Path) -> None:
    """Guards against a table that is never asked, one that changes the answer, and one for another vocabulary."""
    for name, size in (("ngrams", 264), ("other", 300)):
        save_ngrams(tmp_path / name, count_ngrams([random_ids(4000, 6, 264)], size, 10_000))
    model = load(target, "plain", drafters["dart"])
    expected = [model.generate(prompt, max_new_tokens=20).token_ids for prompt in PROMPTS]
    drafted: list[Trees] = []
    for ngrams in ("", f",ngrams={tmp_path / 'ngrams'}"):
        method = f"dart:shape={shape}{ngrams}"
        drafted.append(trees_of(model.proposer(method)))
        assert [model.generate(prompt, max_new_tokens=20, method=method).token_ids for prompt in PROMPTS] == expected
    assert drafted[0] != drafted[1]
    for name, complaint in (("other", "made for 300 ids, and the target has 264"), ("none", "cannot be read")):
        with pytest.raises(ModelError, match=complaint):
            model.proposer(f"dart:ngrams={tmp_path / name}")


def test_no_draft_is_left_to_the_drafters_at_hand() -> None:
    """Guards against a TypeError for an option that is None, as others may be."""
    assert str(with_draft(outpace.method("outpace", draft=None), None, Shipment())) == "outpace:draft=none"
