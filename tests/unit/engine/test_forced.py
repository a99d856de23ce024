"""Trees under grammars: what is cut, what joins them, whose slots it takes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.budget.costs import PassTimes, Prices
from outpace.budget.decisions import RoundRates
from outpace.core.events import origins_of
from outpace.core.params import Grammar, SamplingParams
from outpace.core.protocols import Needs
from outpace.core.tree import DraftTree, Topology
from outpace.engine.engine import Engine
from outpace.engine.forced import under_grammar
from outpace.engine.session import Session
from outpace.lib.errors import InvalidRequest
from outpace.testing import AdversaryDrafter, OracleDrafter, ToyTarget, decode
from outpace.trees.proposer import EmptyDraft
from tests.grammars import EOS, OBJECT, ToyDetokenizer, ToyTokens, toy_tokenizer
from tests.unit.engine.doubles import run_all
from tests.unit.engine.test_costs import Asking, known_costs
from tests.unit.engine.test_sizing import steep

V = 160
write = ToyTokens(V)
START, NAME, AGE, COLON, QUOTE, DIGIT = (write(text)[0] for text in ('{"', "name", "age", '": ', '"', "7"))


def make_engine(**options: Any) -> Engine:
    target = ToyTarget(V, eos_token_ids=(EOS,), **options)
    return Engine(target, grammar_tokenizer=lambda: toy_tokenizer(V))


def session(said: Sequence[int], budget: int = 8, proposer: Any = None, **options: Any) -> Session:
    """A request that has said something."""
    params = SamplingParams(grammar=OBJECT, max_new_tokens=60, **options)
    (made,) = make_engine().add([5, 6], params, proposer or OracleDrafter([]), budget)
    made.prefilled = 2
    made.ids += said
    return made


def fitted(
    tree: DraftTree, one: Session, max_depth: int = 20, prices: Prices | None = None
) -> tuple[DraftTree, list[tuple[int, int]]]:
    """The tree, and its nodes as (token, parent)."""
    one.limit = len(one.generated) + max_depth + 1
    cut = under_grammar(tree, tree.tokens.tolist(), one, prices)
    return cut, list(zip(cut.tokens.tolist(), cut.topology.parents, strict=True))


def tree_of(tokens: list[int], parents: list[int], **fields: Any) -> DraftTree:
    return DraftTree(torch.tensor(tokens), Topology.of(parents), **fields)


def test_what_is_forbidden_gives_its_slots_to_what_is_forced() -> None:
    """Guards against nodes that cannot be accepted in the pass, origins of other nodes, and forced text that is drafted
    twice."""
    origins = (*origins_of("drafted", 3), "retrieved", "retrieved")
    tree = tree_of([START, AGE, DIGIT, NAME, AGE], [-1, 0, 1, 0, 3], origins=origins)
    cut, nodes = fitted(tree, session([START]))
    assert nodes == [(START, -1), (NAME, 0), (COLON, 1), (QUOTE, 2)]
    assert (cut.drafted, cut.retrieved, cut.forced) == (1, 1, 2)


def test_forced_text_stands_below_any_node() -> None:
    """Guards against a grammar that is asked at the pending token alone."""
    said = write('{"name": "ab", "age":')
    tree = tree_of([said[-1], write(" ")[0], write("7")[0], write(",")[0]], [-1, 0, 1, 2])
    _, nodes = fitted(tree, session(said))
    assert [write.tokens[token] for token, _ in nodes[4:]] == [b' "', b"k", b"in", b"d", b'": ']
    assert nodes[4][1] == 3


@pytest.mark.parametrize(("budget", "max_depth", "kept"), [(0, 20, 1), (1, 20, 2), (2, 20, 3), (3, 20, 4), (8, 2, 3)])
def test_budgets_and_the_end_of_the_answer_are_kept(budget: int, max_depth: int, kept: int) -> None:
    """Guards against trees that outgrow what was asked for, and drafts beyond max_new_tokens or the context."""
    _, nodes = fitted(DraftTree.chain(torch.tensor([START])), session([START], budget=budget), max_depth)
    assert nodes == [(START, -1), (NAME, 0), (COLON, 1), (QUOTE, 2)][:kept]


def test_a_full_tree_gives_way_to_what_is_certain() -> None:
    """Guards against trees so full of guesses that nothing forced has room; and against losing the better guesses."""
    said = write('{"name": "ab", "age": 1')
    tokens = [said[-1], *(write(digit)[0] for digit in "01345678"), write(",")[0]]
    scores = torch.tensor([0.0, -1.0, *[-3.0] * 7, -0.5])
    tree = tree_of(tokens, [-1, *[0] * 9], scores=scores)
    cut, nodes = fitted(tree, session(said, budget=9))
    written = [write.tokens[token] for token, _ in nodes]
    assert written == [b"1", b"0", b"1", b"3", b",", b' "', b"k", b"in", b"d", b'": ']
    assert (cut.forced, nodes[5][1]) == (5, 4)


def test_prices_are_asked() -> None:
    """Guards against forced nodes that cost more than they bring, and near certain ones that are left out."""
    chain = DraftTree.chain(torch.tensor([START]))
    dear = Prices(1.0, PassTimes(tuple(2.0 * n for n in range(9))))
    cheap = Prices(1.0, PassTimes(tuple(0.5 * n for n in range(9))))
    assert len(fitted(chain, session([START]), prices=dear)[0]) == 1
    assert len(fitted(chain, session([START]), prices=cheap)[0]) == 4


class Priced(Asking):
    """A method whose nodes the cost model chooses."""

    budget = 8


@pytest.mark.parametrize(("proposer", "drafts"), [(OracleDrafter([]), True), (Priced(), False)])
def test_prices_are_asked_in_every_round_of_a_batch(
    proposer: Any, drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against forced text without prices, whose rows take other requests more time than it gains: of methods
    that are sized, and in rounds of batches that draft nothing."""
    monkeypatch.setattr(RoundRates, "drafts", lambda rates, count: drafts)
    target = ToyTarget(V, eos_token_ids=(EOS,))
    engine = Engine(target, costs=steep(tmp_path), grammar_tokenizer=lambda: toy_tokenizer(V))
    params = SamplingParams(max_new_tokens=40, grammar=OBJECT)
    for one in decode(engine, [[5, 6]] * 2, [params] * 2, [proposer] * 2):
        assert one.metrics.steps > 5
        assert one.metrics.forced == 0


