"""Methods, and everything needed to write a new one: see `examples/my_method.py` and `examples/my_shape.py`.

A method gives an `Options` and a build function; what it builds is a `BaseProposer`, or a `BaseSource` under the shape
that its options name (`shaped`). A shape decides level by level which candidates become nodes.
"""

from outpace.core.drafting import BaseSource, Candidates, Frontier, GrowingShape, Level, LevelSource
from outpace.core.protocols import BaseProposer, DraftRequest, Needs, Observation, PromptChunk, Proposer
from outpace.core.tree import DraftTree, Topology
from outpace.drafters.build_context import BuildContext
from outpace.drafters.method import Method
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.options import Options
from outpace.drafters.shaped import shaped
from outpace.trees.shapes.table import Shape

__all__ = [
    "BaseProposer",
    "BaseSource",
    "BuildContext",
    "Candidates",
    "DraftRequest",
    "DraftTree",
    "Frontier",
    "GrowingShape",
    "Level",
    "LevelSource",
    "Method",
    "ModelOptions",
    "Needs",
    "Observation",
    "Options",
    "PromptChunk",
    "Proposer",
    "Shape",
    "Topology",
    "shaped",
]
