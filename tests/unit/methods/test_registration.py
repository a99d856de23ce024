"""What a method or a shape of another package declares is checked when it is registered or built."""

from typing import Any

import pytest
from pydantic import BaseModel, Field

from outpace.lib.errors import InvalidRequest, MethodError
from outpace.methods import BaseSource, Method, ModelOptions, Options, catalog, shaped
from outpace.methods.catalog import build_proposer, method, parse_method
from outpace.testing import toy_context
from outpace.trees.shapes import table
from outpace.trees.shapes.beam import Beam
from outpace.trees.shapes.table import Shape


def _nothing(options: Options, context: Any) -> Any:
    return None


class Redefined(Options):
    budget: str = Field(default="all", description="no number")  # type: ignore[assignment]


class Shadowed(ModelOptions):
    retrieve: int = Field(default=3, description="no kind of retrieval")  # type: ignore[assignment]


class Named(Options):
    name: str = Field(default="x", description="of a table")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"build": "build"}, "Method: build='build': must be a function of options and a BuildContext"),
        ({"options": dict}, "Method: options=<class 'dict'>: must be a class derived from outpace.methods.Options"),
        ({"options": Options()}, r"Method: options=Options\(.*\): must be a class derived from"),
        ({"options": Redefined}, "Method: Redefined.budget: budget is a reserved name, .* choose another name"),
        ({"options": Shadowed}, "Method: Shadowed.retrieve: retrieve is a reserved name, .* choose another name"),
    ],
)
def test_a_method_that_cannot_work_is_refused_when_it_is_made(arguments: dict[str, Any], message: str) -> None:
    """Guards against a method that is listed and ends in an AttributeError when it is used."""
    with pytest.raises(MethodError, match=message):
        Method(**{"build": _nothing, "summary": "nothing", **arguments})


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Method]:
    """Methods by name, to which a test adds its own."""
    known = dict(catalog.methods())
    monkeypatch.setattr(catalog, "methods", lambda: known)
    return known


def test_what_a_method_builds_is_checked_when_it_is_built(mine: dict[str, Method]) -> None:
    """Guards against a build function that returns nothing, or a class, and an error in the first round."""
    mine["forgetful"] = Method(_nothing, "its build function has no return")
    with pytest.raises(MethodError, match="method forgetful: NoneType has no method open"):
        build_proposer(parse_method("forgetful"), toy_context(8))
    built: Any = BaseSource
    mine["classy"] = Method(lambda options, context: built, "its build function forgets to call")
    with pytest.raises(MethodError, match=r"method classy: got the class BaseSource, not an object; call it"):
        build_proposer(parse_method("classy"), toy_context(8))


def test_an_option_may_be_called_name(mine: dict[str, Method]) -> None:
    """Guards against a TypeError for an option that is also a parameter of `outpace.method`."""
    mine["named"] = Method(_nothing, "has an option called name", Named)
    assert str(method("named", name="y")) == "named:name=y"


def test_a_source_is_checked_when_it_gets_its_shape() -> None:
    """Guards against a source without `needs` or `begin` whose first round ends in an AttributeError."""

    class Half:
        def expand(self, *arguments: Any) -> None: ...

    class Vague(BaseSource):
        needs = 8  # type: ignore[assignment]

    with pytest.raises(MethodError, match=r"method Half: Half has no method open\(\); derive .*methods.BaseSource"):
        shaped(Half(), ModelOptions(), toy_context(8), 4)  # type: ignore[arg-type]
    with pytest.raises(MethodError, match=r"method Vague: Vague.needs=8: must be an outpace.methods.Needs"):
        shaped(Vague(), ModelOptions(), toy_context(8), 4)  # type: ignore[arg-type]


def test_settings_of_a_shape_do_not_hide_behind_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a setting that never reaches its shape, because an option of the method has its name."""

    class Greedy(BaseModel):
        budget: int = 3
        noise: bool = True
        depth: int = 4

    known = {**table.shapes(), "greedy": Shape(Beam, "not used", Greedy)}
    monkeypatch.setattr("outpace.drafters.model_options.shapes", lambda: known)
    message = "shape=greedy: its settings budget, noise have reserved names, .* other names in the shape"
    with pytest.raises(InvalidRequest, match=message):
        parse_method("linear:shape=greedy")