def test_drawn_children_stay() -> None:
    """Guards against a drawn node that is cut because it cannot be accepted: without its rejection what is left of the
    target is another distribution. Nothing joins its siblings, nothing stays below it."""
    q = torch.full((V,), 1 / V)
    tree = tree_of([START, AGE, DIGIT, NAME], [-1, 0, 1, 0], draft_probs={0: q, 1: q})
    cut, nodes = fitted(tree, session([START], temperature=1.0, verification="rejection"))
    assert nodes == [(START, -1), (AGE, 0), (NAME, 0), (COLON, 2), (QUOTE, 3)]
    assert cut.draft_probs is not None
    assert sorted(cut.draft_probs) == [0, 1]


def test_trees_that_are_needed_whole_are_left_whole() -> None:
    """Guards against Lookahead without its window, whose nodes the grammar forbids."""
    proposer = OracleDrafter([])
    proposer.needs = Needs(whole_trees=True)
    tree = tree_of([START, AGE, DIGIT], [-1, 0, 1])
    cut, _ = fitted(tree, session([START], proposer=proposer))
    assert cut.tokens.tolist() == [START, AGE, DIGIT, NAME, COLON, QUOTE]


@pytest.mark.parametrize("is_plain", [True, False])
def test_plain_decoding_stays_plain(is_plain: bool) -> None:
    """Guards against a baseline that speculates, and a switch that does not switch."""
    one = session([START], proposer=EmptyDraft()) if is_plain else session([START], draft_forced=False)
    assert len(fitted(DraftTree.chain(torch.tensor([START])), one)[0]) == 1


def test_what_is_forced_is_counted() -> None:
    """Guards against metrics in which forced drafts are drafted or retrieved ones."""
    params = SamplingParams(max_new_tokens=40, grammar=OBJECT)
    (one,) = decode(make_engine(), [[5, 6]], [params], [OracleDrafter([])])
    metrics = one.metrics
    assert metrics.forced == metrics.drafted > 5
    assert metrics.accepted_forced == metrics.accepted > 5
    assert metrics.accepted_retrieved == 0
    assert metrics.grammar_ms > 0
    assert metrics.tokens_per_step > 1.3


