"""Methods of DSpark."""

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.dflash.methods import block_proposer, trained_block
from outpace.drafters.domino.methods import PoolSize, pool_size
from outpace.drafters.dspark.net import DSparkNet
from outpace.drafters.dspark.source import DSparkSource
from outpace.drafters.method import Method
from outpace.drafters.model_options import ModelOptions


class DSparkOptions(ModelOptions):
    """DSpark."""

    pool: PoolSize = None


def _dspark(options: DSparkOptions, context: BuildContext) -> Proposer:
    net, target, head = trained_block(options, context, DSparkNet, "dspark")
    pool = pool_size(options.pool, context, head.ids)
    source = DSparkSource(net, target, head, noise=options.noise, pool=pool)
    return block_proposer(options, context, source, "dspark")


DSPARK = Method(_dspark, "DSpark: DFlash's block, corrected by the token before", DSparkOptions, "dspark")
METHODS = {"dspark": DSPARK}
