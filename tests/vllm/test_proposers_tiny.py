"""Our methods as vLLM's custom classes, on a random target: what is wired wrongly shows whatever models say."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chi2_contingency

import outpace
from outpace.budget.costs import RowPrice
from outpace.budget.decisions import RoundRates
from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, PromptChunk
from outpace.core.tree import DraftTree
from outpace.methods.stores import stored_proposer
from outpace.trees.linear_form import LinearForm
from outpace.vllm.settings import linear_method
from outpace.vllm.speculation import PROPOSER
from tests.vllm.engines import Engine, engine, speculative
from tests.vllm.tiny import Tiny

PROMPTS = [[5, 9, 14, 200, 31, 5, 9, 14], [7, 7, 300, 7, 7], [11, 12, 13, 11, 12], list(range(20, 60))]
LENGTH, LONG, DRAFTS = 32, 120, 4
MATRIX = "outpace:draft=none,retrieve=matrix"
METHODS: dict[str, str | None] = dict.fromkeys(
    (MATRIX, "lookup", "outpace:draft=none,retrieve=suffix", "outpace:draft=none")
)
METHODS |= {"graft": "eagle3", "eagle3:shape=dynatree": "eagle3", "outpace": "domino", "medusa": "chained"}
"""With the kind of the drafter."""


def custom() -> dict[str, Any]:
    """The `speculative_config` of our proposer."""
    return speculative("custom_class", PROPOSER, DRAFTS)


def settings(method: str, drafter: Path | None, **more: Any) -> dict[str, Any]:
    """The `additional_config` with some settings of ours."""
    named = {"method": method} | ({} if drafter is None else {"drafter": str(drafter)})
    return {"additional_config": {"outpace": {**named, **more}}}


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> list[list[int]]:
    """What plain decoding says."""
    with engine(tiny.target) as made:
        return made.generate(PROMPTS, LENGTH)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_says_what_plain_decoding_says(method: str, tiny: Tiny, plain: list[list[int]]) -> None:
    """Guards against drafts that change an answer, alone or in a batch."""
    kind = METHODS[method]
    options = settings(method, None if kind is None else getattr(tiny, kind), least_gain=0.0)
    with engine(tiny.target, custom(), **options) as made:
        assert made.generate(PROMPTS, LENGTH) == plain
        assert [made.generate([prompt], LENGTH) for prompt in PROMPTS] == [[answer] for answer in plain]
        assert made.counts()[0] > 0
        made.runner.drafter._price, made.runner.drafter._rates = RowPrice(), OnAndOff()
        assert made.generate(PROMPTS, LENGTH) == plain
        assert made.runner.drafter._rounds is not None


class OnAndOff(RoundRates):
    """Three steps with drafts, two without, and so on."""

    steps = 0

    def drafts(self, count: int) -> bool:
        return self.steps % 5 < 3

    def advance(self, count: int, is_drafted: bool) -> None:
        self.steps += 1


@pytest.mark.parametrize("method", ["graft", "outpace", "medusa", MATRIX])
def test_drafts_are_our_own_engines(method: str, tiny: Tiny) -> None:
    """Guards against hidden states, best ids or verdicts of other positions."""
    kind = METHODS[method]
    folder = None if kind is None else getattr(tiny, kind)
    answer, ours = our_chains(tiny, method, folder)
    with engine(tiny.target, custom(), **settings(method, folder, least_gain=0.0)) as made:
        theirs = recorded(made)
        assert made.generate([PROMPTS[3]], LONG) == [answer]
    assert len(ours) > 60
    assert {context: theirs[context] for context in ours} == ours
    assert sum(map(len, ours.values())) > 30


def recorded(made: Engine) -> dict[tuple[int, ...], list[int]]:
    """By prompt and answer so far, what is drafted from now on."""
    propose, chains = made.runner.drafter.propose, dict[tuple[int, ...], list[int]]()

    def recording(sampled: Any, lengths: Any, token_ids: Any, **more: Any) -> Any:
        drafts = propose(sampled, lengths, token_ids, **more)
        for row, chain in enumerate(drafts):
            chains[tuple(token_ids[row, : lengths[row]].tolist())] = chain
        return drafts

    made.runner.drafter.propose = recording
    return chains


def our_chains(tiny: Tiny, method: str, drafter: Path | None) -> tuple[list[int], dict[tuple[int, ...], list[int]]]:
    """An answer, and by prompt and answer so far what a method's linear form drafts in our own engine."""
    named = None if drafter is None else str(drafter)
    loaded = outpace.load(str(tiny.target), "plain", drafter=named, dtype="float32", max_model_len=512)
    form = Capped(stored_proposer(linear_method(method, named), loaded.drafters), 0.0)
    ids, chains = list(PROMPTS[3]), {}
    params = SamplingParams(max_new_tokens=LONG, ignore_eos=True, trace=True)
    for event in loaded.stream(PROMPTS[3], params=params, method=form):
        for one in event.rounds:
            if len(ids) + DRAFTS < len(PROMPTS[3]) + LONG:  # with room for a whole chain
                chains[tuple(ids)] = list(one.tokens[1:])
        ids += event.tokens
    return ids[len(PROMPTS[3]) :], chains


class Capped(LinearForm):
    """As in vLLM: chains no longer than it is asked for, and no best ids of prompts."""

    def prefill(self, states: Sequence[Any], chunks: Sequence[PromptChunk]) -> None:
        super().prefill(states, [replace(chunk, top_ids=None) for chunk in chunks])

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return super().propose(states, [replace(one, max_depth=min(one.max_depth, DRAFTS)) for one in requests])


