"""Finds the valid part of verified trees: paths with finite logits and a next token."""

from collections.abc import Sequence

import torch

from outpace.core.events import TokenLogprob
from outpace.core.protocols import NO_TOKEN, NodeOutputs, Verdict
from outpace.engine.session import Change, Session
from outpace.lib.errors import InvalidRequest, NonFiniteLogits
from outpace.sampling.verification import token_logprobs


def valid_verdicts(
    changes: Sequence[Change],
    outputs: Sequence[NodeOutputs],
    verdicts: Sequence[Verdict],
    tokens: Sequence[Sequence[int]],
) -> dict[int, Verdict]:
    """The verdicts whose path has finite logits and a next token; the other sessions get an error.

    Only nodes on the path count: plain decoding would not have computed the others. NaN and infinity sort first, so
    checking the top logit suffices. After accepted drafts the answer may end before a fault: the round then ends with
    the last token before it, and the next round, if any, finds the fault.
    """
    is_finite = bool(torch.isfinite(torch.cat([output.top_logits[:, 0] for output in outputs])).all())
    valid: dict[int, Verdict] = {}
    for index, (change, output, verdict) in enumerate(zip(changes, outputs, verdicts, strict=True)):
        infinite = None  # depth
        if not is_finite:
            nodes = torch.isfinite(output.top_logits[:, 0]).tolist()
            infinite = next((depth for depth, node in enumerate(verdict.path) if not nodes[node]), None)
        depth = verdict.accepted_drafts if infinite is None else infinite
        if infinite is None and verdict.next_token != NO_TOKEN:
            valid[index] = verdict
        elif depth:
            valid[index] = Verdict(verdict.path[:depth], tokens[index][verdict.path[depth]])
        else:
            change.error = _error(change.session, infinite is not None)
    return valid


def _error(session: Session, is_infinite: bool) -> Exception:
    """Why a request cannot continue."""
    which, position = f"request {session.request_id}", len(session.ids)
    if is_infinite:
        return NonFiniteLogits(
            f"{which}: the target's logits for position {position} are not finite; check the weights, or load the "
            "model with dtype='float32'"
        )
    if session.constraint is not None and (failed := session.constraint.error):
        return InvalidRequest(
            f"{which}: grammar={session.params.grammar}: at position {position} it is too much for the grammar library "
            f"({failed}); simplify it"
        )
    return InvalidRequest(
        f"{which}: its grammar, penalties, logit_bias, bad words and min_new_tokens leave no token to choose at "
        f"position {position}: relax them"
    )


def logprobs(
    session: Session, outputs: NodeOutputs, path: Sequence[int], tokens: Sequence[int]
) -> Sequence[TokenLogprob]:
    """Log-probabilities of the tokens chosen after the nodes of a path, if requested."""
    count = session.params.logprobs
    return () if count is None else token_logprobs(outputs, path, tokens, count)
