"""Grammars, compiled once for a tokenizer and matched along any path: allowed tokens and forced text.

llguidance does the matching. It computes masks in microseconds and rolls tokens back, so that one matcher serves all
paths of a tree.
"""

import json
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from graphlib import CycleError, TopologicalSorter
from threading import Lock, stack_size
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.params import Grammar
from outpace.core.tree import MAX_TREE_NODES, Topology
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_COMPILED = 64  # grammars that are kept
_CANONICAL = 4096  # forced texts whose tokens are cached
_MOST_FORCED = 2048  # bytes of a forced text that are drafted: a tree has room for about as many
_MOST_CHARACTERS = 200_000  # in one grammar, and in all cached ones together
_MOST_OF_REGEXES = 20_000  # of a grammar: memory grows with the square of one, 20 MB at this length, 450 MB at 90,000
_MOST_PATTERNS = 32  # in the patternProperties of a schema: 200 take llguidance 0.3 seconds, 400 take six
_MOST_OPTIONAL = 500  # properties of an object: at more llguidance mostly fails later, and 8,000 take four seconds
_ONE_AT_A_TIME = Lock()
_STACK = 1 << 30  # bytes, of which only those in use take memory: llguidance calls itself for each rule of a chain
_STACK_ON_WINDOWS = (1 << 28) - (1 << 16)  # where Python refuses 256 MB and more
_JSON: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LARK = re.compile(
    r'(?P<literal>"(?:\\.|[^"\\])*"?)|(?://|#)[^\n]*|<[^<>\s]*>|/(?P<regex>(?:\\.|[^/\\])+)/?'
    r"|(?P<json>%(?:json|regex|llguidance)\s*)|(?P<rule>:|%\w+)"
    r"|(?P<name>_*[A-Z][A-Z0-9_]*)(?P<defined>(?:\.-?\d+)?(?:\[[^\[\]\n]*\])?[ \t]*:)?",
    re.DOTALL,
)
"""What counts in a Lark grammar, and parts that could look like it: comments and special tokens. `rule`: where a rule
or a directive begins. Closing marks are optional, so that a text is read only once."""


class Forced(NamedTuple):
    """Text that must follow a node, as the tokenizer encodes it; of a long one the beginning.

    Attributes:
        certain: how many of the first `tokens` are forced: the mask allows no other. The answer may tokenize the rest
            otherwise, and merge the last token with what follows.
    """

    tokens: tuple[int, ...]
    certain: int


