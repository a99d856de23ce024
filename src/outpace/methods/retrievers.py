"""Retrievers by their options: proposal = source x shape x retriever, for every method that leaves slots free."""

from outpace.core.drafting import Retriever
from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.options import Options, RetrievalOptions
from outpace.trees.graft.proposer import GraftedProposer
from outpace.trees.graft.retrievers import JoinedRetriever, MatrixRetriever, SuffixRetriever
from outpace.trees.retrieval.warm_file import load_matrix
from outpace.trees.shapes.rank_paths import grafted_paths, retrieval_plan

CHAIN = 16  # tokens behind a tail; an unbroken chain of transitions is hardly ever right for longer


def with_retrieval(base: Proposer, options: Options, context: BuildContext) -> Proposer:
    """A proposer with the retriever that a method's options name; itself without one.

    Args:
        base: drafts.
        options: of the method.
        context: what it is built in.
    """
    if not isinstance(options, RetrievalOptions) or options.retrieve == "none":
        return base
    retrievers: list[Retriever] = []
    if options.retrieve in ("suffix", "both"):
        retrievers.append(SuffixRetriever(context.device))
    if options.retrieve in ("matrix", "both"):
        retrievers.append(_matrix_retriever(options, context))
    retriever = retrievers[0] if len(retrievers) == 1 else JoinedRetriever(retrievers)
    return GraftedProposer(base, retriever, context.device, options.place, options.reserved)


def _matrix_retriever(options: RetrievalOptions, context: BuildContext) -> Retriever:
    depth, breadth = options.retrieve_depth or CHAIN, options.retrieve_breadth or CHAIN
    paths = [(0,) * length for length in range(1, CHAIN + 1)] if options.place == "tail" else grafted_paths()
    chosen = [path for path in paths if len(path) <= depth and max(path) < breadth]
    matrix = load_matrix(context.warm_file(options.warm), context.vocab_size, context.device, options.context)
    return MatrixRetriever(matrix, retrieval_plan(chosen), options.matrix == "private")
