"""What the engine reports: where tokens come from, events while it runs, counters and a result at the end.

This file loads without torch.
"""

from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal

NodeOrigin = Literal["pending", "drafted", "retrieved", "matched", "forced"]
"""The origin of a node: the pending token; a draft model or head; earlier top-k ids of the target, in a matrix or a
pool of n-grams; text that followed the same words before; a grammar."""
Origin = NodeOrigin | Literal["bonus"]
"""The origin of an emitted token: that of its node, or "bonus" for the target's own."""
ORIGINS: tuple[NodeOrigin, ...] = ("pending", "drafted", "retrieved", "matched", "forced")
"""By number, as the compiled kernels write them (growth.h)."""
RETRIEVED: tuple[NodeOrigin, ...] = ("retrieved", "matched")


@lru_cache(maxsize=4096)
def origins_of(origin: NodeOrigin, nodes: int) -> tuple[NodeOrigin, ...]:
    """[N] origins of a tree with one source, the pending token included."""
    return ("pending", *(origin,) * (nodes - 1))


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model found one emitted token, before temperature, truncation and every other option.

    Attributes:
        rank: 1 plus the number of tokens that were more likely.
        top: the most likely tokens, best first, as (id, log-probability); the emitted one is in it if it is among them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RoundTrace:
    """One round of one request: the tree that was verified, and what became of it.

    Attributes:
        path: accepted nodes from node 0 on; the answer may end before the last of them.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    origins: tuple[NodeOrigin, ...]
    path: tuple[int, ...]
    next_token: int

    @property
    def token_origins(self) -> tuple[Origin, ...]:
        """The origins of the round's tokens, in order."""
        named: list[Origin] = [self.origins[node] for node in self.path[1:]]
        return (*named, "bonus")


@dataclass(frozen=True)
class StepEvent:
    """Tokens that one request gained in one step, and its end if it ended.

    Attributes:
        tokens: ids emitted in this step, in order.
        text: text that became certain in this step; empty when the engine has no detokenizer.
        finish_reason: "stop", "length", "cancelled" or "error" when the request ended with this step.
        logprobs: one entry per token if requested, else None.
        rounds: the rounds that decided the tokens, if a trace was requested; the first token of an answer has none.
    """

    request_id: int
    sample_index: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None
    logprobs: tuple[TokenLogprob, ...] | None = None
    rounds: tuple[RoundTrace, ...] = ()

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin of each token; all "bonus" without a trace."""
        named = [origin for one in self.rounds for origin in one.token_origins]
        own: list[Origin] = ["bonus"]
        return tuple((named or own * len(self.tokens))[: len(self.tokens)])


@dataclass
class RequestMetrics:
    """Counters of one request. Times are wall-clock milliseconds of its steps; shared steps count in full.

    They are the host's: what a GPU still computes counts where the host next waits for it. A round consists of its
    phases draft, forward, verify, commit and observe; `decode_ms` also has the time between rounds, such as other
    requests' prompts.

    Attributes:
        prompt_tokens, new_tokens: counts; new_tokens includes an EOS id.
        reused_tokens: prompt tokens that were cached, from the turn before or from another request.
        steps: target passes after prefill.
        plain_steps: steps without drafts: there were no candidates, or their expected gain was below their cost.
        drafted: drafted nodes verified, without pending tokens.
        draft_passes: forward passes of a draft model, without prompts.
        accepted: drafted tokens that were emitted.
        retrieved, accepted_retrieved: of `drafted` and of `accepted`, what was retrieved or matched.
        forced, accepted_forced: of `drafted` and of `accepted`, what a grammar forced.
        accepted_by_origin: `accepted` by origin; the other tokens of the answer are the target's own.
        accepted_per_depth: entry d counts the steps whose draft at depth d + 1 was emitted.
        rounds: of each step the tokens emitted, the nodes drafted, and milliseconds from the first token to its end.
        ttft_ms: `Engine.add` to first token, waiting included. decode_ms: first token to last token.
        draft_ms: building trees, with the passes of draft models and what they had to catch up on.
        net_ms, lm_head_ms, head_ms, tree_ms, retrieve_ms, merge_ms, rebuild_ms: parts of draft_ms, as `core.timing`
            has them.
        grammar_ms: what the request's grammar took: part of draft_ms and verify_ms, and its first token's time.
        forward_ms: the target's passes. verify_ms: choosing tokens and walking trees.
        commit_ms: moving KV rows, log-probabilities, stopping, detokenizing.
        observe_ms: learning from verified trees: matrices, histories, rows of a draft model, features for the next
            draft; DFlash and Domino compute their context here, a product per layer.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    plain_steps: int = 0
    drafted: int = 0
    draft_passes: int = 0
    accepted: int = 0
    retrieved: int = 0
    accepted_retrieved: int = 0
    forced: int = 0
    accepted_forced: int = 0
    accepted_by_origin: dict[NodeOrigin, int] = field(default_factory=dict)
    accepted_per_depth: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int, float]] = field(default_factory=list)
    reused_tokens: int = 0
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    draft_ms: float = 0.0
    net_ms: float = 0.0
    lm_head_ms: float = 0.0
    head_ms: float = 0.0
    tree_ms: float = 0.0
    retrieve_ms: float = 0.0
    merge_ms: float = 0.0
    rebuild_ms: float = 0.0
    grammar_ms: float = 0.0
    forward_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0
    observe_ms: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per target pass after prefill, the bonus included; plain decoding has 1.0."""
        return (self.new_tokens - 1) / self.steps if self.steps else 1.0

    @property
    def tpot_ms(self) -> float:
        """Decode milliseconds per token after the first."""
        return self.decode_ms / (self.new_tokens - 1) if self.new_tokens > 1 else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_step": self.tokens_per_step, "tpot_ms": self.tpot_ms}


@dataclass(frozen=True)
class Sample:
    """One finished answer: ids, text, counts and finish reason all end at the same token.

    Attributes:
        token_ids: generated ids, an EOS or the token that completed a stop string included.
        text: decoded text without special tokens, cut before a stop string.
        finish_reason: "stop", "length", "cancelled" or "error".
        stop_reason: the EOS id or the stop string that ended it, else None.
        seed: the seed in use, also when the request named none.
        logprobs: one entry per id if requested, else None.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    seed: int
    metrics: RequestMetrics
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt: n samples. The shortcuts are of the first."""

    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.samples[0].finish_reason

    @property
    def metrics(self) -> RequestMetrics:
        return self.samples[0].metrics
