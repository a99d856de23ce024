"""vLLM's scheduler as our proposers see it, without vLLM: rows that move, chunks, cached beginnings, preemption."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from outpace.core.protocols import NO_TOKEN, BaseProposer, DraftRequest, Needs, Observation, PromptChunk
from outpace.core.tree import DraftTree
from outpace.vllm.capture import TargetPass
from outpace.vllm.rounds import Rounds

VOCAB, TOP, LENGTH = 50, 4, 120


def said(ids: Sequence[int]) -> int:
    """What the target says behind a text."""
    return (sum(token * weight for token, weight in zip(ids[-3:], (3, 5, 7), strict=False)) + len(ids)) % VOCAB


def feature(ids: Sequence[int]) -> list[float]:
    """The target's hidden state at the last of some ids: where it stands, and a sum of what it has seen."""
    return [float(len(ids) - 1), float(sum(token * (place + 1) for place, token in enumerate(ids)))]


def best(before: int, token: int) -> list[int]:
    """The target's best ids behind two tokens."""
    return [(3 * before + token + rank) % VOCAB for rank in range(TOP)]


@dataclass(eq=False)
class Known:
    """What the witness has observed of one request. `proposed`: the last chain, and the ids behind which it stood; None
    when it has heard of it."""

    slot: int
    features: list[list[float]] = field(default_factory=list)
    proposed: tuple[list[int], list[int]] | None = None

    @property
    def offset(self) -> int:
        """The position that it knows first."""
        return int(self.features[0][0]) if self.features else 0


