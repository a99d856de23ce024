"""Drafters that ship with the project: by name, by default, one per kind of method, with their vocabulary; and the
packages that hold them."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copyfile, copytree, rmtree

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import outpace
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.drafters.kinds import write_net
from outpace.drafters.load import load_net
from outpace.drafters.ranked_vocabulary import save_vocabulary
from outpace.kernels.build import loaded_kernels
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.methods import stores
from outpace.methods.stores import matrix_of
from outpace.models.loading.shipped import TARGET, Shipment, find_drafter, shipped, shipped_folder, shipped_for, size_of
from outpace.trees.retrieval.transition_matrix import TransitionMatrix
from outpace.trees.retrieval.warm_file import save_matrix
from tests.unit.api.shipment import KINDS, describe, install, load, ship
from tests.unit.drafters.source.learned import PROMPTS, random_net
from tests.unit.methods.test_trained_drafters import OURS, write_drafter
from tests.unit.models.tiny import needs_kernels, save_tiny_model, write_tiny_gguf

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ship(tmp_path_factory.mktemp("root")).parent


@pytest.fixture(autouse=True)
def drafters(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ships, and an empty folder to stand in."""
    install(monkeypatch, root, root / "drafters")
    monkeypatch.chdir(tmp_path)
    return root / "drafters" / "tiny"


