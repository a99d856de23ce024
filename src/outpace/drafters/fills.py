"""Fills by their options: proposal = source x shape x fill, for every method that leaves slots free."""

from outpace.core.drafting import Fill
from outpace.core.protocols import Proposer
from outpace.drafters.common_options import FillOptions
from outpace.drafters.matrix_fill import MatrixFill
from outpace.drafters.options import AnyOptions
from outpace.drafters.retrieval import JoinedFill, SuffixFill
from outpace.drafters.surroundings import Surroundings
from outpace.drafters.warm_file import load_matrix
from outpace.shaping.graft_template import grafted_paths, retrieval_plan
from outpace.shaping.grafted import GraftedProposer

CHAIN = 16  # tokens behind a tail; an unbroken chain of transitions is hardly ever right for longer


def filled(base: Proposer, options: AnyOptions, around: Surroundings) -> Proposer:
    """A proposer with the fill that a method's options name; itself without one.

    Args:
        base: drafts.
        options: of the method.
        around: what it is built in.
    """
    if not isinstance(options, FillOptions) or options.fill == "none":
        return base
    fills: list[Fill] = []
    if options.fill in ("suffix", "both"):
        fills.append(SuffixFill(around.device))
    if options.fill in ("matrix", "both"):
        fills.append(_matrix_fill(options, around))
    fill = fills[0] if len(fills) == 1 else JoinedFill(fills)
    return GraftedProposer(base, fill, around.device, options.place, options.reserved)


def _matrix_fill(options: FillOptions, around: Surroundings) -> Fill:
    depth, width = options.retrieve_depth or CHAIN, options.retrieve_width or CHAIN
    paths = [(0,) * length for length in range(1, CHAIN + 1)] if options.place == "tail" else grafted_paths()
    chosen = [path for path in paths if len(path) <= depth and max(path) < width]
    matrix = load_matrix(options.warm, around.vocab_size, around.device, options.context)
    return MatrixFill(matrix, retrieval_plan(chosen), options.matrix == "private")
