"""Grammars along paths: what they allow and force, whatever was asked before."""

import random
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from threading import stack_size
from typing import Any

import pytest
import torch

from outpace.core.params import Grammar
from outpace.core.tree import Topology
from outpace.lib.errors import InvalidRequest
from outpace.models.tokenizer import grammar_tokenizer
from outpace.sampling.grammar import GrammarConstraint, Grammars, _in_deep_stack, _regexes_of_lark, _size_of_terminals
from tests.grammars import ANY_LETTERS, EOS, OBJECT, ToyTokens, toy_tokenizer

V = 160
ANSWER = '{"name": "abab", "age": 120, "kind": "nab"}'


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: toy_tokenizer(V))


def constraint(grammars: Grammars, grammar: Grammar = OBJECT) -> GrammarConstraint:
    return grammars.constraint(grammar, (EOS,))


def allowed(one: GrammarConstraint, said: list[int]) -> list[int]:
    mask = one.mask(said, V)
    assert mask is not None
    return [int(token) for token in mask.nonzero()]


def test_one_by_one_is_the_mask(grammars: Grammars) -> None:
    """Guards against a token that is let through on its own though the mask would have hidden it, or the other way
    round: plain decoding draws with the one, and rejection with the other."""
    one, ids = constraint(grammars), ToyTokens(V)(ANSWER)
    for place in range(len(ids) + 1):
        assert allowed(one, ids[:place]) == [token for token in range(V) if one.allows(ids[:place], token)]


def test_the_past_does_not_matter(grammars: Grammars) -> None:
    """Guards against matchers that are one token off after paths were walked and taken back: 60 answers at random, each
    question asked of one that has been elsewhere, and of a new one."""
    travelled, source, seen = constraint(grammars), random.Random(1), set()
    for _ in range(60):
        said: list[int] = []
        while len(said) < 40:
            want = allowed(constraint(grammars), said)
            assert allowed(travelled, said) == want
            assert travelled.forced_text(said) == constraint(grammars).forced_text(said)
            token = source.choice(want)
            if token == EOS:
                break
            said.append(token)
        seen.add(tuple(said))
    assert len(seen) > 50


def test_an_exception_between_two_lines_is_made_up_for(grammars: Grammars) -> None:
    """Guards against a matcher that has read a token of which nobody knows: Ctrl-C between reading and noting it."""
    one, ids = constraint(grammars), ToyTokens(V)(ANSWER)
    one.mask(ids[:4], V)

    class Cut:
        def __init__(self, matcher: object) -> None:
            self._matcher = matcher

        def __getattr__(self, name: str) -> object:
            return getattr(self._matcher, name)

        def consume_tokens(self, tokens: list[int]) -> None:
            self._matcher.consume_tokens(tokens)  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    one._matcher = Cut(one._matcher)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        one.mask(ids[:6], V)
    assert allowed(one, ids[:5]) == allowed(constraint(grammars), ids[:5])


def test_an_answer_ends_only_where_it_may(grammars: Grammars) -> None:
    """Guards against answers cut in the middle, ones that cannot end, and special tokens inside."""
    one = constraint(grammars, Grammar.regex("a{1,2}"))
    token = ToyTokens(V)("a")[0]
    assert EOS not in allowed(one, [])
    assert set(allowed(one, [token])) == {token, EOS}
    assert allowed(one, [token, token]) == [EOS]
    assert one.mask([token, EOS], V) is None, "behind the end anything may stand: nobody says it"
    assert one.allows([token, EOS], 5)
    assert not {0, 1} & set(allowed(constraint(grammars, Grammar.regex("(?s:.*)")), []))


def test_own_eos_ids_end_it(grammars: Grammars) -> None:
    """Guards against a request whose EOS ids are not the tokenizer's: theirs end it, also where they have a text."""
    token, comma = ToyTokens(V)("a")[0], ToyTokens(V)(",")[0]
    one = grammars.constraint(Grammar.regex("a{1,2},?"), (comma,))
    assert set(allowed(one, [])) == {token}
    assert set(allowed(one, [token])) == {token, comma}
    assert EOS not in allowed(one, [token, token])


