"""The method of DART drafters."""

from pydantic import Field

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext, check_sizes
from outpace.drafters.dart.net import DartNet
from outpace.drafters.dart.ngrams import Continuity, load_ngrams
from outpace.drafters.dart.source import DartSource
from outpace.drafters.method import Method
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.shaped import shaped
from outpace.trees.shapes.beam import LEVEL_DECAY


class DartOptions(ModelOptions):
    """DART."""

    also = ("search",)
    shape: str = Field(
        default="search", description="how the tree grows, search being its authors'; its settings are options too"
    )
    ngrams: str | None = Field(
        default=None,
        description="file of the n-grams that score continuations of a path; made by `outpace count-ngrams`",
    )


def _dart(options: DartOptions, context: BuildContext) -> Proposer:
    net, target = context.trained(DartNet, "dart", "dart")
    check_sizes(net.config, target_hidden_size=target.config.hidden_size, vocab_size=target.vocab_size)
    decay = LEVEL_DECAY if options.shape == "search" else None
    continuity = None
    if (file := context.read("ngrams", options.ngrams)) is not None:
        continuity = Continuity(load_ngrams(file, context.vocab_size).to(context.device), search_decay=decay)
    vocabulary = context.ranked_vocabulary(options.vocabulary)
    source = DartSource(net, target, options.noise, vocabulary, continuity)
    budget = net.config.draft_length + 1 if options.shape == "chain" else context.default_budget(15, 60)
    return shaped(source, options, context, budget)


METHODS = {"dart": Method(_dart, "DART: all depths from one pass over mask rows", DartOptions, "dart")}