class Grammars:
    """The grammars of one model, compiled when first used.

    Args:
        new_tokenizer: the model's tokenizer as llguidance needs it; called once. InvalidRequest where there is none.
    """

    def __init__(self, new_tokenizer: "Callable[[], LLTokenizer]") -> None:
        self._new_tokenizer = new_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()
        self._tokens: Callable[[bytes], tuple[int, ...]] = lambda text: ()

    def constraint(self, grammar: Grammar, eos_token_ids: Sequence[int]) -> "GrammarConstraint":
        """The constraint of one request. Thread-safe.

        Raises:
            InvalidRequest: the grammar cannot be compiled, nothing satisfies it, or no id could end the answer.
        """
        if not eos_token_ids:
            raise InvalidRequest(
                f"grammar={grammar}: the answer could not end, because the model has no EOS id; give eos_token_ids"
            )
        with self._lock:
            tokenizer = self._made_tokenizer()
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = self._made(grammar)
            else:
                self._compiled.move_to_end(grammar)
            renew = partial(self._renewed, grammar)
            return GrammarConstraint(matcher, tokenizer.eos_tokens, eos_token_ids, self._tokens, renew)

    def prepare(self) -> None:
        """Make the tokenizer now, which takes about a second for a large vocabulary.

        Raises:
            InvalidRequest: there is none.
        """
        with self._lock:
            self._made_tokenizer()

    def _made_tokenizer(self) -> "LLTokenizer":
        if self._tokenizer is None:
            tokenizer = self._new_tokenizer()
            self._tokens = lru_cache(_CANONICAL)(lambda text: tuple(tokenizer.tokenize_bytes(text)))
            self._tokenizer = tokenizer
        return self._tokenizer

    def _made(self, grammar: Grammar) -> "LLMatcher":
        matcher = self._compiled[grammar] = _in_deep_stack(partial(_compile, grammar, self._made_tokenizer()))
        while len(self._compiled) > _COMPILED or sum(len(one.text) for one in self._compiled) > _MOST_CHARACTERS:
            self._compiled.popitem(last=False)
        return matcher

    def _renewed(self, grammar: Grammar, failed: "LLMatcher") -> "LLMatcher":
        """A matcher at the beginning of a grammar that shares nothing with one whose copies fail: all copies of a
        matcher share its lexer's automaton, and fail for good when what they have read together exceeds its limits."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            return self._made(grammar) if matcher is None or matcher is failed else matcher


class GrammarConstraint:
    """A grammar matched along one request's ids and along the paths after them: `core.params.Constraint`.

    Each call passes all generated ids. Their common prefix with those of the last call is kept; the matcher rolls back
    or consumes the rest. So nothing has to be undone after a walk or a step that an exception cut short.

    Args:
        matcher: at the beginning of the grammar; it is only copied.
        renew: of a matcher whose copies fail, one that shares nothing with it.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        special: Sequence[int],
        eos_token_ids: Sequence[int],
        tokens: Callable[[bytes], tuple[int, ...]],
        renew: "Callable[[LLMatcher], LLMatcher]",
    ) -> None:
        self._fresh, self._special, self._tokens, self._renew = matcher, list(special), tokens, renew
        self._eos = frozenset(eos_token_ids)
        self._matcher = matcher.deep_copy()
        self._consumed: list[int] | None = []  # by the matcher; None while that is uncertain
        self._seconds = 0.0
        self.error: str | None = None

    def allows(self, generated: Sequence[int], token: int) -> bool:
        started = perf_counter()
        if generated and generated[-1] in self._eos:
            return True
        matcher = self._follow(generated)
        allowed = matcher is not None and self._may_follow(matcher, token, _only(matcher))
        self._seconds += perf_counter() - started
        return allowed

    def mask(self, generated: Sequence[int], vocab_size: int) -> Tensor | None:
        started = perf_counter()
        if generated and generated[-1] in self._eos:
            return None
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        for is_second in (False, True):
            if is_second:
                self._fresh = self._renew(self._fresh)
            matcher = self._follow(generated)
            if matcher is None:
                break
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            found = torch.from_numpy(bits[:vocab_size]).bool()
            if self._is_sound(matcher):
                allowed[: len(found)] = found
                allowed[[token for token in (*self._special, *self._eos) if 0 <= token < vocab_size]] = False
                if matcher.is_accepting():
                    allowed[[token for token in self._eos if 0 <= token < vocab_size]] = True
                break
        self._seconds += perf_counter() - started
        return allowed

    def explore(
        self, generated: Sequence[int], topology: Topology, tokens: Sequence[int], wanted: Sequence[bool]
    ) -> tuple[list[bool], Mapping[int, Forced]]:
        """Allowed nodes of a drafted tree, and forced text below them.

        Returns:
            For each node whether it is allowed, and the forced text below allowed nodes that are `wanted`.
        """
        started = perf_counter()
        allowed, forced = [True] + [False] * (len(topology) - 1), dict[int, Forced]()
        matcher = self._follow(generated)
        if matcher is not None:
            self._consumed, children = None, topology.children
            pending = [(0, False)]
            while pending:
                node, is_done = pending.pop()
                if is_done:
                    matcher.rollback(1)
                    continue
                if node:
                    if tokens[node] in self._eos or not matcher.consume_token(tokens[node]):
                        continue
                    pending.append((node, True))
                only = _only(matcher)
                if wanted[node] and (text := matcher.compute_ff_bytes()):
                    chain = self._tokens(text[:_MOST_FORCED])
                    chain = chain if chain[: len(only)] == only else only
                    forced[node] = Forced(chain[:MAX_TREE_NODES], len(only))
                for child in children[node]:
                    allowed[child] = self._may_follow(matcher, tokens[child], only)
                    if allowed[child] and (children[child] or wanted[child]):
                        pending.append((child, False))
            if self._is_sound(matcher):
                self._consumed = list(generated)
        self._seconds += perf_counter() - started
        return allowed, forced

    def forced_text(self, generated: Sequence[int]) -> bytes:
        """UTF-8 of the text that must follow the generated ids; often not whole tokens."""
        matcher = self._follow(generated)
        return b"" if matcher is None else bytes(matcher.compute_ff_bytes())

    def take_ms(self) -> float:
        """Milliseconds spent in this constraint since the last call."""
        spent, self._seconds = self._seconds, 0.0
        return spent * 1e3

    def _may_follow(self, matcher: "LLMatcher", token: int, only: tuple[int, ...]) -> bool:
        if token in self._eos:
            return bool(matcher.is_accepting())
        if only:
            return token == only[0]
        return token not in self._special and matcher.validate_tokens([token]) == 1

    def _follow(self, generated: Sequence[int]) -> "LLMatcher | None":
        """The matcher after generated ids; None where it fails on them, and a renewed one too."""
        known, ids = self._consumed, list(generated)
        self._consumed = None
        if (known is None or not self._reach(known, ids)) and not self._restart(ids):
            self._fresh = self._renew(self._fresh)
            if not self._restart(ids):
                return None
        self._consumed = ids
        return self._matcher

    def _restart(self, ids: list[int]) -> bool:
        """Take a new matcher to generated ids; whether it has no error there."""
        self._matcher, self.error = self._fresh.deep_copy(), None
        return self._reach([], ids)

    def _reach(self, known: list[int], ids: list[int]) -> bool:
        """Take the matcher from one sequence of ids to another; whether it has no error there."""
        shared = len(known)
        if ids[:shared] != known:
            shared = next((at for at, (one, two) in enumerate(zip(known, ids)) if one != two), min(shared, len(ids)))
        if shared < len(known):
            self._matcher.rollback(len(known) - shared)
        if shared < len(ids):
            self._matcher.consume_tokens(ids[shared:])
        return self._is_sound(self._matcher)

    def _is_sound(self, matcher: "LLMatcher") -> bool:
        """Whether the matcher has no error; otherwise keep the reason, and start afresh at the next call."""
        if not matcher.is_error():
            return True
        self._consumed, self.error = None, _reason(matcher)
        return False


