"""The shapes by name: options, help and tests follow from this table.

A shape of another package is one file and one line, an entry point of the group "outpace.shapes" that names a `Shape`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from outpace.core.drafting import GrowingShape, StaticShape
from outpace.lib.errors import MethodError
from outpace.lib.plugins import plugins
from outpace.trees.shapes.beam import (
    Beam,
    BeamConfig,
    BestFirst,
    BestFirstConfig,
    DddConfig,
    DynamicDepth,
    Search,
    SearchConfig,
)
from outpace.trees.shapes.dynatree import DynaTreeConfig, DynaTreeShape, FixedTree, FixedTreeConfig
from outpace.trees.shapes.gates import Cut, CutConfig, Echo, EchoConfig, Gated, GatedConfig
from outpace.trees.shapes.rank_paths import Chain, MedusaTemplate
from outpace.trees.shapes.svip import Svip, SvipConfig


@dataclass(frozen=True)
class Shape:
    """A row of the table.

    Attributes:
        make: makes the shape: a growing one from its settings, a static one without arguments.
        summary: in words.
        settings: class of a growing shape's settings, a pydantic model that forbids extra fields and may have none;
            None for a static shape.
        is_general: whether all methods with scores take it; else only those that name it do.
        compares: whether a growing shape reads scores as probabilities.
    """

    make: Callable[..., GrowingShape | StaticShape]
    summary: str
    settings: type[BaseModel] | None = None
    is_general: bool = True
    compares: bool = True

    def growing(self, settings: BaseModel) -> GrowingShape:
        """The growing shape of some settings; MethodError where it lacks a part."""
        remedy = "derive the class from outpace.methods.GrowingShape"
        shape: GrowingShape = _whole(self.make(settings), _GROWING, remedy)
        return shape

    def static(self) -> StaticShape:
        """The static shape; MethodError where it lacks a part."""
        shape: StaticShape = _whole(self.make(), ("plan",), "a growing one needs settings: Shape(make, summary, CLASS)")
        return shape


_GROWING = ("width", "grow", *(name for name in vars(GrowingShape) if not name.startswith("_")))


def _whole(shape: Any, parts: Sequence[str], remedy: str) -> Any:
    """The shape, checked for all parts."""
    if missing := [part for part in parts if not hasattr(shape, part)]:
        raise MethodError(f"shape {type(shape).__name__}: has no {', '.join(missing)}; {remedy}")
    return shape


BUILT_IN = {
    "chain": Shape(Chain, "the best candidate of the best candidate"),
    "template": Shape(MedusaTemplate, "Medusa's static tree of 63 nodes", is_general=False),
    "beam": Shape(Beam, "EAGLE-2's dynamic tree: a beam, and the best nodes of all levels", BeamConfig),
    "search": Shape(Search, "DART's tree search: the beam with its constants", SearchConfig, False, False),
    "best-first": Shape(BestFirst, "the nodes of the most probable paths, in one call", BestFirstConfig, False, False),
    "fixed": Shape(FixedTree, "the same depth and breadth whatever the draft believes", FixedTreeConfig),
    "dynatree": Shape(DynaTreeShape, "DynaTree: breadth and depth follow confidence and history", DynaTreeConfig),
    "gated": Shape(Gated, "Graft's gates: a beam that ends in doubt, which frees slots", GatedConfig),
    "ddd": Shape(DynamicDepth, "DDD: a beam that goes deeper while it holds much probability", DddConfig),
    "svip": Shape(Svip, "SVIP: a chain that ends where its distribution grows flat", SvipConfig),
    "echo": Shape(Echo, "ECHO: gated beams that lend their slots to the batch", EchoConfig),
    "cut": Shape(Cut, "a chain up to its first unlikely token", CutConfig),
}


@lru_cache(maxsize=1)
def shapes() -> Mapping[str, Shape]:
    """All shapes by name: those above, and those of installed packages."""
    return MappingProxyType(BUILT_IN | plugins("outpace.shapes", Shape, tuple(BUILT_IN)))