def drafted(model: outpace.Model, method: str | None = None) -> torch.Tensor:
    """Tokens that a method drafts, whose answers must be plain decoding's."""
    proposer, seen = model.proposer(method or model.method), []
    propose = proposer.propose
    proposer.propose = lambda *given: seen.append(propose(*given)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    plain = [model.generate(prompt, max_new_tokens=16, method="plain").token_ids for prompt in PROMPTS]
    assert [answer.token_ids for answer in model.generate(PROMPTS, max_new_tokens=16, method=method, budget=8)] == plain
    proposer.propose = propose  # type: ignore[method-assign]
    return torch.cat([tree.tokens[1:] for trees in seen for tree in trees])


def test_one_model_serves_methods_of_many_kinds_each_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one net for all methods, against all nets read at the start, and against one read twice."""
    read: list[str] = []

    def reading(name: str) -> nn.Module:
        read.append(Path(name).name)
        return load_net(name)

    monkeypatch.setattr(stores, "load_net", reading)
    model = load("tiny", "domino")
    assert read == ["domino"]
    for method in ("domino", "dflash", "eagle3", "fr-spec", "domino:shape=beam", "linear", "fixed", "dynatree"):
        assert len(drafted(model, method)), method
    assert read == ["domino", "dflash", "eagle3"]
    assert model.drafters.language_model().config.num_hidden_layers == 1, "not early exit, which has two layers"


def test_a_drafter_is_named_as_its_target_and_kind(drafters: Path) -> None:
    """Guards against the name of a shipped drafter sought on a hub, one that hides a folder of the user's, and a
    shipped drafter taken instead of the one that was asked for."""
    assert find_drafter("tiny/domino") == str(drafters / "domino")
    assert find_drafter("owner/name") == "owner/name"
    folder = str(drafters.parents[1] / "home" / "models" / "tiny")
    assert isinstance(load(folder, "domino", drafter="tiny/domino").drafters.net("domino"), DominoNet)
    config = {"method": "draft_model", "model": "tiny/draft-lm", "num_speculative_tokens": 2}
    assert load(folder, speculative_config=config).drafters.language_model().config.num_hidden_layers == 1
    assert load("tiny", "linear", drafter="early-exit:2").drafters.language_model().config.num_hidden_layers == 2
    with pytest.raises(ModelError, match="drafter='tiny/medusa': does not ship; shipped are tiny/dflash, tiny/domino"):
        load("tiny", "medusa", drafter="tiny/medusa")
    copytree(drafters / "dflash", Path("tiny") / "domino")
    with pytest.raises(InvalidRequest, match="is a drafter of kind dflash, and method 'domino' needs"):
        load(folder, "domino", drafter="tiny/domino")


def test_the_union_begins_with_the_transitions_that_ship(drafters: Path) -> None:
    """Guards against transitions that are left aside, that papers' methods begin with unasked, and of other weights."""
    matrix = TransitionMatrix(264, torch.device("cpu"), context=2)
    matrix.update(torch.tensor([5, 6]), torch.arange(16).view(2, 8), torch.tensor([4, 5]))
    file = drafters / "transitions" / "transitions.safetensors"
    assert shipped_for("tiny").transitions is None
    with pytest.raises(InvalidRequest, match=r"warm=shipped: no transitions ship .*outpace train transitions"):
        load("tiny", "recycle:warm=shipped")
    file.parent.mkdir()
    try:
        save_matrix(file, matrix)
        assert shipped_for("tiny").transitions == file
        assert tuple(shipped_for("tiny").drafters) == KINDS
        model = load("tiny")
        begun = ["outpace:draft=none", "outpace:draft=domino", "outpace:draft=dflash,warm=shipped"]
        begun += ["recycle:warm=shipped", "graft:warm=shipped"]
        for method in (*begun, "outpace:draft=domino,warm=none", "recycle", "recycle:warm=none", "graft"):
            learned = matrix_of(model.proposer(method))
            assert learned is not None
            tokens = learned.rows().tokens.tolist()
            assert tokens == ([5, 6] if method in begun else []), method
            drafted(model, method)  # compares answers with plain decoding's
        model.reset()
        learned = matrix_of(model.proposer("outpace:draft=none"))
        assert learned is not None
        assert learned.rows().pairs.tolist() == [[4, 5], [5, 6]]
        assert load("tiny", "outpace:draft=none").method_from == "named"
        assert model.method_from.endswith("the transitions of tiny, which ship")
        heads = load("tiny", drafter=str(write_drafter("medusa", Path.cwd() / "heads")))
        assert (heads.method_name, heads.method_from) == ("medusa", "the default"), "which begins with none"
    finally:
        rmtree(file.parent)


def test_a_drafter_that_is_named_is_used_without_a_method(drafters: Path) -> None:
    """Guards against a drafter that is loaded and left aside, and one that is asked for what another kind drafts."""
    draft_of = {"domino": "domino", "dflash": "dflash", "eagle3": "eagle3", "draft-lm": "linear"}
    for kind, draft in draft_of.items():
        model = load("tiny", drafter=str(drafters / kind))
        assert model.method == f"outpace:draft={draft}"
        assert len(drafted(model))
        passes = [model.generate(prompt, max_new_tokens=16, budget=8).metrics.draft_passes for prompt in PROMPTS]
        assert sum(passes) > 0


def test_every_copy_of_a_model_finds_its_drafters(drafters: Path, tmp_path: Path) -> None:
    """Guards against drafters that serve the built-in name alone, ones of a model with other sizes or names, and a
    refusal of quantised weights that vLLM is to read."""
    pulled = drafters.parents[1] / "home" / "models" / "tiny"
    assert tuple(shipped_for("tiny").drafters) == KINDS
    assert tuple(shipped_for(str(pulled)).drafters) == KINDS
    copy = save_tiny_model(tmp_path / "Tiny_16 bit", eos_token_id=None, max_position_embeddings=2048)
    model = load(str(copy))
    best = "outpace:draft=none" if loaded_kernels() else "outpace:draft=domino"
    assert (model.drafters.shipment.target, model.method) == ("tiny", best)
    assert len(drafted(model, "domino"))
    named = copytree(copy, tmp_path / "other")
    assert shipped_for(str(named)) == Shipment()
    config = json.loads((named / "config.json").read_text())
    config |= {"_name_or_path": "owner/tiny-it-AWQ", "quantization_config": {"quant_method": "awq", "bits": 4}}
    (named / "config.json").write_text(json.dumps(config))
    assert tuple(shipped_for(str(named)).drafters) == KINDS
    assert shipped_for(str(save_tiny_model(tmp_path / "tiny", num_hidden_layers=4))) == Shipment()
    assert shipped_for("owner/other") == Shipment(), "nothing is asked of the hub"


def test_a_gguf_file_finds_its_drafters_by_its_metadata(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a file that must keep its name, drafters for a model of other tokens, and padding that counts."""
    file = write_tiny_gguf(tmp_path / "renamed.gguf", "Tiny Instruct")
    describe(tmp_path / "drafters" / "tiny", file)
    install(monkeypatch, root, tmp_path / "drafters")
    copytree(root / "drafters" / "tiny" / "eagle3", tmp_path / "drafters" / "tiny" / "eagle3")
    assert tuple(shipped_for(str(file)).drafters) == ("eagle3",)
    assert load(str(file)).drafters.shipment.target == "tiny"
    assert shipped_for(str(write_tiny_gguf(tmp_path / "other.gguf", "Else"))) == Shipment()
    describe(tmp_path / "drafters" / "tiny", file, tokens_sha256="0" * 64)
    assert shipped_for(str(file)) == Shipment()
    describe(tmp_path / "drafters" / "tiny", file, heads="many")
    with pytest.raises(ModelError, match=r"target.json: heads='many': .*install the package again"):
        shipped_for(str(file))


def test_a_model_that_nothing_ships_for_is_told_how_to_get_a_drafter(tmp_path: Path) -> None:
    """Guards against an error without a way out."""
    folder = str(save_tiny_model(tmp_path / "other", max_position_embeddings=2048))
    complaint = "needs a trained drafter of kind {0}: name its checkpoint.*`outpace train {0}`; {1} tiny/dflash"
    ours, others = "for this model there are", "none is for this model; shipped are"
    for target, method, kind, what in (
        (folder, "domino", "domino", others),
        ("tiny", "medusa", "medusa", ours),
        (folder, "outpace:draft=eagle3", "eagle3", others),
        ("tiny", "outpace:draft=lattice", "lattice", ours),
    ):
        with pytest.raises(InvalidRequest, match=complaint.format(kind, what)):
            load(target, method)
    assert load(folder, "linear").drafters.language_model().config.num_hidden_layers == 2, "early exit"


@pytest.mark.usefixtures("without_kernels")
def test_the_best_method_that_ships_is_the_default(
    root: Path, drafters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a default whose drafter is not there, drafters that nobody uses, and a choice that nobody sees."""
    model = load("tiny")
    assert (model.method, model.method_from) == ("outpace:draft=domino", "the default, with tiny/domino, which ship")
    assert len(drafted(model))
    few = tmp_path / "few"
    copytree(drafters / "eagle3", few / "tiny" / "eagle3")
    (few / "tiny" / "target.json").write_bytes((drafters / "target.json").read_bytes())
    for folder, method in ((few, "outpace:draft=eagle3"), (tmp_path / "none", "outpace:draft=none")):
        install(monkeypatch, root, folder)
        assert load("tiny").method == load("tiny", "outpace").method == method
    with pytest.raises(InvalidRequest, match="no drafter ships with this installation"):
        load("tiny", "domino")


@needs_kernels
@pytest.mark.parametrize(("stated", "method"), [(None, "outpace:draft=domino"), ("domino:budget=3", "domino:budget=3")])
def test_kernels_have_a_default_of_their_own(
    stated: str | None, method: str, root: Path, drafters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a shipped drafter left aside with compiled kernels, or the method measured as faster there."""
    copytree(drafters, tmp_path / "drafters" / "tiny")
    describe(tmp_path / "drafters" / "tiny", root / "home" / "models" / "tiny", default_method=stated)
    install(monkeypatch, root, tmp_path / "drafters")
    model = load("tiny")
    assert model.method == method
    assert load("tiny", "outpace").method == "outpace:draft=domino", "with what the default drafts with"


@needs_kernels
def test_a_default_whose_drafter_is_missing_is_left_aside(
    root: Path, drafters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a model that an installed wheel cannot load: its facts are there, and the large drafter that they
    name as the fastest is not."""
    few = tmp_path / "drafters" / "tiny"
    describe(few, root / "home" / "models" / "tiny", default_method="outpace:draft=eagle3")
    install(monkeypatch, root, few.parent)
    assert load("tiny").method == load("tiny", "outpace").method == "outpace:draft=none"
    copytree(drafters / "dflash", few / "dflash")
    assert load("tiny").method == load("tiny", "outpace").method == "outpace:draft=dflash"
    copytree(drafters / "eagle3", few / "eagle3")
    assert load("tiny").method == "outpace:draft=eagle3"


@pytest.mark.parametrize("method", ["eagle3", "fr-spec", "linear", "dynatree"])
@pytest.mark.parametrize("is_named", [False, True], ids=["shipped", "folder"])
def test_a_drafter_drafts_from_its_vocabulary_unless_told_otherwise(
    method: str, is_named: bool, drafters: Path, tmp_path: Path
) -> None:
    """Guards against a vocabulary that lies there unused, and against one that cannot be replaced or put aside."""
    save_vocabulary(tmp_path / "odd", torch.arange(1, 264, 2), 264)
    kind = "eagle3" if method in ("eagle3", "fr-spec") else "draft-lm"
    model = load("tiny", "plain", drafter=str(drafters / kind) if is_named else None)
    assert bool((drafted(model, method) % 2 == 0).all())
    assert bool((drafted(model, f"{method}:vocabulary={tmp_path / 'odd'}") % 2 == 1).all())
    if method == "fr-spec":
        with pytest.raises(InvalidRequest, match="vocabulary=all: it drafts from a part; use method 'eagle3'"):
            model.proposer("fr-spec:vocabulary=all")
    else:
        assert len((drafted(model, f"{method}:vocabulary=all") % 2).unique()) == 2


def test_a_vocabulary_comes_from_the_hub_with_its_drafter(drafters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a net on the hub taken for a language model, and a vocabulary left there."""
    asked: list[list[str]] = []

    def download(name: str, allow_patterns: list[str], revision: str | None) -> str:
        asked.append(allow_patterns)
        assert name == "owner/name"
        return str(drafters / "eagle3")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = load("tiny", "fr-spec", drafter="owner/name")
    assert "vocabulary.safetensors" in asked[0]
    assert bool((drafted(model) % 2 == 0).all())


def test_what_a_drafter_weighs(drafters: Path, tmp_path: Path) -> None:
    """Guards against tables of ids counted as parameters, and files left out of the size."""
    eagle = random_net(Eagle3Net(Eagle3Config(**OURS, taps=(0, 1, 2), draft_vocab_size=60)))
    eagle.d2t.zero_()
    write_net(eagle, tmp_path / "ranked", "speculators")
    model = AutoModelForCausalLM.from_pretrained(drafters / "draft-lm")
    nets = {drafters / kind: load_net(str(drafters / kind)) for kind in ("dflash", "domino", "eagle3")}
    for folder, net in (nets | {tmp_path / "ranked": eagle, drafters / "draft-lm": model}).items():
        size = size_of(folder)
        assert size.parameters == sum(weight.numel() for weight in net.parameters()), folder
        assert size.megabytes == sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ModelError, match=r"cannot be read.*install the package again"):
        size_of(tmp_path)


def test_a_wheel_holds_them_and_a_source_tree_finds_them(
    drafters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an installed package without drafters, and a checkout that looks for them elsewhere."""
    monkeypatch.undo()
    assert shipped_folder() == ROOT / "drafters"
    assert all((folder / "model.safetensors").is_file() for folder in shipped().values())
    copytree(ROOT / "src", tmp_path / "project" / "src")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        copyfile(ROOT / name, tmp_path / "project" / name)
    target = tmp_path / "project" / "drafters" / "smollm2-135m"
    copytree(drafters / "dflash", target / "dflash")
    (target / TARGET).write_bytes((drafters / TARGET).read_bytes())
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path / "project", check=True, capture_output=True)
    (wheel,) = (tmp_path / "project" / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    shipped_there = tmp_path / "site" / "outpace" / "shipped" / "smollm2-135m"
    ask = "from outpace.models.loading.shipped import shipped; print(*shipped().items())"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "OUTPACE_HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", ask], env=environment, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == str(("smollm2-135m/dflash", shipped_there / "dflash"))


def test_packages_hold_no_large_drafter(tmp_path: Path) -> None:
    """Guards against a wheel of 160 MB, one without the playground or without the drafters and transitions that
    `shipped_folder` finds, and one with sources that an earlier build left: names of compiled kernels stand for all
    that there are, so that none would be found."""
    large = "qwen2.5-coder-1.5b"
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        copyfile(ROOT / name, tmp_path / name)
    for name in ("src", "drafters"):
        # Empty files, for lists depend on names alone.
        copytree(ROOT / name, tmp_path / name, copy_function=lambda source, copied: Path(copied).touch())
    for name in ("lattice/config.json", "lattice/model.safetensors", "transitions/transitions.safetensors"):
        file = tmp_path / "drafters" / large / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    stale = tmp_path / "built" / "outpace" / "kernels" / "cpp" / "deleted.h"
    stale.parent.mkdir(parents=True)
    stale.touch()
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", ".", "build_py", "--build-lib", "built"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert not stale.exists()
    assert (tmp_path / "built" / "outpace" / "serve" / "playground" / "index.html").exists()
    shipped = tmp_path / "built" / "outpace" / "shipped"
    wheel = {str(path.relative_to(shipped)) for path in shipped.rglob("*") if path.is_file()}
    listed = (tmp_path / "outpace.egg-info" / "SOURCES.txt").read_text().splitlines()
    archive = {name.removeprefix("drafters/") for name in listed if name.startswith("drafters/")}
    here = (path.relative_to(ROOT / "drafters") for path in (ROOT / "drafters").rglob("*") if path.is_file())
    drafters = {str(path) for path in here if path.parts[0] == "smollm2-135m"}
    assert len(drafters) > 20
    assert wheel == archive
    small = {f"{large}/target.json", f"{large}/transitions/transitions.safetensors"}
    assert {name for name in wheel if name.startswith(large)} == small
    assert wheel >= drafters | {"README.md"}