def _only(matcher: "LLMatcher") -> tuple[int, ...]:
    """The tokens of a forced text that later text cannot change; the mask allows only the first. Empty without forced
    text."""
    return tuple(matcher.compute_ff_tokens()) if matcher.compute_ff_bytes() else ()


def _in_deep_stack(work: "Callable[[], LLMatcher]") -> "LLMatcher":
    """The result of `work` in a thread whose stack the largest grammar cannot overflow; one caller at a time, since the
    stack size is global. With the default size a chain of about 2,000 rules kills the process."""
    with _ONE_AT_A_TIME:
        try:
            before = stack_size(_STACK)
        except ValueError:
            before = stack_size(_STACK_ON_WINDOWS)
        try:
            with ThreadPoolExecutor(1) as deep:
                return deep.submit(work).result()  # the thread starts within submit()
        finally:
            stack_size(before)


def _compile(grammar: Grammar, tokenizer: "LLTokenizer") -> "LLMatcher":
    """A matcher at the beginning of a grammar. InvalidRequest if it cannot be compiled."""
    from llguidance import LLMatcher

    if len(grammar.text) > _MOST_CHARACTERS:
        raise InvalidRequest(
            f"grammar={grammar}: {len(grammar.text):,} characters, the limit is {_MOST_CHARACTERS:,}; use a smaller one"
        )
    try:
        matcher = LLMatcher(tokenizer, _source(grammar), log_level=0)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"grammar={grammar}: {error}") from error
    if matcher.is_error():
        raise InvalidRequest(f"grammar={grammar}: {_reason(matcher)}; change that part of it")
    probe = matcher.deep_copy()
    if not probe.is_accepting() and (not any(probe.compute_bitmask()) or probe.is_error()):
        raise InvalidRequest(f"grammar={grammar}: no text that this model can generate satisfies it; relax it")
    return matcher


