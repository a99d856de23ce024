"""The method of Medusa heads."""

from pydantic import Field

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext, check_sizes
from outpace.drafters.medusa.net import MedusaNet
from outpace.drafters.medusa.source import MedusaSource
from outpace.drafters.method import Method
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.shaped import shaped
from outpace.trees.shapes.rank_paths import MEDUSA_NODES


class MedusaOptions(ModelOptions):
    """Medusa."""

    also = ("template",)
    shape: str = Field(
        default="template", description="how the tree grows, template being its authors'; its settings are options too"
    )


def _medusa(options: MedusaOptions, context: BuildContext) -> Proposer:
    net, target = context.trained(MedusaNet, "medusa", "medusa")
    check_sizes(net.config, hidden_size=target.config.hidden_size, vocab_size=target.vocab_size)
    vocabulary = context.ranked_vocabulary(options.vocabulary)
    source = MedusaSource(net, target.head, target.config.num_hidden_layers, options.noise, vocabulary)
    budget = net.config.heads if options.shape == "chain" else context.default_budget(15, MEDUSA_NODES)
    return shaped(source, options, context, budget)


METHODS = {
    "medusa": Method(_medusa, "Medusa: heads on the target's last state guess all depths", MedusaOptions, "medusa")
}