class Witness(BaseProposer):
    """Proposes what will be said, mostly, and checks that all it is told is true. `taps`: whether it reads hidden
    states."""

    def __init__(self, taps: bool, truth: float = 0.7) -> None:
        self.needs, self.budget = Needs(TOP, (1,) if taps else ()), 8
        self._truth, self._random = truth, random.Random(0)
        self._in_use: dict[int, Known] = {}
        self.proposed = self.observed = self.prompt_rows = 0
        self.taken: list[int] = []  # lengths of beginnings

    def open(self, slot: int, alone: bool = False) -> Known:
        known = self._in_use[slot] = Known(slot)
        return known

    def can_fork(self, own: bool) -> bool:
        return own

    def fork(self, state: Known, slot: int, length: int) -> Known:
        assert 0 < length <= len(state.features)
        self.taken.append(length)
        known = self._in_use[slot] = Known(slot, state.features[:length])
        return known

    def rewind(self, state: Known, length: int) -> None:
        assert length <= len(state.features) or not self.needs.taps
        del state.features[length:]
        state.proposed = None

    def prefill(self, states: Sequence[Known], chunks: Sequence[PromptChunk]) -> None:
        for state, chunk in zip(states, chunks, strict=True):
            assert self._in_use[state.slot] is state, "a slot has one request"
            assert state.proposed is None, "a round is open: rewind comes first"
            self.prompt_rows += len(chunk.tokens)
            self._take(state, chunk.features)

    def propose(self, states: Sequence[Known], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = []
        for state, request in zip(states, requests, strict=True):
            assert self._in_use[state.slot] is state, "a slot has one request"
            ids = list(request.ids)
            if self.needs.taps:
                assert len(state.features) == len(ids) - 1, "features of all but the pending token"
                sums = [row[1] for row in state.features]
                steps = [
                    (now - before) / (state.offset + place + 1) for place, (before, now) in enumerate(pairwise(sums), 1)
                ]
                assert steps == ids[1:-1], "features of the same tokens"
            tokens = [ids[-1]]
            for _ in range(min(request.budget, request.max_depth)):
                is_right = self._random.random() < self._truth
                tokens.append(self._says(state, [*ids, *tokens[1:]]) if is_right else self._random.randrange(VOCAB))
            self.proposed += 1
            state.proposed = tokens, ids
            trees.append(DraftTree.chain(torch.tensor(tokens)))
        return trees

    def observe(self, states: Sequence[Known], observations: Sequence[Observation]) -> None:
        for state, seen in zip(states, observations, strict=True):
            assert state.proposed is not None, "each tree is heard of once"
            tokens, ids = state.proposed
            accepted, shown = len(seen.verdict.path) - 1, seen.tree.tokens.tolist()
            assert shown == tokens[: len(shown)]
            assert len(ids) < 2 or seen.before == ids[-2]
            _check_best(seen.before, shown, seen.outputs.top_ids)
            if len(ids) > 2:
                path = [*tokens[1 : accepted + 1], seen.verdict.next_token]
                assert path == [self._says(state, [*ids, *path[:depth]]) for depth in range(accepted + 1)]
            self.observed += 1
            state.proposed = None
            features = seen.outputs.features
            self._take(state, None if features is None else features[list(seen.verdict.path)])

    def _says(self, state: Known, ids: Sequence[int]) -> int:
        return (said(ids) + state.offset) % VOCAB

    def _take(self, state: Known, features: Tensor | None) -> None:
        if not self.needs.taps:
            return
        assert features is not None
        rows = features.tolist()
        where = [row[0] for row in [*state.features[-1:], *rows]]
        assert where == [where[0] + step for step in range(len(where))], "positions follow each other"
        state.features += rows


def _check_best(before: int, tokens: Sequence[int], top_ids: Tensor) -> None:
    """Best ids stand beside the tokens that they are behind."""
    above = [before, *tokens[:-1]]
    wanted = [best(one, token) for one, token in zip(above, tokens, strict=True)]
    assert top_ids.tolist()[1:] == wanted[1:]
    assert before == NO_TOKEN or top_ids.tolist()[0] == wanted[0]


@dataclass(eq=False)
class Running:
    """A request."""

    ids: list[int]
    end: int
    computed: int = 0
    drafts: list[int] = field(default_factory=list)


class Simulated:
    """An engine. `block`: tokens of a block that is cached; 0 caches nothing. `upset`: how often a request is preempted
    or left out, and a pass is not seen."""

    def __init__(self, rounds: Rounds, seed: int, chunk: int = 16, block: int = 0, upset: float = 0.0) -> None:
        self._rounds, self._random = rounds, random.Random(seed)
        self._chunk, self._block, self._upset = chunk, block, upset
        self.requests: list[Running] = []
        self.done: list[list[int]] = []
        self._cached: list[list[int]] = []
        self.paused = 0.0

    def add(self, prompt: Sequence[int], new: int) -> None:
        """A request that comes."""
        request = Running(list(prompt), len(prompt) + new)
        self._find_cached(request)
        self.requests.append(request)

    def _find_cached(self, request: Running) -> None:
        request.computed = 0
        for text in self._cached if self._block else ():
            same = 0
            while same < min(len(text), len(request.ids) - 1) and text[same] == request.ids[same]:
                same += 1
            request.computed = max(request.computed, same // self._block * self._block)

    def step(self) -> None:
        """One step of the engine."""
        scheduled = []
        for request in self.requests:
            event = self._random.random()
            if event < self._upset / 2:  # preempted
                self._cached.append(request.ids[: request.computed])
                request.drafts = []
                self._find_cached(request)
            elif event > self._upset:
                scheduled.append(request)
        if self._upset:
            self._random.shuffle(scheduled)
        if scheduled:
            self._run(scheduled)

    def _run(self, scheduled: list[Running]) -> None:
        starts, positions, tokens, features, top = [0], list[int](), list[int](), list[list[float]](), list[list[int]]()
        sampled: list[list[int]] = []
        for request in scheduled:
            known, first = len(request.ids), request.computed
            drafts = request.drafts if first == known - 1 else []
            drafts = drafts[: self._random.randint(0, len(drafts))] if self._random.random() < self._upset else drafts
            query = [*request.ids[first : first + self._chunk], *drafts]
            text = [*request.ids[:first], *query]
            logits = len(drafts) + 1
            top += [
                best(*([NO_TOKEN, *text][len(text) - logits + one : len(text) - logits + one + 2]))
                for one in range(logits)
            ]
            features += [feature(text[: first + one + 1]) for one in range(len(query))]
            tokens += query
            starts.append(len(tokens))
            positions.append(first)
            new: list[int] = []
            if len(text) >= known:
                for draft in [*drafts, None]:
                    new.append(said([*request.ids, *new]))
                    if new[-1] != draft:
                        break
            request.computed = len(text) if len(text) < known else known + len(new) - 1
            request.ids += new
            request.drafts = []
            sampled.append(new)
        ids = np.zeros((len(scheduled), LENGTH), dtype=np.int32)
        for row, request in enumerate(scheduled):
            ids[row, : len(request.ids)] = request.ids
        states = torch.tensor(features, dtype=torch.float64)
        seen = TargetPass(starts, positions, tokens, states, torch.tensor(top))
        lengths = np.array([len(request.ids) for request in scheduled])
        shown = None if self._random.random() < self._upset / 4 else seen
        drafts_of = self._rounds.step(sampled, lengths, ids, shown, self._random.random() >= self.paused)
        for request, drafts in zip(scheduled, drafts_of, strict=True):
            request.drafts = drafts
            if len(request.ids) >= request.end:
                self.requests.remove(request)
                self._cached.append(request.ids[: request.computed])
                self.done.append(request.ids)

    def run(self, most: int = 4000) -> int:
        """Steps until nothing is left to do; how many they were."""
        for count in range(most):
            if not self.requests:
                return count
            self.step()
        raise AssertionError("requests never end")


def random_prompts(seed: int, count: int, shared: int = 0) -> list[list[int]]:
    """Prompts, with a common beginning if any."""
    source = random.Random(seed)
    beginning = [source.randrange(VOCAB) for _ in range(shared)]
    return [beginning + [source.randrange(VOCAB) for _ in range(source.randint(3, 30))] for _ in range(count)]