def test_trees_are_explored_along_their_paths(grammars: Grammars) -> None:
    """Guards against a node judged by a sibling's path, and forced text of another node."""
    write = ToyTokens(V)
    start, name, age, colon, quote = (write(text)[0] for text in ('{"', "name", "age", '": ', '"'))
    tokens = [start, name, age, colon, colon, quote, 5]
    topology = Topology.of([-1, 0, 0, 1, 2, 3, 5])
    one = constraint(grammars)
    may, forced = one.explore([start], topology, tokens, [True] * len(tokens))
    assert may == [True, True, False, True, False, True, False]
    assert {node: text.tokens for node, text in forced.items()} == {
        0: (name, colon, quote), 1: (colon, quote), 3: (quote,),
    }  # fmt: skip
    assert allowed(one, [start, name]) == [colon]


def test_forced_text_is_allowed_by_the_mask(grammars: Grammars) -> None:
    """Guards against forced tokens that the mask does not allow: they would be drafted in vain."""
    one, source = constraint(grammars), random.Random(3)
    for _ in range(30):
        said: list[int] = []
        while EOS not in said:
            _, forced = one.explore([*said], Topology.chain(1), said[-1:] or [0], [True])
            for text in forced.values():
                for place, token in enumerate(text.tokens):
                    may = allowed(one, [*said, *text.tokens[:place]])
                    assert token in may
                    assert place >= text.certain or may == [token]
            said.append(source.choice(allowed(one, said)))


def test_long_constants_take_little_memory(grammars: Grammars) -> None:
    """Guards against ten gigabytes for one answer: after each token of a constant of 150,000 characters, the rest of it
    was cached with its tokens."""
    one, text, asked = constraint(grammars, Grammar.choice(["abx" * 2000])), "abx" * 2000, list[bytes]()
    tokens = one._tokens

    def counted(given: bytes) -> tuple[int, ...]:
        asked.append(given)
        return tokens(given)

    one._tokens = counted
    _, forced = one.explore([], Topology.chain(1), [5], [True])
    assert sum(map(len, asked)) <= 2048
    assert 100 < len(forced[0].tokens) <= 512
    assert list(forced[0].tokens[:100]) == ToyTokens(V)(text)[:100]


DOUBLED = "".join(f"A{number}: A{number + 1} A{number + 1}\n" for number in range(90))
"""Terminals that stand for 2 ** 90 of the last one; ten in each of four lines took 200 MB, in five all memory."""


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (Grammar.json_schema(False), "Unsatisfiable"),
        (Grammar.json_schema({"$ref": "#/nowhere"}), "does not exist"),
        (Grammar.json_schema({"not": {"type": "string"}}), "Unimplemented"),
        (Grammar.json_schema({"type": "string", "pattern": "(a"}), "unclosed group"),
        (Grammar.regex("(a"), "unclosed group"),
        (Grammar.regex("(?!x)y"), "look-around"),
        (Grammar.regex(r"[^\s\S]"), "no text that this model can generate"),
        (Grammar.regex("é"), "no text that this model can generate"),
        (Grammar.lark("start: unknown"), "unknown name"),
        (Grammar.lark("start: start"), "no text that this model can generate"),
        (Grammar.lark(""), "Empty grammar"),
        (Grammar.regex("a" * 1_000_001), "1,000,001 characters"),
        (Grammar.regex("(a|b)*" * 3400), "the limit is 20,000"),  # 90,000 characters take 450 MB, and 64 are kept
        (Grammar.json_schema({"pattern": "^(a|b)*$", "anyOf": [{"pattern": "(a|b)*" * 3400}]}), "of 20,408 characters"),
        (Grammar.json_schema({"patternProperties": {"a?" * 6000: {}, "b?" * 6000: {}}}), "of 24,000 characters"),
        (Grammar.json_schema({"allOf": [{"patternProperties": {f"^{n}$": {}}} for n in range(33)]}), "33 different"),
        (Grammar.json_schema({"properties": {str(n): {} for n in range(502)}, "required": ["7"]}), "501 optional"),
        (Grammar.json_schema({"x-guidance": {"key_separator": "a?" * 10_001}}), "of 20,002 characters"),
        (Grammar.lark('start: T  # "\nT: /' + "(a|b)*" * 3400 + "/"), "of 20,400 characters"),
        (Grammar.lark("start: T\nT: " + '("a"|"b")* ' * 5001), "its terminals stand for regular expressions"),
        (Grammar.lark("start: _T\n_T: " + "B*" * 10_001 + '\nB : "b"'), "more than 20,000 characters, with a"),
        (Grammar.lark("%ignore A\nA: B B\nB: C C\nC: /" + "a?" * 3000 + '/\nstart: "a"'), "its terminals stand for"),
        (Grammar.lark("start: A0\n" + DOUBLED + 'A90: "a"?'), "its terminals stand for"),
        (Grammar.lark("start: A\nA: B\nB: A"), "circular"),
        (Grammar.lark('start: </a> %json {"pattern": "' + "a?" * 10_001 + '"}'), "of 20,002 characters"),
        *((Grammar("json", text), "grammar=json") for text in ("5", "true", "null", "[1]", "1.5", "{")),
    ],
)
def test_what_cannot_be_compiled_or_satisfied_is_refused(grammars: Grammars, grammar: Grammar, said: str) -> None:
    """Guards against a grammar whose fault is found while others are decoded, or that leaves a request without an end;
    and against errors that do not say what is wrong, show a parser's insides, or are a TypeError from within."""
    with pytest.raises(InvalidRequest, match=re.escape(said)) as raised:
        constraint(grammars, grammar)
    assert str(raised.value).startswith("grammar=")
    assert "<state>" not in str(raised.value)
    assert len(str(raised.value)) < 700


