"""Grammars change what is said, speculation does not: every kind of method, alone, beside others, under every rule."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from outpace.core.params import Grammar, SamplingParams
from outpace.core.protocols import BaseProposer, DraftRequest, Proposer
from outpace.core.tree import DraftTree, Topology
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.sampling.noise import Purpose, gumbel, noise_key
from outpace.testing import AdversaryDrafter, ToyTarget, decode
from outpace.trees.proposer import EmptyDraft
from tests.grammars import ANY_LETTERS, EOS, OBJECT, ToyDetokenizer, ToyTokens, text_of, toy_tokenizer
from tests.interrupted.world import METHODS, PROMPTS, World
from tests.statistics import chi_square_p
from tests.unit.models.tiny import VOCAB

write = ToyTokens(VOCAB)
SAMPLES = 1200
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"grammar": OBJECT},
    "T=0.8": {"grammar": OBJECT, "temperature": 0.8, "seed": 4},
    "truncated": {"grammar": ANY_LETTERS, "temperature": 1.0, "seed": 5, "min_p": 0.05, "top_k": 30, "top_p": 0.95},
    "penalties": {
        "grammar": ANY_LETTERS, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_new_tokens": 4,
        "logit_bias": {write("e")[0]: 4.0}, "logprobs": 2,
    },
    "free": {"temperature": 0.7, "seed": 9},
}  # fmt: skip


def params_of(name: str) -> SamplingParams:
    return SamplingParams.from_options(max_new_tokens=24, eos_token_ids=(EOS,), **OPTIONS[name])


@cache
def world() -> World:
    return World()


@cache
def plain(name: str, prompt: int) -> Session:
    (one,) = decode(world().engine, [PROMPTS[prompt]], [params_of(name)], [EmptyDraft()])
    return one


def facts(one: Session) -> tuple[Any, ...]:
    return one.generated, one.finish_reason, one.stop_reason, one.logprobs, one.error


@pytest.mark.parametrize("method", METHODS)
def test_every_method_says_what_plain_decoding_says(method: str) -> None:
    """Guards against a mask of another path, forced drafts that a method takes for its own, trees that it can no longer
    tell apart, and neighbours who share a grammar's state: each kind of method on a real model, with grammars beside
    requests that have none."""
    names = list(OPTIONS)
    for round_ in range(2):  # what was learned from trees that were cut must not hurt later
        asked = [(name, (number + round_) % len(PROMPTS)) for number, name in enumerate(names)]
        sessions = decode(
            world().engine,
            [PROMPTS[prompt] for _, prompt in asked],
            [params_of(name) for name, _ in asked],
            [world().proposer(method)] * len(asked),
        )
        for (name, prompt), one in zip(asked, sessions, strict=True):
            assert facts(one) == facts(plain(name, prompt)), (name, prompt)
            if one.finish_reason == "stop" and params_of(name).grammar == OBJECT:
                assert list(json.loads(text_of(one.generated[:-1], VOCAB))) == ["name", "age", "kind"]


def test_plain_decoding_is_the_definition() -> None:
    """Guards against a baseline that draws otherwise than it says: its tokens are the best ones that the mask allows,
    by logits and noise, which another way of drawing them confirms."""
    target = world().target
    for name in ("greedy", "T=0.8"):
        params, one = params_of(name), plain(name, 1)
        assert params.grammar is not None
        constraint = world().engine.constraint(params)
        assert constraint is not None
        (again,) = decode(world().engine, [PROMPTS[1]], [params], [EmptyDraft()])
        assert again.generated == one.generated
        outputs = decode_rows(target, [*PROMPTS[1], *one.generated])
        for place, token in enumerate(one.generated):
            mask = constraint.mask(one.generated[:place], VOCAB)
            assert mask is not None
            logits = outputs[len(PROMPTS[1]) - 1 + place].masked_fill(~mask, -torch.inf)
            if not params.is_greedy:
                key = noise_key(one.seed, 0, len(PROMPTS[1]) + place, Purpose.TARGET)
                logits = logits / params.temperature + gumbel([key], torch.arange(VOCAB))[0]
            assert int(logits.argmax()) == token


def decode_rows(target: Any, ids: Sequence[int]) -> torch.Tensor:
    """[N, V] logits after each id."""
    world().engine.forget_prefixes()  # slot 0 is overwritten
    target.rewind_slot(0, 0)
    _, (outputs,) = target.run_pass((), [0], [DraftTree.chain(torch.tensor(ids))], [()])
    rows: torch.Tensor = outputs.logits.float()
    return rows


@pytest.mark.parametrize("truth", [0.3, 0.9])
def test_wild_trees_on_a_toy(truth: float) -> None:
    """Guards against what no method drafts: branches, dead ends and forbidden nodes of every kind, all of them at
    once, with stop strings in the middle of a tree."""
    prompts = [[5, 6], [7], [8, 9, 10]]

    def engine() -> Engine:
        return Engine(
            ToyTarget(VOCAB, eos_token_ids=(EOS,)), ToyDetokenizer, grammar_tokenizer=lambda: toy_tokenizer(VOCAB)
        )

    for seed, options in enumerate([{}, {"temperature": 1.0}, {"temperature": 1.5, "stop": ("a", '"kind')}]):
        params = [SamplingParams(max_new_tokens=50, seed=seed, grammar=OBJECT, **options) for _ in prompts]  # type: ignore[arg-type]
        want = decode(engine(), prompts, params, [EmptyDraft()] * 3)
        known = [one.ids for one in want]
        for budget in (1, 5, 20):
            wild = AdversaryDrafter(VOCAB, known, budget, truth, seed)
            got = decode(engine(), prompts, params, [wild] * 3)
            assert [(*facts(one), one.stopper.text) for one in got] == [(*facts(one), one.stopper.text) for one in want]


class Drawn(BaseProposer):
    """Two children of the pending token and two below the first of them, drawn from a distribution of its own that
    knows no grammar; a chosen one below the second."""

    budget = 9

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = []
        for request in requests:
            context, depth = request.sampling, request.max_depth
            q = torch.zeros(VOCAB)
            q[[write(one)[0] for one in "abxy"]] = torch.tensor([0.3, 0.2, 0.4, 0.1])
            drawn = []
            for level in range(2):
                key = noise_key(context.seed, context.sample_index, context.first_position + level, Purpose.DRAFT)
                drawn += (q.log() + gumbel([key], torch.arange(VOCAB))[0]).topk(2).indices.tolist()
            tokens, parents = [request.ids[-1], *drawn, write("ab")[0]], [-1, 0, 0, 1, 1, 2]
            size = 1 + (2 if depth > 0 else 0) + (3 if depth > 1 else 0)
            probs = {0: q, 1: q} if depth > 1 else {0: q} if depth else None
            trees.append(DraftTree(torch.tensor(tokens[:size]), Topology.of(parents[:size]), probs))
        return trees


@pytest.mark.costly
@pytest.mark.parametrize(
    "proposer", [Drawn(), AdversaryDrafter(VOCAB, [], 6), EmptyDraft()], ids=["drawn", "any", "plain"]
)
def test_rejection_keeps_the_distribution(proposer: Proposer) -> None:
    """Guards against drawn nodes that are cut, forced ones beside them, and target probabilities without the mask: all
    answers of two letters over SAMPLES samples, by chi-square against their exact probabilities; false alarm: 1e-6 per
    case."""
    target = ToyTarget(VOCAB, seed=3, sharpness=3.0, max_slots=64, eos_token_ids=(EOS,))
    grammar, count = Grammar.regex("[ab]{2}cc|x{3}"), SAMPLES // 6
    params = SamplingParams(max_new_tokens=6, temperature=1.0, n=count, verification="rejection", grammar=grammar)
    engine = Engine(target, grammar_tokenizer=lambda: toy_tokenizer(VOCAB))
    sessions = [one for seed in range(6) for one in decode(engine, [[5, 6]], [replace(params, seed=seed)], [proposer])]
    exact: dict[tuple[int, ...], float] = {}
    constraint = engine.constraint(params)
    assert constraint is not None
    pending: list[tuple[list[int], float]] = [([], 1.0)]
    while pending:
        said, share = pending.pop()
        if said and said[-1] == EOS:
            exact[tuple(said)] = share
            continue
        mask = constraint.mask(said, VOCAB)
        assert mask is not None
        probs = target.logits([5, 6, *said], 2 + len(said)).masked_fill(~mask, -torch.inf).softmax(-1)
        pending += [([*said, token], share * float(probs[token])) for token in mask.nonzero().flatten().tolist()]
    seen = Counter(tuple(one.generated) for one in sessions)
    assert set(seen) <= set(exact)
    common = [answer for answer, share in exact.items() if share * SAMPLES >= 5]
    rest = [answer for answer in exact if answer not in common]
    counts = [seen[answer] for answer in common] + ([sum(seen[one] for one in rest)] if rest else [])
    shares = [exact[answer] for answer in common] + ([sum(exact[one] for one in rest)] if rest else [])
    assert chi_square_p(counts, shares) > 1e-6
    assert len(common) > 4
    if isinstance(proposer, Drawn):
        assert sum(one.metrics.accepted for one in sessions) > SAMPLES // 4
