"""The example of a drafter kind: trained, loaded, drafted with and converted by the ordinary commands."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import outpace
from outpace.drafters.domino.net import DominoHead
from outpace.drafters.kinds import KINDS, kind_of, kinds
from outpace.drafters.load import load_net
from outpace.lib import plugins
from outpace.methods import catalog
from outpace.methods.catalog import BUILT_IN, methods
from tests.cli.runner import run_json
from tests.cli.test_train_methods import run
from tests.examples.test_examples import EXAMPLES
from tests.unit.models.tiny import save_tiny_model

PROMPTS = [{"role": "user", "content": "Say 3."}]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example as a package that is installed."""
    point = EntryPoint("mlp-head", "mlp_head:MLP_HEAD", "outpace.drafters")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    for table in (kinds, methods):
        table.cache_clear()
    yield
    for table in (kinds, methods):
        table.cache_clear()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


def train(target: Path, tmp_path: Path) -> str:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{at}", "turns": [f"Say {at}."]} for at in range(9)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("mlp-head", target, prompts, tmp_path / "run", "net.mlp_dim=16")
    assert (done["step"], done["steps"]) == (4, 4)
    return str(done["drafter"])


def count_calls(monkeypatch: pytest.MonkeyPatch, head: type[Any], name: str, calls: Counter[str]) -> None:
    original, key = getattr(head, name), f"{head.__name__}.{name}"

    def counted(self: Any, *arguments: Tensor) -> Any:
        calls[key] += 1
        return original(self, *arguments)

    monkeypatch.setattr(head, name, counted)


def test_a_kind_of_others_is_trained_and_served(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a drafter kind that `outpace train` does not offer, whose checkpoint is read as another kind's."""
    drafter = train(target, tmp_path)
    from mlp_head import MlpHead, MlpNet  # type: ignore[import-not-found]

    net = load_net(drafter)
    assert type(net) is MlpNet
    assert kind_of(net).name == "mlp-head"
    calls: Counter[str] = Counter()
    count_calls(monkeypatch, MlpHead, "step", calls)
    count_calls(monkeypatch, MlpHead, "low_rank", calls)
    count_calls(monkeypatch, DominoHead, "step", calls)
    count_calls(monkeypatch, DominoHead, "follow", calls)
    model = outpace.load(str(target), drafter=drafter, dtype="float32", device="cpu")
    assert model.method_name == "mlp-head"
    plain = model.generate(PROMPTS, max_new_tokens=20, method="plain")
    for method in ("mlp-head", "domino", "outpace"):  # it serves Domino's methods too
        calls.clear()
        drafted = model.generate(PROMPTS, max_new_tokens=20, method=method)
        assert drafted.token_ids == plain.token_ids
        assert drafted.metrics.drafted > 0
        assert calls["MlpHead.step"] > 0, method
        assert calls["MlpHead.low_rank"] > 0, method
        assert calls["DominoHead.step"] + calls["DominoHead.follow"] == 0, method
    done = run_json("convert", drafter, str(tmp_path / "copy"), "--to", "mlp-head", "--json")
    assert (done["kind"], done["equal"]) == ("mlp-head", True)


def test_a_kind_under_another_name_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a KeyError when a drafter is loaded whose kind is in the table by the entry point's name alone."""
    point = EntryPoint("mlp_head", "mlp_head:MLP_HEAD", "outpace.drafters")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point])
    with pytest.warns(UserWarning, match="'mlp_head' .* left out: mlp_head:MLP_HEAD is named 'mlp-head'; give"):
        assert set(kinds()) == set(KINDS)


def test_a_subclass_of_a_net_is_its_own_kinds() -> None:
    """Guards against kinds looked up by isinstance alone, which take a derived net for the first base's kind."""
    from mlp_head import MlpConfig, MlpNet

    from tests.unit.drafters.net.block_nets import small_domino

    domino = small_domino()
    derived = MlpNet(MlpConfig(**domino.config.model_dump(), mlp_dim=4))
    assert kind_of(derived).name == "mlp-head"
    assert kind_of(domino) is KINDS["domino"]

    class Unregistered(MlpNet):  # type: ignore[misc]
        pass

    assert kind_of(Unregistered(derived.config)).name == "mlp-head"


def test_a_method_of_a_kind_under_a_taken_name_is_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a drafter that drafts by Domino's method, for its kind's own of that name is not in the table."""
    from mlp_head import MLP_HEAD

    taking = replace(MLP_HEAD, methods={"domino": MLP_HEAD.methods["mlp-head"]})
    monkeypatch.setattr(catalog, "kinds", lambda: {**KINDS, taking.name: taking})
    with pytest.warns(UserWarning, match="'mlp-head': its method 'domino' is left out: there is one already"):
        assert methods() == BUILT_IN