def test_choices_may_be_many(grammars: Grammars) -> None:
    """Guards against a choice of more than 2,000 texts that is accepted, and fails at each answer's first token."""
    write, options = ToyTokens(V), [f"a {number}" for number in range(3000)]
    digits = {write(digit)[0] for digit in "0123456789"}
    one = constraint(grammars, Grammar.choice(options))
    assert set(allowed(one, write("a "))) == {*digits, *write("12")}, one.error
    assert set(allowed(one, write("a 299"))) == {*digits, EOS}
    with pytest.raises(InvalidRequest, match="more than 20,000 characters"):
        constraint(grammars, Grammar.choice([f"a{number}" for number in range(11_000)]))


def test_only_regular_expressions_count_as_such(grammars: Grammars) -> None:
    """Guards against large grammars that are refused for slashes in their strings and comments, or for a pattern that
    many fields have; and against reading a hostile one again from each of its quotes."""
    same = {f"p{number}": {"type": "string", "pattern": "^[ab]{1,9}$"} for number in range(2000)}
    constraint(grammars, Grammar.json_schema({"properties": same, "required": list(same)}))
    constraint(grammars, Grammar.lark('start: "/a" | "b/" | "\\"/c"  // /' + "x" * 30_000 + '\n  | "d"'))
    assert _regexes_of_lark('"' + '\\"' * 90_000 + "/a/") == set()
    assert _size_of_terminals("a [" * 60_000) == 0
    words = 'WORD: "a" | "b"i\n  | C~2 // "c"\nC: /[a-z]+/\n?start[lazy]: (WORD | "WORD" | WS)+ -> alias\nUNUSED: C C'
    assert _size_of_terminals(words) == 2 + 2 + len("[a-z]+") + 2
    assert _size_of_terminals('start: T\nT: A %regex {"T": "a", "substring_chars": "b"} A A\nA: "a"') == 6


def test_an_answer_that_cannot_end_is_refused(grammars: Grammars) -> None:
    """Guards against grammars for a model without EOS ids, whose answers would run into a dead end."""
    with pytest.raises(InvalidRequest, match="eos_token_ids"):
        grammars.constraint(OBJECT, ())


def test_compiled_grammars_are_kept_and_bounded() -> None:
    """Guards against compiling a grammar for each request, and memory that grows with every schema ever seen."""
    made = []

    def tokenizer() -> object:
        made.append(1)
        return toy_tokenizer(V)

    grammars = Grammars(tokenizer)  # type: ignore[arg-type]
    for number in range(100):
        constraint(grammars, Grammar.regex(f"a{{1,{number + 1}}}"))
    kept = grammars._compiled[Grammar.regex("a{1,100}")]
    constraint(grammars, Grammar.regex("a{1,100}"))
    assert grammars._compiled[Grammar.regex("a{1,100}")] is kept
    assert (len(made), len(grammars._compiled)) == (1, 64)
    for number in range(8):  # however few, they may be large
        constraint(grammars, Grammar.lark(f'start: "a"  // {number} ' + "x" * 60_000))
    assert len(grammars._compiled) == 3


