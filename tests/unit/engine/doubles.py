"""What the engine's tests share: a detokenizer of one character per token, answers known beforehand, broken parts."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Proposer
from outpace.core.tree import DraftTree
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.methods.catalog import build_proposer, parse_method
from outpace.testing import ToyTarget, decode, toy_context
from outpace.trees.proposer import EmptyDraft

VOCAB = 60
PROMPT = [3, 1, 4, 1, 5]


def character(token: int) -> str:
    """The character of a token, all different and none a pattern."""
    return chr(ord("A") + token)


def text_of(tokens: Iterable[int]) -> str:
    return "".join(character(token) for token in tokens)


class CharDetokenizer:
    """One character per token."""

    def push(self, token: int) -> str:
        return character(token)

    def flush(self) -> str:
        return ""


class PairDetokenizer:
    """Characters become certain two at a time, as when a token ends inside a character."""

    def __init__(self) -> None:
        self._open = ""

    def push(self, token: int) -> str:
        self._open += character(token)
        return self.flush() if len(self._open) == 2 else ""

    def flush(self) -> str:
        text, self._open = self._open, ""
        return text


class PoisonedTarget(ToyTarget):
    """A target whose logits are not finite at one position of the sequences that begin with `poison`."""

    def __init__(self, poison: int, at: int, value: float, **options: Any) -> None:
        super().__init__(**options)
        self._poison, self._at, self._value = poison, at, value

    def logits(self, ids: Sequence[int], position: int) -> Tensor:
        logits = super().logits(ids, position)
        if ids[0] == self._poison and position == self._at:
            logits[2] = self._value
        return logits


def failing(**methods: type[BaseException]) -> Any:
    """An empty draft, these methods of which fail, each by its kind of exception."""
    made: Any = EmptyDraft()
    for name, kind in methods.items():
        setattr(made, name, partial(_fail, kind))
    return made


def _fail(kind: type[BaseException], *arguments: Any) -> None:
    raise kind("planted")


def heard(proposer: Any, hear: Callable[[DraftRequest, DraftTree], object]) -> Any:
    """The proposer, of which `hear` gets each request and its tree."""
    propose = proposer.propose

    def watched(states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees: list[DraftTree] = propose(states, requests)
        for request, tree in zip(requests, trees, strict=True):
            hear(request, tree)
        return trees

    proposer.propose = watched
    return proposer


def toy_engine(text: bool = False, **options: Any) -> Engine:
    target = ToyTarget(**({"vocab_size": VOCAB, "seed": 13} | options))
    return Engine(target, CharDetokenizer if text else None)


def named(method: str, vocab: int) -> Proposer:
    """A method without a model."""
    return build_proposer(parse_method(method), toy_context(vocab))


def alone(prompt: Sequence[int], params: SamplingParams, **options: Any) -> list[int]:
    """What plain decoding answers to one request by itself."""
    (session,) = decode(toy_engine(**options), [prompt], [params], [EmptyDraft()])
    return session.generated


def distinct_answer(count: int) -> list[int]:
    """PROMPT's greedy answer, whose tokens are all different, so that each is the first of its kind."""
    answer = alone(PROMPT, SamplingParams(max_new_tokens=count))
    assert len(set(answer)) == count, "choose another seed: the tests need an answer without repeats"
    return answer


def run_all(engine: Engine, sessions: Sequence[Session], limit: int = 10_000) -> None:
    """Step until all have ended; a hang is an error."""
    for _ in range(limit):
        if all(session.finish_reason is not None for session in sessions):
            return
        engine.step()
    raise AssertionError(f"not finished after {limit} steps")


def run(engine: Engine, *given: Any, **options: Any) -> Session:
    """One request, with what `Engine.add` takes, after its last step."""
    (session,) = engine.add(*given, **options)
    run_all(engine, [session])
    return session


def event_tokens(session: Session) -> list[int]:
    return [token for event in session.events for token in event.tokens]


def event_text(session: Session) -> str:
    return "".join(event.text for event in session.events)
