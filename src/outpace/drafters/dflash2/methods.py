"""Methods of DFlash 2."""

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.dflash.methods import block_proposer, trained_block
from outpace.drafters.dflash2.net import DFlash2Net
from outpace.drafters.dflash2.source import DFlash2Source
from outpace.drafters.method import Method
from outpace.drafters.model_options import ModelOptions
from outpace.lib.errors import ModelError
from outpace.models.families import logit_softcap


def _dflash2(options: ModelOptions, context: BuildContext) -> Proposer:
    net, target, head = trained_block(options, context, DFlash2Net, "dflash2")
    own, cap = net.config.final_logit_softcapping, logit_softcap(target.config)
    if cap is not None and (own not in (None, cap) or net.config.output_multiplier != 1):
        raise ModelError(
            f"output_multiplier={net.config.output_multiplier}, final_logit_softcapping={own}: the target's own head "
            f"caps its logits at {cap}, and only the same cap is supported; use another drafter"
        )
    source = DFlash2Source(net, target, head, noise=options.noise, is_capped=cap is not None)
    return block_proposer(options, context, source, "dflash2")


DFLASH2 = Method(_dflash2, "DFlash 2: DFlash's block, and a selector over pairs", ModelOptions, "dflash2")
METHODS = {"dflash2": DFLASH2}