def test_too_much_for_the_library_ends_one_request(grammars: Grammars) -> None:
    """Guards against an exception in the engine at a limit of llguidance: that request alone ends, and says why."""
    one, other, ids = constraint(grammars), constraint(grammars), ToyTokens(V)(ANSWER)
    one.mask(ids[:2], V)
    one._matcher.consume_token(9)  # not allowed: from here on the matcher is in its state of error
    assert allowed(one, ids[:2]) == allowed(other, ids[:2]), "it begins afresh"
    one._fresh, one._renew = one._fresh.deep_copy(), lambda failed: failed
    for matcher in (one._fresh, one._matcher):
        matcher.consume_token(9)
    assert allowed(one, ids[:2]) == []
    assert "doesn't satisfy" in str(one.error)
    assert allowed(other, ids[:2]) != []


def test_a_grammar_is_not_used_up() -> None:
    """Guards against a grammar that fails for everyone as long as it is cached: all copies of a matcher share its
    lexer's automaton, and had read more than 10,000 tokens together."""
    grammars, source = Grammars(lambda: toy_tokenizer(V)), random.Random(5)
    letters = ToyTokens(V)("a") + ToyTokens(V)("b")
    for _ in range(20):
        one, said = constraint(grammars, Grammar.regex("[ab]*a[ab]{16}b[ab]*")), source.choices(letters, k=2000)
        assert all(one.allows(said, letter) for letter in letters), one.error
    assert set(letters) <= set(allowed(one, said)), one.error
    assert len(grammars._compiled) == 1


def test_other_threads_may_compile_meanwhile(grammars: Grammars) -> None:
    """Guards against a matcher that is used while another thread copies what it was made of."""
    want = [allowed(constraint(grammars, ANY_LETTERS), []), allowed(constraint(grammars), [])]
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(50):
            grammar = (ANY_LETTERS, OBJECT)[number % 2]
            if allowed(constraint(grammars, grammar), []) != want[number % 2]:
                wrong.append(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))  # raises what a thread raised
    assert not wrong


def test_masks_fit_any_vocabulary(grammars: Grammars) -> None:
    """Guards against models with more ids than their tokenizer has tokens, or fewer."""
    one = constraint(grammars, ANY_LETTERS)
    narrow, wide = one.mask([], 90), one.mask([], 400)
    assert narrow is not None
    assert wide is not None
    assert torch.equal(wide[:90], narrow)
    assert not wide[V:].any()


def test_one_deep_stack_at_a_time() -> None:
    """Guards against two models that compile at once: the second took the first's size of stacks for the usual one, and
    left all threads of the process with a gigabyte."""
    before, at_once, most = stack_size(), 0, 0

    def work() -> Any:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.05)
        at_once -= 1

    threads = [threading.Thread(target=_in_deep_stack, args=(work,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, stack_size()) == (1, before)


def test_a_system_may_refuse_the_deepest_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against requests with a grammar that all fail on Windows, where Python takes stacks below 256 MB only."""
    before, sizes = stack_size(), list[int]()

    def limited(size: int = 0) -> int:
        if size >= 1 << 28:
            raise ValueError(f"size not valid: {size} bytes")
        sizes.append(size)
        return stack_size(size)

    def work() -> Any:
        return threading.current_thread()

    monkeypatch.setattr("outpace.sampling.grammar.stack_size", limited)
    found: Any = _in_deep_stack(work)
    assert found is not threading.current_thread()
    assert sizes == [(1 << 28) - (1 << 16), before]


def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback where the extra `grammar` is not installed."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    codec: Any = None
    with pytest.raises(InvalidRequest, match=r"pip install 'outpace\[grammar\]'"):
        grammar_tokenizer(codec, V, (EOS,))
