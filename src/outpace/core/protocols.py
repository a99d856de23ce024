"""The contracts between target, proposer and verifier."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.budget.costs import Prices
from outpace.core.params import Constraint, SamplingParams
from outpace.core.tree import DraftTree

NO_TOKEN = -1  # a missing id: before a text's first, and where a request's options leave no token to choose
TOP_CANDIDATES = 16  # ids of the largest logits that a pass returns of a row; fewer of a smaller vocabulary


@dataclass(frozen=True)
class Needs:
    """Outputs of the target that a method reads, and how it is budgeted.

    Attributes:
        top_k: how many ids of the largest logits it reads, up to TOP_CANDIDATES, at every verified node, and at every
            prompt position of requests without prices of time; 0 for none. Outputs may hold more ids.
        taps: hidden states at every verified node and prompt position, numbered as transformers' `hidden_states`: 0 is
            the embeddings, i the output of layer i - 1; the number of layers stands for the output of the final norm,
            one more for its input.
        prices: most nodes of a tree where the cost model chooses them (`DraftRequest.prices`); 0 where it never does.
        whole_trees: it learns from nodes that cannot be accepted, so that none is cut for a grammar.
    """

    top_k: int = 0
    taps: tuple[int, ...] = ()
    prices: int = 0
    whole_trees: bool = False


@dataclass(frozen=True, eq=False)
class NodeOutputs:
    """The target's answer at R nodes of one request.

    Attributes:
        logits: [R, V] in the target's compute dtype.
        top_ids: [R, k] ids of the largest logits, best first.
        top_logits: [R, k] float32 logits of `top_ids`, computed in float32 whatever the compute dtype.
        features: [R, taps * H] tapped hidden states, concatenated; None without taps.
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
        want_top: also return the top ids at every position, for methods that learn from the prompt.
        is_last: also return the outputs at the last position, from which the first token is drawn.
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
    """A run of prompt ids with the target's outputs, as a proposer gets it.

    Attributes:
        tokens: [C] int64.
        top_ids, features: [C, k] and [C, taps * H], if the proposer needs them; top ids neither for requests with
            prices nor in vLLM.
        before: the id before the first of them; NO_TOKEN at the beginning of a prompt.
    """

    tokens: Tensor
    top_ids: Tensor | None = None
    features: Tensor | None = None
    before: int = NO_TOKEN


class SlotMemory(Protocol):
    """What slots hold, in rows: the keys and values of a token."""

    @property
    def budget(self) -> int | None:
        """Rows that all slots together may hold; None without a limit."""

    def held(self, slot: int) -> int:
        """Rows of a slot that take memory."""

    def trim(self, slot: int) -> None:
        """Give back the memory of a slot's rows after the committed ones."""