def _source(grammar: Grammar) -> str:
    """A grammar in llguidance's format; ValueError if it is malformed or its regular expressions are too long."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        _check_regexes({grammar.text})
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        _check_regexes(_regexes_of_lark(grammar.text))
        if _size_of_terminals(grammar.text) > _MOST_OF_REGEXES:
            raise ValueError(
                f"its terminals stand for regular expressions of more than {_MOST_OF_REGEXES:,} characters, with a "
                "literal as 2 and terminals within terminals; shorten them, or write rules instead"
            )
        return LLMatcher.grammar_from_lark(grammar.text)
    schema = json.loads(grammar.text)
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema must be an object here; Grammar.json_schema(True) allows everything")
    _check_regexes(_regexes_of_schema(schema))
    overrides = {} if "x-guidance" in schema else _JSON
    return LLMatcher.grammar_from_json_schema(grammar.text, overrides=overrides)  # type: ignore[arg-type]


def _check_regexes(regexes: set[str]) -> None:
    size = sum(map(len, regexes))
    if size > _MOST_OF_REGEXES:
        raise ValueError(f"regular expressions of {size:,} characters, the limit is {_MOST_OF_REGEXES:,}; shorten them")


def _regexes_of_schema(schema: Any) -> set[str]:
    """The regular expressions of a JSON schema; separators in its `x-guidance` count too. ValueError if it has so many
    names that it would take seconds or hours to compile."""
    found, patterns, pending = set[str](), set[str](), [schema]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            _check_optional(one)
            names, own = one.get("patternProperties"), one.get("x-guidance")
            patterns.update(names if isinstance(names, dict) else ())
            texts = [one.get("pattern"), *(own.values() if isinstance(own, dict) else ())]
            found.update(text for text in texts if isinstance(text, str))
            pending += one.values()
        elif isinstance(one, list):
            pending += one
    if len(patterns) > _MOST_PATTERNS:
        raise ValueError(
            f"a JSON schema with {len(patterns):,} different patternProperties, the limit is {_MOST_PATTERNS}; join "
            "some to one pattern"
        )
    return found | patterns


def _check_optional(schema: dict[str, Any]) -> None:
    names, required = schema.get("properties"), schema.get("required")
    if isinstance(names, dict):
        count = len(names.keys() - set(map(str, required if isinstance(required, list) else ())))
        if count > _MOST_OPTIONAL:
            raise ValueError(
                f"a JSON schema of an object with {count:,} optional properties, the limit is {_MOST_OPTIONAL}; list "
                "some under required"
            )


def _parts_of_lark(text: str) -> Iterator[tuple[re.Match[str], Any]]:
    """The parts of a grammar in Lark, each with the JSON that follows it; None for most."""
    place, read = 0, json.JSONDecoder().raw_decode
    while part := _LARK.search(text, place):
        content, place = read(text, part.end()) if part["json"] else (None, part.end())
        yield part, content


def _regexes_of_lark(text: str) -> set[str]:
    """The regular expressions of a grammar in Lark, and of the JSON schemas in it."""
    found = set[str]()
    for part, content in _parts_of_lark(text):
        found |= {part["regex"]} if part["regex"] else _regexes_of_schema(content)
    return found


def _size_of_terminals(text: str) -> int:
    """Characters of the regular expressions that the terminals in the rules of a grammar in Lark stand for, or a number
    above the limit. A literal counts as 2, as in "a?". Terminals within terminals count each time that they are named:
    seven lines can stand for a million literals."""
    own, uses, within = Counter[str](), defaultdict[str, Counter[str]](Counter), ""  # "": rules and directives
    for part, _ in _parts_of_lark(text):
        if part["rule"] or part["defined"]:
            within = part["name"] or ""
        elif part["name"]:
            uses[within][part["name"]] += 1
        elif part["literal"] or part["regex"]:
            own[within] += len(part["regex"] or "a?")
    sizes: dict[str, int] = {}
    try:
        for name in TopologicalSorter(dict(uses)).static_order():
            size = own[name] + sum(times * sizes[one] for one, times in uses[name].items())
            sizes[name] = min(max(size, len("a?")), _MOST_OF_REGEXES + 1)
    except CycleError:
        return 0  # llguidance refuses it
    return sum(sizes[name] for name in uses[""])


def _reason(matcher: "LLMatcher") -> str:
    """A matcher's error message, without its states."""
    text = matcher.get_error().split("\n<state>")[0]
    return " ".join(text.split())[:500]
