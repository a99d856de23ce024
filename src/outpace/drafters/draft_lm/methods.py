"""Methods of draft language models: one source, and the shapes that papers are about."""

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.draft_lm.source import DraftLM
from outpace.drafters.method import LANGUAGE_MODEL, Method, variant
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.shaped import shaped
from outpace.trees.shapes.dynatree import BaselineTreeConfig, DynaTreeConfig, FixedTreeConfig
from outpace.trees.shapes.svip import SvipConfig


def _draft_model(options: ModelOptions, context: BuildContext) -> Proposer:
    vocabulary = context.ranked_vocabulary(options.vocabulary)
    source = DraftLM(context.draft_model(), context.vocab_size, options.noise, vocabulary)
    settings = options.shape_settings()
    if isinstance(settings, SvipConfig):
        budget = settings.depth
    elif isinstance(settings, FixedTreeConfig | DynaTreeConfig):
        budget = context.default_budget(15, 255)
    else:
        budget = context.default_budget(4, 8) if settings is None else context.default_budget(15, 60)
    return shaped(source, options, context, budget)


LINEAR = Method(
    _draft_model, "a draft model's chain, or any tree: classic speculative decoding", ModelOptions, LANGUAGE_MODEL
)
METHODS = {
    "linear": LINEAR,
    # DynaTree's baseline. `linear:shape=fixed` also branches at the pending token, and is a level less deep.
    "fixed": variant(
        LINEAR,
        "a draft model's tree of fixed depth and breadth",
        ("fixed",),
        {"fixed": BaselineTreeConfig},
        shape="fixed",
    ),
    "dynatree": variant(
        LINEAR, "DynaTree: a draft model's tree that follows its confidence", ("dynatree",), shape="dynatree"
    ),
    "svip": variant(LINEAR, "SVIP: a draft model's chain that ends where it is uncertain", ("svip",), shape="svip"),
}
