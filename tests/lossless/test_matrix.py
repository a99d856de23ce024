"""The contract as a matrix: what any source x shape x retriever x options x batch says on tiny random models, plain
decoding says.

All combinations run in `make test-all`; in `make test-more` a subset in which every two values still meet, and in
`make test` one in which each value is seen.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from outpace.core.drafting import Retriever
from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.drafters.draft_lm.source import DraftLM
from outpace.drafters.self_draft.guessed import GuessedSelfDraft
from outpace.drafters.self_draft.source import SelfDraft
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.methods.catalog import build_proposer, methods, parse_method
from outpace.models.attention import ATTENTION_NAME
from outpace.models.draft import draft_model_of, early_exit
from outpace.models.target import PackedTarget
from outpace.testing import decode, toy_context
from outpace.trees.grafting import GraftedProposer, MatrixRetriever, SuffixRetriever
from outpace.trees.proposer import EmptyDraft, StaticProposer
from outpace.trees.retrieval.transition_matrix import TokenRecycling, TransitionMatrix
from outpace.trees.shapes.rank_paths import RecyclingTemplate, grafted_paths
from outpace.trees.shapes.table import shapes
from tests.lossless.led import LedSource
from tests.pairwise import covering, pairs_of, representatives
from tests.unit.drafters.source.learned import KINDS, Every, proposer_of, source_of
from tests.unit.models.tiny import VOCAB, random_ids, stock_model, tiny_config, tiny_target

SHAPES = tuple(name for name, shape in shapes().items() if shape.is_general or name == "template")
WITHOUT_SCORES = ("chain", "template")  # a growing shape needs scores
RETRIEVERS = ("matrix", "private", "suffix", "both", "tail")
CPU = torch.device("cpu")
MODELS = ("draft-lm", "early-exit", "self")
CHOSEN = {
    "lookup": "lookup:budget=3",
    "samd": "samd:budget=8,min_match=2",
    "lookahead": "lookahead:budget=31",
    "outpace": "outpace:draft=none,budget=12",  # with drafters in test_union.py
}  # options that a short answer leaves room for
WITHOUT_DRAFTER = [name for name, method in methods().items() if method.drafter is None]
AS_SOURCES = ("plain", "recycle", "self", "magicdec", "triforce")
WHOLE = {name: CHOSEN.get(name, name) for name in (*WITHOUT_DRAFTER, "outpace") if name not in AS_SOURCES}
"""Methods that are no level sources: they make whole trees of one shape of their own."""
SOURCES = (*KINDS, *MODELS, "guessed", "recycle", *WHOLE)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T=0.7": {"temperature": 0.7},
    "penalty": {"repetition_penalty": 1.3},
    "sampled-penalty": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.3},
}
# Ragged. The first one is much longer than the others and has every id, so that lookup finds something.
PROMPTS = [torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4)).tolist()]
PROMPTS += [random_ids(9, 1), random_ids(22, 2), random_ids(3, 3)]
LIMITS = (15, 12, 18, 8)


class Case(NamedTuple):
    """A cell of the matrix. `drafts` is "own" for what the random source says, "led" for what `LedSource` makes of it;
    `noise` is whether sampled requests draft with their keyed noise, `retriever` one of RETRIEVERS."""

    source: str
    shape: str
    options: str
    noise: bool
    batch: int
    drafts: str
    retriever: str = "none"

    def __str__(self) -> str:
        return "-".join(str(value) for value in self)


def supported() -> Iterator[Case]:
    """Every combination that makes sense."""
    for source, options in product(SOURCES, OPTIONS):
        of_chains = dict.fromkeys(("guessed", *WHOLE), ("chain",))
        shapes = {"recycle": WITHOUT_SCORES, **of_chains}.get(source, SHAPES)
        has_noise = source not in ("recycle", *WHOLE) and "temperature" in OPTIONS[options]
        drafts = ("own",) if source in WHOLE else ("own", "led")
        for rest in product(shapes, [options], [True, False] if has_noise else [True], (1, 4), drafts):
            yield Case(source, *rest)
        if source not in WHOLE:  # what retrievers do wrong they do to neighbours and after their tokens were accepted
            for shape, own, retriever in product(shapes, drafts, RETRIEVERS):
                yield Case(source, shape, options, True, 4, own, retriever)


CASES = list(supported())


@cache
def pairwise() -> list[Case]:
    """Few cases in which every two values still meet. Finding them takes seconds: not while tests are collected."""
    return covering(CASES)


def showing(cases: Sequence[Case]) -> list[Case]:
    """Cases that show every value of every field at least once."""
    chosen, shown = list[Case](), set[tuple[int, Any]]()
    for case in sorted(cases, key=lambda case: case.retriever == "none"):  # those with more to them first
        if new := set(enumerate(case)) - shown:
            shown |= new
            chosen.append(case)
    return chosen


Group = tuple[str, str]
"""All or only the pairwise cases, of a source."""
GROUPS = [
    *(pytest.param(case, id=str(case)) for case in showing(CASES)),
    *(pytest.param(("pairwise", source), id=f"pairwise-{source}", marks=pytest.mark.thorough) for source in SOURCES),
    *(pytest.param(("all", source), id=f"all-{source}", marks=pytest.mark.slow) for source in SOURCES),
]


def cases_of(group: Case | Group) -> list[Case]:
    if isinstance(group, Case):
        return [group]
    kind, source = group
    return [case for case in (CASES if kind == "all" else pairwise()) if case.source == source]


def requests(case: Case) -> tuple[list[list[int]], list[SamplingParams]]:
    params = [
        SamplingParams(max_new_tokens=limit, seed=seed, **OPTIONS[case.options]) for seed, limit in enumerate(LIMITS)
    ]
    return PROMPTS[: case.batch], params[: case.batch]


@cache
def plain(options: str, index: int) -> Session:
    """What plain decoding says to one of the prompts, alone."""
    prompts, params = requests(Case("", "", options, True, len(PROMPTS), ""))
    (session,) = decode(Engine(tiny_target(tiny_config("llama"))), [prompts[index]], [params[index]], [EmptyDraft()])
    return session


def proposer_for(case: Case, target: PackedTarget, sequences: Sequence[Sequence[int]]) -> Proposer:
    if case.source in WHOLE:
        return build_proposer(parse_method(WHOLE[case.source]), toy_context(VOCAB))
    if case.source == "recycle":
        source: Any = TokenRecycling(TransitionMatrix(VOCAB, target.device, context=2))
    elif case.source == "draft-lm":
        config = tiny_config("qwen2", num_hidden_layers=2)
        model = draft_model_of(stock_model(config, ATTENTION_NAME), target.max_length, target.max_slots)
        source = DraftLM(model, VOCAB, case.noise)
    elif case.source == "early-exit":
        source = DraftLM(early_exit(target, 2), VOCAB, case.noise)
    elif case.source == "self":
        source = SelfDraft(target, Every(target, 2), case.noise)
    elif case.source == "guessed":
        guesser = MatrixRetriever(TransitionMatrix(VOCAB, CPU), [(0,), (0, 0)], case.retriever == "private")
        source = GuessedSelfDraft(target, Every(target, 2), guesser, case.noise)
    else:
        source = source_of(case.source, target, noise=case.noise)
    if case.drafts == "led":
        source = LedSource(source, sequences)
    if case.source == "recycle" and case.shape == "template":
        base: Proposer = StaticProposer(source, RecyclingTemplate(), 16, CPU)
    else:
        base = proposer_of(case.shape, source, leaves_room=case.retriever != "none")
    if case.retriever == "none":
        return base
    # Gates leave slots free. Of the budgets of other shapes half is kept for retrieval.
    place: Any = "tail" if case.retriever == "tail" else "root"
    return GraftedProposer(base, retrievers_of(case.retriever), CPU, place, 0.0 if case.shape == "gated" else 0.5)


def retrievers_of(name: str) -> list[Retriever]:
    if name == "suffix":
        return [SuffixRetriever(CPU)]
    if name == "both":
        return [*retrievers_of("suffix"), *retrievers_of("matrix")]
    paths = [(0,) * depth for depth in range(1, 5)] if name == "tail" else grafted_paths()
    return [MatrixRetriever(TransitionMatrix(VOCAB, CPU, context=2), paths, name == "private")]


@pytest.mark.parametrize("group", GROUPS)
def test_lossless(group: Case | Group) -> None:
    """Guards against drafts that change the answer, by whatever source, shape, options and neighbours."""
    for case in cases_of(group):
        check(case)


def check(case: Case) -> None:
    target = tiny_target(tiny_config("llama"))
    prompts, params = requests(case)
    expected = [plain(case.options, index) for index in range(case.batch)]
    proposer = proposer_for(case, target, [session.ids for session in expected])
    sessions = decode(Engine(target, prefill_chunk=32), prompts, params, [proposer] * case.batch)
    for index, (want, got) in enumerate(zip(expected, sessions, strict=True)):
        assert got.generated == want.generated, f"request {index} of {case}"
        assert got.finish_reason == want.finish_reason
        assert got.metrics.drafted > 0 or (case.source == "lookup" and index), (
            f"nothing was drafted for {index} of {case}"
        )
        if not case.source.startswith(("eagle3", "guessed", *MODELS)):
            assert got.metrics.draft_passes <= got.metrics.steps, f"one pass per round: {case}"
    if case.retriever != "none" and (case.retriever != "suffix" or case.shape != "gated"):
        assert any(session.metrics.retrieved for session in sessions), f"nothing was grafted: {case}"
    if case.drafts == "led":
        accepted = [session.metrics.accepted > 0 for session in sessions]
        is_enough = any if case.shape == "gated" else all  # of one or two nodes none may be right in a short answer
        assert is_enough(accepted), f"nothing was accepted, so nothing was committed: {case}"


@pytest.mark.thorough
def test_the_subset_covers_every_pair() -> None:
    """Guards against two values that never meet in the subset, such as a source with a shape, and against a subset that
    takes everything."""
    wanted = set[Any]().union(*(pairs_of(case) for case in CASES))
    covered = set[Any]().union(*(pairs_of(case) for case in pairwise()))
    assert covered == wanted
    assert wanted > {(0, source, 1, shape) for source in (*KINDS, *MODELS) for shape in SHAPES}
    assert wanted > {(1, shape, 6, retriever) for shape in SHAPES for retriever in ("none", *RETRIEVERS)}
    assert set[Any]().union(*(pairs_of(case) for case in pairwise()[:-1])) < wanted, "every case is there for a pair"
    assert len(pairwise()) < len(CASES) / 10


def test_make_test_varies_all_parameters_of_a_test() -> None:
    """Guards against eight cases of one method, and none of the others, in `make test`."""
    cases = [(f"method {one}", f"option {other}") for one, other in product(range(33), range(8))]
    methods_shown, options_shown = zip(*(cases[place] for place in representatives(cases, 8)), strict=True)
    assert len(set(methods_shown)) == len(set(options_shown)) == 8
    assert len(representatives(cases[:5], 8)) == 5
    assert len(representatives(cases[:1] * 3, 8)) == 1


def test_every_method_has_its_source_here() -> None:
    """Guards against a method that is added to the catalog and left out of the matrix."""
    drafters = {method.drafter for name, method in methods().items() if name not in (*WHOLE, *AS_SOURCES)}
    assert drafters <= set(SOURCES)
