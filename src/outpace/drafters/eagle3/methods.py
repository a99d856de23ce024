"""Methods on EAGLE-3's drafter: its own beam, FR-Spec's smaller head, and the shapes of DDD, ECHO and Graft."""

from functools import partial

from pydantic import Field

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import CPU_NODES, BuildContext, check_sizes
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.eagle3.source import EagleSource
from outpace.drafters.method import Method, variant
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.ranked_vocabulary import EVERY_ID
from outpace.drafters.shaped import shaped
from outpace.lib.errors import InvalidRequest


class EagleOptions(ModelOptions):
    """EAGLE-3.

    Its default tree is its authors' (60, 7, 10): 59 drafted nodes and 8 tokens on the longest path; on a CPU 7 nodes.
    Graft's paper gives EAGLE-3, ECHO and Graft one tree: off the CPU compare with budget=60,depth=9.
    """

    shape: str = Field(default="beam", description="how the tree grows; its settings are options too")


def _eagle3(
    options: ModelOptions, context: BuildContext, method: str = "eagle3", budget: int = 59, depth: int | None = None
) -> Proposer:
    """A proposer; budget and depth are defaults off the CPU, depth=None the shape's own."""
    net, target = context.trained(Eagle3Net, method, "eagle3")
    check_sizes(net.config, target_hidden_size=target.config.hidden_size, vocab_size=target.vocab_size)
    source = EagleSource(net, target, options.noise, context.ranked_vocabulary(options.vocabulary))
    defaults = {} if depth is None or context.device.type == "cpu" else {"depth": depth}
    return shaped(source, options, context, context.default_budget(CPU_NODES, budget), defaults)


def _fr_spec(options: ModelOptions, context: BuildContext) -> Proposer:
    """EAGLE-3 with a vocabulary that the drafter brings or that must be given."""
    if options.vocabulary == EVERY_ID:
        raise InvalidRequest(
            f"method 'fr-spec': vocabulary={EVERY_ID}: it drafts from a part; use method 'eagle3' to draft from all"
        )
    net, _ = context.trained(Eagle3Net, "fr-spec", "eagle3")
    if net.config.draft_vocab_size < net.config.vocab_size:
        raise InvalidRequest(
            f"method 'fr-spec' thins out a full head, and this drafter was trained with draft_vocab_size="
            f"{net.config.draft_vocab_size} of {net.config.vocab_size}; use method 'eagle3' (vocabulary= works there)"
        )
    if options.vocabulary is None and context.vocabulary is None:
        raise InvalidRequest("method 'fr-spec': vocabulary=FILE is missing; make one with `outpace rank-vocabulary`")
    return _eagle3(options, context, "fr-spec")


EAGLE3 = Method(_eagle3, "EAGLE-3: the target's features extended token by token", EagleOptions, "eagle3")


def _on_eagle3(name: str, budget: int = 59, depth: int | None = None) -> Method:
    return Method(partial(_eagle3, method=name, budget=budget, depth=depth), "", ModelOptions, "eagle3")


METHODS = {
    "eagle3": EAGLE3,
    "fr-spec": Method(_fr_spec, "FR-Spec: EAGLE-3 that drafts only frequent tokens", EagleOptions, "eagle3"),
    "ddd": variant(
        _on_eagle3("ddd"), "DDD: EAGLE-3's beam, deeper while it holds much probability", ("ddd",), shape="ddd"
    ),
    # ECHO and Graft draft in the tree of Graft's paper: 60 nodes and a depth of 9; on a CPU 7 nodes and a depth of 8,
    # as EAGLE-3 has them there. A draft that a gate ended keeps 8, 24 or 40 of Graft's 60 nodes.
    "echo": variant(
        _on_eagle3("echo", 60, 9), "ECHO: EAGLE-3's beam; doubtful drafts lend their slots", ("echo",), shape="echo"
    ),
    "graft": variant(
        _on_eagle3("graft", 60, 9),
        "Graft: EAGLE-3's beam, pruned where the draft is uncertain, and retrieval",
        ("gated", "beam"),
        shape="gated",
        retrieve="matrix",
    ),
}