def test_rounds_of_forced_text_are_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against batches under grammars that never learn what rounds gain without drafts: in hardly one of them no
    request has forced text."""
    gained = list[int]()
    monkeypatch.setattr(RoundRates, "drafts", lambda rates, count: False)
    monkeypatch.setattr(RoundRates, "learn", lambda rates, count, tokens, ms: gained.append(tokens))
    target = ToyTarget(V, eos_token_ids=(EOS,))
    engine = Engine(target, costs=known_costs(tmp_path), grammar_tokenizer=lambda: toy_tokenizer(V))
    params = SamplingParams(max_new_tokens=40, grammar=OBJECT)
    decode(engine, [[5, 6]] * 2, [params] * 2, [OracleDrafter([])] * 2)
    assert max(gained) > 2


def test_the_end_of_an_answer_is_no_dead_end() -> None:
    """Guards against an error where speculation looks behind a stop string, at which plain decoding has ended: there
    the grammar is complete and `min_new_tokens` bans the EOS."""
    params = SamplingParams(
        max_new_tokens=20, min_new_tokens=15, grammar=Grammar.regex("abab"), eos_token_ids=(EOS,), stop=("abab",)
    )

    for proposer in (EmptyDraft(), OracleDrafter([[5, 6, *write("abab")]]), AdversaryDrafter(V, [])):
        engine = Engine(ToyTarget(V), ToyDetokenizer, grammar_tokenizer=lambda: toy_tokenizer(V))
        (one,) = decode(engine, [[5, 6]], [params], [proposer])
        assert engine.result(one).stop_reason == "abab"


def test_options_that_leave_nothing_end_their_request_alone() -> None:
    """Guards against a dead end that takes the neighbours with it, or an error that does not name the grammar."""
    engine, banned = make_engine(max_slots=2), {START: -100.0}
    params = [
        SamplingParams(grammar=Grammar.regex("x{1,9}"), max_new_tokens=5, bad_words_ids=((write("x")[0],),)),
        SamplingParams(grammar=OBJECT, max_new_tokens=9, logit_bias=tuple(banned.items())),
    ]
    sessions = [engine.add([5, 6], one, AdversaryDrafter(V, []))[0] for one in params]
    run_all(engine, sessions)
    with pytest.raises(InvalidRequest, match=r"grammar.* leave no token"):
        engine.result(sessions[0])
    assert engine.result(sessions[1]).token_ids[0] == START, "a bias is no ban: nothing else is allowed"


def test_a_matcher_that_fails_ends_its_request_alone() -> None:
    """Guards against limits of the library at some state that end the batch."""
    engine = make_engine(max_slots=2)
    params = SamplingParams(grammar=OBJECT, max_new_tokens=30)
    failing, other = (engine.add([5, number], params, OracleDrafter([]))[0] for number in (6, 7))
    engine.step()
    assert failing.constraint is not None
    failing.constraint._fresh.consume_token(9)  # in error, and so is whatever is begun afresh
    failing.constraint._renew = lambda failed: failed
    failing.constraint._consumed = None
    run_all(engine, [failing, other])
    with pytest.raises(InvalidRequest, match="too much for the grammar library"):
        engine.result(failing)
    assert engine.result(other).finish_reason in ("stop", "length")


def test_without_a_tokenizer_grammars_are_refused() -> None:
    """Guards against a grammar that is ignored by an engine that cannot follow it."""
    with pytest.raises(InvalidRequest, match="grammars need a tokenizer"):
        Engine(ToyTarget(V, eos_token_ids=(EOS,))).add([5], SamplingParams(grammar=OBJECT), EmptyDraft())


def test_unlikely_nodes_are_not_asked() -> None:
    """Guards against a grammar that costs time at every node of a large tree."""
    said = write('{"name": "')
    tokens, parents = [said[-1], *write("a" * 30)], [-1, *range(30)]
    scores = torch.tensor([0.0, *[math.log(0.001)] * 30])
    one = session(said, budget=60)
    assert one.constraint is not None
    asked: list[Sequence[bool]] = []
    explore = one.constraint.explore
    one.constraint.explore = lambda *a: (asked.append(a[3]), explore(*a))[1]  # type: ignore[method-assign,func-returns-value]
    fitted(tree_of(tokens, parents, scores=scores), one)
    assert sum(asked[0]) == 1


def test_forced_text_ends_at_an_eos_of_the_request() -> None:
    """Guards against a KeyError where a drafted token of the forced text is one of the request's EOS ids."""
    _, nodes = fitted(tree_of([START, NAME], [-1, 0]), session([START], eos_token_ids=(EOS, NAME)))
    assert nodes == [(START, -1)]
