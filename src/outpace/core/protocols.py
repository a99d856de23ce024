"""The contracts between rooms: what a target, a proposer and a verifier hand to each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.tree import DraftTree


@dataclass(frozen=True)
class Needs:
    """What a source wants to see of the target beside the committed ids.

    Attributes:
        top_k: ids of the k largest logits at every verified node and prompt position; 0 for none.
        taps: hidden states at every verified node and prompt position, numbered as transformers' `hidden_states`: 0 is
            the embeddings, i the output of layer i - 1 before the final norm; the number of layers stands for what the
            LM head reads, after that norm.
    """

    top_k: int = 0
    taps: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class NodeOutputs:
    """The target's answer at R nodes of one request.

    Attributes:
        logits: [R, V] in the target's compute dtype.
        top_ids: [R, k] ids of the largest logits, best first.
        top_logits: [R, k] float32 logits of `top_ids`, computed in float32 whatever the compute dtype.
        features: [R, taps * H] tapped hidden states side by side, None if none were asked for.
    """

    logits: Tensor
    top_ids: Tensor
    top_logits: Tensor
    features: Tensor | None = None

    def scores(self, row: int) -> Tensor:
        """[V] float32 logits of one node, exact in float32 for the top candidates."""
        return self.logits[row].to(torch.float32, copy=True).scatter_(0, self.top_ids[row], self.top_logits[row])


@dataclass(frozen=True, eq=False)
class Chunk:
    """A run of prompt tokens to be written after what the slot already holds.

    Attributes:
        slot: the request's slot.
        tokens: [C] int64.
        want_top: also return the top ids at every position, for sources that learn from the prompt.
        is_last: also return the outputs at the last position, from which the first token is drawn.
        taps: hidden states to return at every position.
    """

    slot: int
    tokens: Tensor
    want_top: bool
    is_last: bool
    taps: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class ChunkOutput:
    """Outputs of one prefill chunk: `top_ids` [C, k] and `features` [C, taps * H] if wanted, `last` (one node) if it
    was the last chunk."""

    top_ids: Tensor | None
    last: NodeOutputs | None
    features: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PromptChunk:
    """A run of prompt ids as the target saw it: what a proposer is shown of a prompt.

    Attributes:
        tokens: [C] int64.
        top_ids: [C, k] if the proposer needs them.
        features: [C, taps * H] if the proposer needs them.
    """

    tokens: Tensor
    top_ids: Tensor | None = None
    features: Tensor | None = None


class Target(Protocol):
    """A model with a slot per request. Positions of a tree's nodes are committed length + depth.

    Attributes:
        vocab_size: V.
        max_length: tokens of one request, prompt and answer together.
        max_slots: requests that can be open at a time.
        eos_token_ids: ids that end a request unless it names its own.
    """

    vocab_size: int
    max_length: int
    max_slots: int
    eos_token_ids: tuple[int, ...]

    def open_slot(self) -> int: ...

    def close_slot(self, slot: int) -> None: ...

    def rewind_slot(self, slot: int, length: int) -> None:
        """Forget what a slot holds behind its first `length` committed tokens."""

    def prefill(self, chunks: Sequence[Chunk]) -> list[ChunkOutput]: ...

    def forward(
        self, slots: Sequence[int], trees: Sequence[DraftTree], taps: Sequence[tuple[int, ...]]
    ) -> list[NodeOutputs]: ...

    def commit(self, slot: int, path: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class Verdict:
    """What verification decided for one tree.

    Attributes:
        path: accepted nodes from the root on; path[0] is 0, the pending token.
        next_token: the target's own token after the path; the next round's pending token.
    """

    path: tuple[int, ...]
    next_token: int

    @property
    def accepted_drafts(self) -> int:
        return len(self.path) - 1


@dataclass(frozen=True)
class Stream:
    """What the choice of a request's next tokens depends on beside the logits.

    Attributes:
        params: sampling parameters.
        seed, sample_index: key of the noise.
        ids: prompt and generated ids; the last one is node 0 of the tree, if there is a tree.
        prompt_length: how many of `ids` are the prompt.
        eos_token_ids: the request's EOS ids, its own or the model's, also when it ignores them: they end it unless
            `params.ignore_eos`, and cannot be chosen before `params.min_new_tokens`.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    ids: Sequence[int]
    prompt_length: int = 0
    eos_token_ids: tuple[int, ...] = ()

    @property
    def first_position(self) -> int:
        """Absolute position of the token that is drawn after node 0."""
        return len(self.ids)


@dataclass(frozen=True)
class DraftRequest:
    """One request's wish for a tree.

    Attributes:
        stream: its ids, the last one pending, and the randomness of its next tokens.
        budget: drafted nodes at most; what one request leaves of it, a proposer may give to others of the same round.
        max_depth: depth of a drafted node at most.
    """

    stream: Stream
    budget: int
    max_depth: int

    @property
    def ids(self) -> Sequence[int]:
        return self.stream.ids


@dataclass(frozen=True, eq=False)
class Observation:
    """One verified tree, told to the proposer: retrieval learns from rejected nodes too."""

    tree: DraftTree
    verdict: Verdict
    outputs: NodeOutputs


class Proposer(Protocol):
    """Answers "which tree?" for a batch of requests. `open` makes the state that the engine keeps per request and
    `close` takes it back; `rewind` says that only the first `length` ids it has seen still hold, when a conversation
    goes on from there; `reset` forgets what was learned across requests.

    The trees of a request that was opened `alone` depend on nothing but its own ids and parameters: not on what others
    said before or say beside it. So it is where rejection decides, for there the tree has a say in what is said.

    Attributes:
        needs: what it wants of the target.
        budget: drafted nodes per tree unless a request asks for another number.
    """

    needs: Needs
    budget: int

    def open(self, alone: bool = False) -> Any: ...

    def close(self, state: Any) -> None: ...

    def rewind(self, state: Any, length: int) -> None: ...

    def prefill(self, states: Sequence[Any], chunks: Sequence[PromptChunk]) -> None: ...

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]: ...

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None: ...

    def reset(self) -> None: ...


class Detokenizer(Protocol):
    """Turns ids into text one by one.

    `push` returns the text that became certain, maybe empty: a token can end inside a character. `flush` returns
    what is still open at the end.
    """

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...
