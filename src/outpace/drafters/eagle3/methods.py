"""Methods on EAGLE-3's drafter: its own beam, FR-Spec's smaller head, and the shapes of DDD, ECHO and Graft."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, model_validator

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.eagle3.source import EagleSource
from outpace.drafters.kinds import check_sizes, trained_net
from outpace.drafters.method import Method
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.ranked_vocabulary import EVERY_ID
from outpace.drafters.shaped import shaped
from outpace.lib.errors import InvalidRequest

KIND = "eagle3"


class EagleOptions(ModelOptions):
    """EAGLE-3.

    Its default tree is its authors' (60, 7, 10): 59 drafted nodes and 8 tokens on the longest path; on a CPU 15 nodes.
    Graft's paper gives EAGLE-3, ECHO and Graft one tree: off the CPU compare with budget=60,depth=9.
    """

    shape: str = Field(default="beam", description="how the tree grows; its settings stand beside it")


class FrSpecOptions(EagleOptions):
    """EAGLE-3's, with a vocabulary that the drafter brings or that must be given."""

    @model_validator(mode="after")
    def _check(self) -> "FrSpecOptions":
        if self.vocabulary == EVERY_ID:
            raise ValueError(f"vocabulary={EVERY_ID}: it drafts from a part; use method 'eagle3' to draft from all")
        return self


class DddOptions(ModelOptions):
    """Dynamic Depth Decoding."""

    only = ("ddd",)
    shape: str = Field(default="ddd", description="how the tree grows; its settings stand beside it")


class EchoOptions(ModelOptions):
    """ECHO, in the tree of Graft's paper; see `GraftOptions`."""

    only = ("echo",)
    shape: str = Field(default="echo", description="how the tree grows; its settings stand beside it")


class GraftOptions(ModelOptions):
    """Graft: gates and the matrix; its ablations are other values of `shape`, `retrieve`, `place` and `reserved`.

    By default 60 drafted nodes, of which a draft that ended keeps 8, 24 or 40, and a depth of 9, the paper's; on a CPU
    15 nodes, in the same proportions, and a depth of 8, as EAGLE-3 has them there.
    """

    only = ("gated", "beam")
    shape: str = Field(default="gated", description="gated, or beam for a tree that no gate ends")
    retrieve: Literal["none", "matrix", "suffix", "both"] = Field(
        default="matrix", description=str(ModelOptions.model_fields["retrieve"].description)
    )


def _eagle3(
    options: ModelOptions,
    context: BuildContext,
    method: str = "eagle3",
    budget: int = 59,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Proposer:
    net, target = trained_net(Eagle3Net, context, method)
    config, layers = net.config, target.config.num_hidden_layers
    check_sizes(config, target_hidden_size=target.config.hidden_size, vocab_size=target.vocab_size)
    sizes = target.max_length, target.max_slots, target.vocab_size
    vocabulary = context.ranked_vocabulary(options.vocabulary)
    table, taps = target.embedding.weight, config.taps_of(layers)
    source = EagleSource(net, table, target.head, taps, *sizes, options.noise, vocabulary)
    return shaped(source, options, context, context.default_budget(15, budget), defaults)


def _fr_spec(options: FrSpecOptions, context: BuildContext) -> Proposer:
    net, _ = trained_net(Eagle3Net, context, "fr-spec")
    if net.config.draft_vocab_size < net.config.vocab_size:
        raise InvalidRequest(
            f"method 'fr-spec' thins out a full head, and this drafter was trained with draft_vocab_size="
            f"{net.config.draft_vocab_size} of {net.config.vocab_size}; use method 'eagle3' (vocabulary= works there)"
        )
    if options.vocabulary is None and context.vocabulary is None:
        raise InvalidRequest("method 'fr-spec': vocabulary=FILE is missing; make one with `outpace rank-vocabulary`")
    return _eagle3(options, context, "fr-spec")


def _ddd(options: DddOptions, context: BuildContext) -> Proposer:
    return _eagle3(options, context, "ddd")


def _in_grafts_tree(method: str) -> Callable[[ModelOptions, BuildContext], Proposer]:
    """In the budget and depth that Graft's paper gives Graft, ECHO and EAGLE-3 (`shaping.gates.CheckpointConfig`)."""

    def build(options: ModelOptions, context: BuildContext) -> Proposer:
        defaults = {} if context.device.type == "cpu" else {"depth": 9}
        return _eagle3(options, context, method, 60, defaults)

    return build


EAGLE3 = Method(_eagle3, "EAGLE-3: the target's features extended token by token", EagleOptions, KIND)
METHODS = {
    "eagle3": EAGLE3,
    "fr-spec": Method(_fr_spec, "FR-Spec: EAGLE-3 that drafts only frequent tokens", FrSpecOptions, KIND),
    "ddd": Method(_ddd, "DDD: EAGLE-3's beam, deeper while it holds much probability", DddOptions, KIND),
    "echo": Method(
        _in_grafts_tree("echo"), "ECHO: EAGLE-3's beam; doubtful drafts lend their slots", EchoOptions, KIND
    ),
    "graft": Method(
        _in_grafts_tree("graft"), "Graft: EAGLE-3's beam, pruned in doubt, and retrieval", GraftOptions, KIND
    ),
}
