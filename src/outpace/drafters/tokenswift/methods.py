"""The method of heads on the target with a part of its keys and values."""

from pydantic import Field

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext, check_sizes
from outpace.drafters.medusa.net import MedusaNet
from outpace.drafters.method import Method, variant
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.self_draft.methods import packed_target
from outpace.drafters.self_draft.selectors import TOKEN_SINKS, Tokens
from outpace.drafters.shaped import shaped
from outpace.drafters.tokenswift.source import TokenSwift
from outpace.trees.shapes.dynatree import FixedTreeConfig


class TokenSwiftTreeConfig(FixedTreeConfig):
    """Settings of TokenSwift's tree: the target's own token, and three candidates of each head, 40 nodes."""

    depth: int = Field(default=4, ge=1, le=64, description="drafted tokens on the longest path")
    root_breadth: int | None = Field(
        default=1, ge=1, le=16, description="children of the pending token; by default as many as breadth"
    )
    min_path_prob: float = Field(
        default=0.0, ge=0, lt=1, description="probability of the path to a node below which it is pruned"
    )


class TokenSwiftOptions(ModelOptions):
    """TokenSwift. Where `keep` or fewer tokens are there, only retrieval drafts."""

    keep: int = Field(
        default=4096,
        gt=TOKEN_SINKS,
        description="tokens of the context that drafting sees: the first 16, those that the last token attended to "
        "most, in each layer and key head, and all that came after the selection, which is repeated when these leave "
        "no room",
    )


def _tokenswift(options: TokenSwiftOptions, context: BuildContext) -> Proposer:
    net, _ = context.trained(MedusaNet, "tokenswift", "medusa")
    target = packed_target(context)
    check_sizes(net.config, hidden_size=target.config.hidden_size, vocab_size=target.vocab_size)
    vocabulary = context.ranked_vocabulary(options.vocabulary)
    source = TokenSwift(target, net, Tokens(target, options.keep), options.noise, vocabulary)
    return shaped(source, options, context, context.default_budget(15, 100))


METHODS = {
    "tokenswift": variant(
        Method(_tokenswift, "", TokenSwiftOptions, "medusa"),
        "TokenSwift: the target and heads on it, with a part of its keys and values; and retrieval",
        settings_of={"fixed": TokenSwiftTreeConfig},
        about=TokenSwiftOptions.__doc__ or "",
        shape="fixed",
        retrieve="both",
        context=2,
        reserved=0.6,
    )
}