def test_preemption_chunks_and_cached_beginnings(tiny: Tiny) -> None:
    """Guards against states that go with rows: with room for a few requests vLLM preempts some, writes prompts in
    chunks, finds their beginnings in its cache, and brings them back as other rows."""
    shared = list(range(30, 62))
    prompts = [[*shared, 70 + one, 80 + 3 * one, 7 * one + 3] for one in range(6)]
    crowded = {"enable_prefix_caching": True, "num_gpu_blocks_override": 12, "block_size": 32, "max_model_len": 128}
    crowded |= {"max_num_batched_tokens": 24}
    with engine(tiny.target) as made:
        wanted = made.generate(prompts, 60)
    for method in ("graft", "outpace"):
        options = settings(method, getattr(tiny, METHODS[method] or ""), least_gain=0.0)
        with engine(tiny.target, custom(), **options, **crowded) as made:
            assert made.generate(prompts, 60) == wanted
            assert metric(made, "vllm:num_preemptions") > 0
            assert metric(made, "vllm:prefix_cache_hits") > 0
            assert made.runner.drafter._rounds is not None
            assert made.counts()[0] > 200


def test_a_request_at_the_maximal_length_costs_the_others_no_context(tiny: Tiny) -> None:
    """Guards against vLLM's rule that a batch gets no drafts while one request has less than a chain left: the hidden
    states of these passes were lost, and the other requests drafted from the rest only."""
    short: dict[str, Any] = {"max_model_len": 64}
    prompts = [PROMPTS[3], PROMPTS[1]]
    with engine(tiny.target, **short) as made:
        wanted = made.generate(prompts, LENGTH + 16)
    assert [len(answer) for answer in wanted] == [64 - len(prompts[0]), LENGTH + 16]
    for method in ("graft", "outpace"):
        options = settings(method, getattr(tiny, METHODS[method] or ""), least_gain=0.0)
        with engine(tiny.target, custom(), **options, **short) as made:
            assert made.generate(prompts, LENGTH + 16) == wanted
            assert [text.offset for text in made.runner.drafter._rounds.roster.known] == [0, 0]


def metric(made: Engine, name: str) -> int:
    """One of vLLM's counters."""
    return int(next(one.value for one in made.llm.get_metrics() if one.name == name))


def test_a_proposer_that_throws_leaves_plain_decoding(tiny: Tiny, plain: list[list[int]]) -> None:
    """Guards against an engine that dies, or says something else, where a drafter fails in the midst of a batch."""
    with engine(tiny.target, custom(), **settings("outpace", tiny.domino, least_gain=0.0)) as made:
        rounds = made.runner.drafter._rounds
        step, steps = rounds.step, list[int]()

        def failing(*args: Any, **kwargs: Any) -> Any:
            steps.append(1)
            if len(steps) == 7:
                raise RuntimeError("planted")
            return step(*args, **kwargs)

        rounds.step = failing
        assert made.generate(PROMPTS, LENGTH) == plain
        assert (len(steps), made.runner.drafter._rounds) == (7, None)
        drafted = made.counts()[0]
        assert made.generate(PROMPTS, LENGTH) == plain
        assert made.counts()[0] == drafted


@pytest.mark.parametrize(
    ("method", "drafter", "said"),
    [
        ("graft", None, "needs a trained drafter of kind eagle3"),
        ("graft", "domino", "is of kind domino"),
        ("graft", "other", "hidden_size"),
        (MATRIX, "domino", "leave it out"),
        ("lookahead", None, "verifies chains only"),
    ],
)
def test_an_engine_that_cannot_draft_does_not_start(
    method: str, drafter: str | None, said: str, tiny: Tiny, shipped: dict[str, Path]
) -> None:
    """Guards against a server that starts without the drafts that were asked for, or with those for another model."""
    folder = {None: None, "other": shipped["eagle3"], "domino": tiny.domino}[drafter]
    with pytest.raises(Exception, match=said), engine(tiny.target, custom(), **settings(method, folder)):
        pass


def test_sampling_says_what_the_model_says(tiny: Tiny) -> None:
    """Guards against sampled answers that follow the drafts, and against a fault of vLLM's that ends the engine where a
    request has top-k and its step no drafts: 600 seeded samples at temperature 0.9 are distributed as
    plain decoding's are, position by position. False alarms: 5 positions at 0.0002 each, 1 in 1000 at most, once: seeds
    are fixed."""
    prompt, count, length = [5, 9, 14, 5, 9, 14, 5, 9], 600, 6
    sampling = {"temperature": 0.9, "top_k": 4, "seed": 7, "n": count}
    with engine(tiny.target, max_num_seqs=64) as made:
        wanted = made.generate([prompt], length, **sampling)
    with engine(tiny.target, custom(), max_num_seqs=64, **settings("graft", tiny.eagle3, least_gain=0.0)) as made:
        found = made.generate([prompt], length, **sampling)
        drafted, accepted = made.counts()
    assert drafted > 500
    assert accepted > 20
    for position in range(1, length):
        plain, speculative = (Counter(answer[position] for answer in answers) for answers in (wanted, found))
        common = [token for token, seen in (plain + speculative).items() if seen >= 10]
        table = [
            [*(one[token] for token in common), count - sum(one[token] for token in common)]
            for one in (plain, speculative)
        ]
        kept = [column for column in zip(*table, strict=True) if sum(column) >= 10]
        assert chi2_contingency(kept).pvalue > 2e-4, f"position {position}"
