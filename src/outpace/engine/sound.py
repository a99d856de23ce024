"""Finds the valid part of verified trees: paths with finite logits and a next token."""

from collections.abc import Sequence

import torch

from outpace.core.events import TokenLogprob
from outpace.core.protocols import NO_TOKEN, NodeOutputs, Verdict
from outpace.engine.session import Change, Session
from outpace.lib.errors import InvalidRequest, NonFiniteLogits
from outpace.sampling.verification import token_logprobs


def keep_sound(
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
    sound: dict[int, Verdict] = {}
    for index, (change, output, verdict) in enumerate(zip(changes, outputs, verdicts, strict=True)):
        session = change.session
        infinite = None  # depth
        if not is_finite:
            nodes = torch.isfinite(output.top_logits[:, 0]).tolist()
            infinite = next((depth for depth, node in enumerate(verdict.path) if not nodes[node]), None)
        depth = verdict.accepted_drafts if infinite is None else infinite
        if infinite is None and verdict.next_token != NO_TOKEN:
            sound[index] = verdict
        elif depth:
            sound[index] = Verdict(verdict.path[:depth], tokens[index][verdict.path[depth]])
        elif infinite is None:
            failed = session.constraint is not None and session.constraint.error
            change.error = InvalidRequest(
                f"request {session.request_id}: grammar={session.params.grammar}: at position {len(session.ids)} it is "
                f"too much for the grammar library ({failed}); simplify it"
                if failed
                else f"request {session.request_id}: its grammar, penalties, logit_bias, bad words and min_new_tokens "
                f"leave no token to choose at position {len(session.ids)}: relax them"
            )
        else:
            change.error = NonFiniteLogits(
                f"request {session.request_id}: the target's logits for position {len(session.ids)} are not "
                "finite; check the weights, or load the model with dtype='float32'"
            )
    return sound


def logprobs(
    session: Session, outputs: NodeOutputs, path: Sequence[int], tokens: Sequence[int]
) -> Sequence[TokenLogprob]:
    """Log-probabilities of the tokens chosen after the nodes of a path, if requested."""
    count = session.params.logprobs
    return () if count is None else token_logprobs(outputs, path, tokens, count)
