"""A tiny real model with every kind of method on it, and plain decoding's answers to compare with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from llguidance import LLTokenizer

from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.methods.catalog import build_proposer, parse_method
from outpace.models.target import PackedTarget
from outpace.testing import decode, toy_context
from outpace.trees.grafting import GraftedProposer, MatrixRetriever, SuffixRetriever
from outpace.trees.proposer import EmptyDraft
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.shapes.rank_paths import grafted_paths
from outpace.trees.union.proposer import UnionPlan
from tests.grammars import EOS, OBJECT, toy_tokenizer
from tests.lossless.led import LedSource
from tests.lossless.test_matrix import Case, proposer_for
from tests.unit.drafters.source.learned import proposer_of, source_of
from tests.unit.engine.doubles import PairDetokenizer
from tests.unit.models.tiny import VOCAB, random_ids, tiny_config, tiny_target
from tests.unit.trees.union.worlds import union_of

CPU = torch.device("cpu")
SLOTS = 4
CHUNK = 20
RETRIEVAL = {
    "plain": "plain",
    "lookup": "lookup:budget=3",
    "recycle": "recycle:budget=8",
    "private": "recycle:budget=8,matrix=private",
    "samd": "samd:budget=8,min_match=1",
    "lookahead": "lookahead:budget=15",
    "union": "outpace:draft=none,budget=9",
}
DRAFTERS = {
    "eagle3": ("eagle3", "beam"), "domino": ("domino", "beam"), "dflash": ("dflash", "chain"),
    "dart": ("dart", "dynatree"), "medusa": ("medusa", "template"), "linear": ("draft-lm", "chain"),
    "dynatree": ("draft-lm", "dynatree"), "fixed": ("draft-lm", "fixed"), "exit": ("early-exit", "beam"),
}  # fmt: skip
"""Source and shape of each method with a drafter."""
GRAFTS = ("graft", "tail", "union-domino", "union-eagle3")
METHODS = (*RETRIEVAL, *DRAFTERS, *GRAFTS)
BEGINNING = random_ids(34, 5)
"""Of most prompts: who comes later takes it over, or waits for it."""
PROMPTS = [
    [*BEGINNING, *random_ids(9, 1), *random_ids(9, 1)],
    [*BEGINNING, *random_ids(9, 2)],
    [*BEGINNING, *random_ids(22, 3)],
    random_ids(3, 4),
]
OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 9, "logprobs": 2},
    {"max_new_tokens": 8, "temperature": 0.7, "seed": 5},
    {"max_new_tokens": 10, "temperature": 0.9, "seed": 6, "repetition_penalty": 1.2},
    {"max_new_tokens": 7},
    {"max_new_tokens": 12, "temperature": 0.6, "seed": 7, "grammar": OBJECT, "eos_token_ids": (EOS,)},
]


@cache
def plain(prompt: tuple[int, ...], options: int) -> Session:
    """What plain decoding says, alone and undisturbed."""
    (session,) = decode(_engine(_target()), [prompt], [SamplingParams(**OPTIONS[options])], [EmptyDraft()])
    return session


def _target() -> PackedTarget:
    return tiny_target(tiny_config("llama"), max_slots=SLOTS)


def _engine(target: PackedTarget) -> Engine:
    return Engine(target, PairDetokenizer, CHUNK, grammar_tokenizer=_tokenizer)


@cache
def _tokenizer() -> LLTokenizer:
    return toy_tokenizer(VOCAB)


@dataclass(eq=False)
class World:
    """An engine on a model of its own, and its methods, each made when it is first asked for."""

    target: PackedTarget = field(default_factory=_target)

    def __post_init__(self) -> None:
        self.engine = _engine(self.target)
        self._proposers: dict[str, Proposer] = {}
        self._answers = [plain(tuple(prompt), which).ids for prompt in PROMPTS for which in range(len(OPTIONS))]

    def proposer(self, method: str) -> Proposer:
        if method not in self._proposers:
            self._proposers[method] = self._make(method)
        return self._proposers[method]

    def _make(self, method: str) -> Proposer:
        if method in RETRIEVAL:
            return build_proposer(parse_method(RETRIEVAL[method]), toy_context(VOCAB))
        if method in DRAFTERS:
            return self._led(*DRAFTERS[method])
        if method.startswith("union"):
            base = self._led(method.removeprefix("union-"), "beam")
            return union_of(base, MatrixLearner(TransitionMatrix(VOCAB, CPU)), UnionPlan(6, 0.9))
        base = proposer_of("gated", LedSource(source_of("eagle3", self.target), self._answers), leaves_room=True)
        matrix = MatrixRetriever(TransitionMatrix(VOCAB, CPU), grafted_paths())
        return GraftedProposer(base, [SuffixRetriever(CPU), matrix], CPU, "tail" if method == "tail" else "root", 0.4)

    def _led(self, source: str, shape: str) -> Proposer:
        return proposer_for(Case(source, shape, "", True, SLOTS, "led"), self.target, self._answers)


def same(got: Session, prompt: Sequence[int], options: int) -> bool:
    """Whether an answer is plain decoding's in everything that its reader sees."""
    want = plain(tuple(prompt), options)
    return (
        got.generated == want.generated
        and got.finish_reason == want.finish_reason
        and got.stopper.text == want.stopper.text
        and [entry.token_id for entry in got.logprobs] == [entry.token_id for entry in want.logprobs]
        and got.metrics.new_tokens == len(want.generated)
    )
