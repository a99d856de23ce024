"""The two examples do what their first lines say: one file and one line, and everything else follows."""

import json
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
from torch import Tensor

import outpace
from outpace.lib import plugins
from outpace.lib.errors import InvalidRequest, MethodError
from outpace.lib.strict import StrictSettings
from outpace.methods import GrowingShape, Level, Shape
from outpace.methods.catalog import methods, parse_method
from outpace.trees.shapes.table import shapes

EXAMPLES = Path(__file__).parents[2] / "examples"
INSTALLED = {
    "outpace.methods": [EntryPoint("bigram", "my_method:BIGRAM", "outpace.methods")],
    "outpace.shapes": [EntryPoint("fork", "my_shape:FORK", "outpace.shapes")],
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Both examples as packages that are installed."""
    points = {group: list(entries) for group, entries in INSTALLED.items()}
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(plugins, "entry_points", lambda group: points.get(group, []))
    methods.cache_clear()
    shapes.cache_clear()
    yield points
    methods.cache_clear()
    shapes.cache_clear()


def test_a_shape_that_lacks_a_part_is_refused_by_name() -> None:
    """Guards against an AttributeError in the first round, of a shape without a width, or of one that grows and has no
    class of settings, which made it a static one."""

    class Widthless(GrowingShape):
        def grow(self, states: Sequence[Any], level: Level) -> tuple[Tensor, Tensor]:
            return level.log_probs > -1, level.log_probs > -1

    made: Any = Widthless()
    shape = Shape(lambda *settings: made, "a shape without a width")
    with pytest.raises(MethodError, match=r"^shape Widthless: has no width; derive the class from .*GrowingShape"):
        shape.growing(StrictSettings())
    with pytest.raises(MethodError, match=r"^shape Widthless: has no plan; a growing one needs settings: Shape\("):
        shape.static()


def test_everything_else_follows(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a second table: names, options, their checks and the listing come from the one line each."""
    model = outpace.load(folder, "bigram", dtype="float32", device="cpu")
    plain = model.generate("la la la", max_new_tokens=24, method="plain").token_ids
    for method in ("bigram:budget=2", outpace.method("linear", shape="fork", sure=0.9, budget=6), "linear:shape=fork"):
        answer = model.generate("la la la", max_new_tokens=24, method=method)
        assert answer.token_ids == plain
        assert answer.metrics.drafted > 0, method
    with pytest.raises(InvalidRequest, match="shape=fork,sure=2': sure=2: "):
        parse_method("linear:shape=fork,sure=2")
    with pytest.raises(InvalidRequest, match="bigram takes budget"):
        parse_method("bigram:breadth=2")
    from outpace.cli.methods import methods as listing

    listing(as_json=True)
    assert {"bigram"} <= {row["name"] for row in json.loads(capsys.readouterr().out)["methods"]}
    listing("linear", shape="fork", as_json=True)
    (sure,) = [row for row in json.loads(capsys.readouterr().out)["options"] if row["name"] == "sure"]
    assert sure == {"name": "sure", "type": "number above 0 up to 1", "default": 0.5, "meaning": sure["meaning"]}
    assert "stands alone" in sure["meaning"]


def test_a_proposer_made_by_hand_is_taken_as_it_is(folder: str) -> None:
    """Guards against an object that is asked for its name, and one that proposes nothing taken for a method."""
    from my_method import Bigram  # type: ignore[import-not-found]

    model = outpace.load(folder, "plain", dtype="float32", device="cpu")
    plain, ours = (model.generate("la la la", max_new_tokens=24, method=method) for method in ("plain", Bigram(3)))
    assert ours.token_ids == plain.token_ids
    assert ours.metrics.drafted > 0
    handed = outpace.load(folder, Bigram(3), dtype="float32", device="cpu")
    assert handed.method_name == "Bigram"
    handed.reset()
    assert handed.generate("la la la", max_new_tokens=24).token_ids == plain.token_ids
    with pytest.raises(InvalidRequest, match=r"method=7 is a int: give a name, outpace.method\(...\) or an object"):
        model.generate("la", method=7)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (EntryPoint("broken", "no_such_module:X", "outpace.methods"), "'broken' .* is left out: ModuleNotFoundError"),
        (EntryPoint("odd", "my_shape:FORK", "outpace.methods"), "my_shape:FORK is a Shape, not a Method"),
        (EntryPoint("recycle", "my_method:BIGRAM", "outpace.methods"), "there is a 'recycle' already"),
    ],
)
def test_a_broken_package_hurts_nobody_else(entry: EntryPoint, said: str, installed: dict[str, Any]) -> None:
    """Guards against one package that fails to import and takes every method with it, or takes the place of another."""
    installed["outpace.methods"].append(entry)
    with pytest.warns(UserWarning, match=said):
        methods()
    assert {"bigram", "recycle"} <= set(methods())
    assert methods()["recycle"].summary.startswith("Token Recycling")
    with catch_warnings():
        simplefilter("error")
        methods()  # told once


def test_a_bigram_is_what_followed_last() -> None:
    """Guards against an example that teaches a bug: what it drafts below a token that nothing followed."""
    from my_method import Bigram

    from outpace.testing import draft_request

    trees = Bigram(3).propose([None, None], [draft_request([1, 2, 1, 3, 1], 3, 9), draft_request([1, 2], 3, 9)])
    assert [tree.tokens.tolist() for tree in trees] == [[1, 3, 1, 3], [2]]


def test_a_fork_of_one_candidate_is_a_chain() -> None:
    """Guards against an example that fails where a source gives fewer candidates than asked, as with `pool=1`."""
    import torch
    from my_shape import Fork, ForkConfig  # type: ignore[import-not-found]

    from outpace.methods import Level

    scores = torch.tensor([[-2.0], [-0.1]])  # [F, 1]
    selected, expanded = Fork(ForkConfig()).grow([None], Level(1, torch.tensor([0, 0]), scores, cumulative=scores))
    assert selected.tolist() == expanded.tolist() == [[True], [True]]


@pytest.mark.parametrize("name", ["my_method.py", "my_shape.py"])
def test_the_page_shows_the_examples(name: str) -> None:
    """Guards against a page whose code is not the code that is tested."""
    code = (EXAMPLES / name).read_text().split('"""\n', 1)[1].strip()
    assert f"```python\n{code}\n```" in (EXAMPLES.parent / "docs" / "adding-a-method.md").read_text()


def test_the_page_shows_the_example_of_a_drafter() -> None:
    """Guards against a page whose row of the table is not that of the example."""
    page = (EXAMPLES.parent / "docs" / "adding-a-method.md").read_text()
    (part,) = [part for part in page.split("```python\n")[1:] if part.startswith("MLP_HEAD = ")]
    assert part.split("```")[0].strip() in (EXAMPLES / "mlp_head.py").read_text()