class Target(Protocol):
    """A model with a slot per request. Positions of a tree's nodes are committed length + depth.

    Slots are numbered from 0. A request begins in a slot that was rewound to 0 or filled by `copy_slot`, and a step
    that an exception cut short is rolled back by rewinding its slots. `engine.pricing.measure` also uses
    `context_times` and `captures` of targets that have them, such as `models.target.PackedTarget`.

    Attributes:
        vocab_size: V.
        max_length: tokens of one request, prompt and answer together.
        max_slots: requests that can be decoded at a time.
        eos_token_ids: ids that end a request unless it names its own.
        memory: counts the rows of its slots.
    """

    vocab_size: int
    max_length: int
    max_slots: int
    eos_token_ids: tuple[int, ...]

    @property
    def memory(self) -> SlotMemory: ...

    def rewind_slot(self, slot: int, length: int) -> None:
        """Discard all but the first `length` committed tokens of a slot."""

    def copy_slot(self, source: int, goal: int, length: int) -> None:
        """Fill a slot with the first `length` committed tokens of another, or of itself, and nothing else."""

    def run_pass(
        self,
        chunks: Sequence[Chunk],
        slots: Sequence[int],
        trees: Sequence[DraftTree],
        taps: Sequence[tuple[int, ...]] = (),
    ) -> tuple[list[ChunkOutput], list[NodeOutputs]]:
        """Append prompt chunks to their slots and compute every node of the trees, of other slots, in one pass. Nothing
        of the trees is committed."""

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None: ...


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
class SamplingContext:
    """What the choice of a request's next tokens depends on, except for the logits.

    Attributes:
        ids: prompt and generated ids; the last one is node 0 of the tree, if there is a tree.
        eos_token_ids: the request's EOS ids, its own or the model's, also when it ignores them: they end it unless
            `params.ignore_eos`, and cannot be chosen before `params.min_new_tokens`.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    ids: Sequence[int]
    prompt_length: int = 0
    eos_token_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None

    @cached_property
    def prompt(self) -> Sequence[int]:
        """The ids of the prompt."""
        return self.ids[: self.prompt_length]

    @cached_property
    def prompt_set(self) -> frozenset[int]:
        """Each id of the prompt once. Penalties read it for every row of a round; the prompt itself may be long."""
        return frozenset(self.prompt)

    @property
    def generated(self) -> Sequence[int]:
        """The ids after the prompt."""
        return self.ids[self.prompt_length :]

    @property
    def ending_ids(self) -> tuple[int, ...]:
        """Ids that nothing can follow: they end the request or, before `min_new_tokens`, cannot be chosen."""
        return () if self.params.ignore_eos else self.eos_token_ids

    @property
    def first_position(self) -> int:
        """Absolute position of the token that is drawn after node 0."""
        return len(self.ids)

    @property
    def before(self) -> int:
        """The id before node 0; NO_TOKEN without one."""
        return self.ids[-2] if len(self.ids) > 1 else NO_TOKEN


@dataclass(frozen=True)
class DraftRequest:
    """A request for a tree.

    Attributes:
        sampling: its ids, the last one pending, and what the choice of its next tokens depends on.
        budget: drafted nodes at most; a proposer may move unused ones to other requests of the same round.
        max_depth: depth of a drafted node at most.
        prices: what time costs in this round, by which the proposer chooses nodes; None unless the proposer needs it,
            no budget was given, and the answer cannot depend on it.
    """

    sampling: SamplingContext
    budget: int
    max_depth: int
    prices: Prices | None = None

    @property
    def ids(self) -> Sequence[int]:
        return self.sampling.ids


@dataclass(frozen=True, eq=False)
class Observation:
    """One verified tree. Proposers learn from it, rejected nodes included.

    Attributes:
        tree, verdict, outputs: the tree that was verified, its verdict, and the target's outputs at its nodes.
        before: the id before the pending token; NO_TOKEN without one.
    """

    tree: DraftTree
    verdict: Verdict
    outputs: NodeOutputs
    before: int = NO_TOKEN


class RequestStates(Protocol):
    """What proposers, sources and retrievers have in common: a state for each request, and what they learn.

    `open` makes the state for a request in a slot of the target. A drafter with keys and values of its own has them in
    its slot of the same number, which it empties first. `reset` forgets what was learned across requests.

    `rewind` discards all but the first `length` ids: an exception has cut a step short, or another text continues from
    there. An exception may come between any two lines of `prefill`, `propose`, `observe` or `rewind` itself; afterwards
    the state must be valid, though it may know less. What was learned across requests may stay.

    `fork` is `open` for a request whose first `length` ids are not passed to `prefill`: their keys and values were
    copied from the request of `state`, which may have ended or continued; it is only read, unless it has the same slot.
    None stands for a request of another proposer. `can_fork` returns whether that works from its own state, or None.

    A request that was opened `alone` is neither forked nor forked from, and its trees depend on nothing but its own ids
    and parameters, since under rejection they affect the answer.

    Attributes:
        needs: outputs of the target that it reads.
    """

    needs: Needs

    def open(self, slot: int, alone: bool = False) -> Any: ...

    def can_fork(self, own: bool) -> bool: ...

    def fork(self, state: Any, slot: int, length: int) -> Any: ...

    def rewind(self, state: Any, length: int) -> None: ...

    def prefill(self, states: Sequence[Any], chunks: Sequence[PromptChunk]) -> None: ...

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None: ...

    def reset(self) -> None: ...


class Proposer(RequestStates, Protocol):
    """Proposes a tree for each request of a batch.

    `close` marks the end of a request. It need not release anything: a dropped request ends without this call.

    Attributes:
        budget: drafted nodes per tree unless a request has its own budget.
    """

    budget: int

    def close(self, state: Any) -> None: ...

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]: ...


class Stateless:
    """`RequestStates` without any state."""

    needs = Needs()

    def open(self, slot: int, alone: bool = False) -> Any:
        return None

    def can_fork(self, own: bool) -> bool:
        """A method that reads no prompts can be forked; others override this."""
        return type(self).prefill is Stateless.prefill

    def fork(self, state: Any, slot: int, length: int) -> Any:
        return self.open(slot)

    def rewind(self, state: Any, length: int) -> None:
        pass

    def prefill(self, states: Sequence[Any], chunks: Sequence[PromptChunk]) -> None:
        pass

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None:
        pass

    def reset(self) -> None:
        pass


class BaseProposer(Stateless):
    """A `Proposer` without state, to be completed by `propose`."""

    budget = 8

    def close(self, state: Any) -> None:
        pass

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        raise NotImplementedError(f"{type(self).__name__} has no propose()")


class Detokenizer(Protocol):
    """Turns ids into text: `push` returns what became certain with an id, `flush` the rest at the end."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...
