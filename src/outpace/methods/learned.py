"""What a proposer keeps from request to request."""

from typing import Any

from outpace.core.protocols import Proposer
from outpace.trees.graft.proposer import GraftedProposer
from outpace.trees.graft.retrievers import JoinedRetriever
from outpace.trees.growing import GrowingProposer
from outpace.trees.proposer import StaticProposer
from outpace.trees.retrieval.samd import SamDecoding
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.shapes.dynatree import DynaTree
from outpace.trees.union.proposer import Union


def matrix_of(proposer: Proposer) -> TransitionMatrix | None:
    """The transition matrix that a proposer keeps from request to request; None if it keeps none."""
    reader: Any = None
    if isinstance(proposer, GraftedProposer):
        reader = proposer.retriever
        reader = reader.retrievers[-1] if isinstance(reader, JoinedRetriever) else reader
    elif isinstance(proposer, Union):
        reader = proposer.matrix
    elif isinstance(proposer, StaticProposer):
        reader = proposer.source
    return reader.matrix if isinstance(reader, MatrixLearner) and not reader.private else None


def learns(proposer: Proposer, is_sampled: bool) -> bool:
    """Whether what a proposer drafts depends on the requests it had before.

    Args:
        proposer: any.
        is_sampled: whether requests are, which alone teach what a keyed score is worth.
    """
    if isinstance(proposer, SamDecoding):
        return learns(proposer.other, is_sampled)
    base = proposer.base if isinstance(proposer, GraftedProposer) else proposer
    shape = base.shape if isinstance(base, GrowingProposer) else None
    carries = isinstance(shape, DynaTree) and shape.config.history == "authors"
    rates = is_sampled and isinstance(base, GrowingProposer) and base.acceptance is not None and not base.private
    return carries or rates or matrix_of(proposer) is not None
