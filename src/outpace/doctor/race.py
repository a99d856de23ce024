"""A method beside plain decoding on a few prompts: what was said, and where the time went."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.api import Model
from outpace.core.events import Generation
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem

PLAIN = "plain"
PHASES = ("draft", "forward", "verify", "commit", "observe")
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Totals:
    """Counts and milliseconds of several answers.

    Attributes:
        decoded: tokens after each answer's first.
        steps, drafted, accepted, retrieved, accepted_retrieved: as in `RequestMetrics`.
        by_depth: steps whose draft at depth d + 1 was accepted.
        decode_ms: from first tokens to last ones.
        phases_ms: by PHASES.
    """

    decoded: int
    steps: int
    drafted: int
    accepted: int
    retrieved: int
    accepted_retrieved: int
    decode_ms: float
    by_depth: tuple[int, ...] = ()
    phases_ms: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> float:
        return self.decoded / self.steps if self.steps else 1.0

    @property
    def ms_per_token(self) -> float:
        return self.decode_ms / self.decoded if self.decoded else 0.0

    @property
    def round_ms(self) -> float:
        return self.decode_ms / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class Race:
    """What both said and took.

    Attributes:
        method: the method's name.
        prompts: how many.
        different: prompts on which its tokens were not plain decoding's.
        plain, drafted: the figures of both.
    """

    method: str
    prompts: int
    different: int
    plain: Totals
    drafted: Totals


def race(model: Model, method: str, items: Sequence[WorkItem], tokens: int) -> Race:
    """Decode prompts by a method and by plain decoding, in turns, after a short run of each. From here on the model
    writes prompts whole, so that whoever comes second does not find them.

    Args:
        model: the model.
        method: a method that is not plain decoding, or "plain" for its figures alone.
        items: prompts; their first turns are asked, as text where the model has no chat template.
        tokens: of an answer at most.
    """
    prompts = [_fitting(model, item, tokens) for item in items]
    methods = list(dict.fromkeys((PLAIN, method)))
    model.engine.shares_prefixes = False
    for name in methods:
        model.generate(prompts[0], SamplingParams(max_new_tokens=WARM_UP_TOKENS), method=name)
    held = [model.proposer(name) for name in methods]  # and not built anew after the reset
    model.reset()
    said: dict[str, list[Generation]] = {name: [] for name in methods}
    for number, prompt in enumerate(prompts):
        for name in methods[:: 1 if number % 2 == 0 else -1]:
            said[name].append(model.generate(prompt, SamplingParams(max_new_tokens=tokens), method=name))
    del held
    pairs = zip(said[PLAIN], said[method], strict=True)
    different = sum(one.token_ids != other.token_ids for one, other in pairs)
    return Race(method, len(prompts), different, totals(said[PLAIN]), totals(said[method]))


def totals(answers: Sequence[Generation]) -> Totals:
    """The sums of answers' metrics."""
    metrics = [answer.metrics for answer in answers]
    deepest = max((len(one.accepted_per_depth) for one in metrics), default=0)
    return Totals(
        decoded=sum(max(one.new_tokens - 1, 0) for one in metrics),
        steps=sum(one.steps for one in metrics),
        drafted=sum(one.drafted for one in metrics),
        accepted=sum(one.accepted for one in metrics),
        retrieved=sum(one.retrieved for one in metrics),
        accepted_retrieved=sum(one.accepted_retrieved for one in metrics),
        decode_ms=sum(one.decode_ms for one in metrics),
        by_depth=tuple(sum((one.accepted_per_depth[d : d + 1] or [0])[0] for one in metrics) for d in range(deepest)),
        phases_ms={name: sum(getattr(one, f"{name}_ms") for one in metrics) for name in PHASES},
    )


def _fitting(model: Model, item: WorkItem, tokens: int) -> list[int]:
    """A prompt's ids, the last ones where the model has no room for all."""
    is_chat = bool(model.codec.tokenizer.chat_template) and not item.raw
    ids = model.encode(item.prompt(0, []) if is_chat else item.turns[0])
    return ids[-max(1, model.target.max_length - tokens) :]
