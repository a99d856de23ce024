"""A busy engine from its first request to its last, into which exceptions are thrown."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

from outpace.core.params import SamplingParams
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.engine.stream import TokenStream
from outpace.lib.errors import OutpaceError, StateLost
from tests.interrupted.injector import Injector, Interrupt, Line, NoMemory, Shot
from tests.interrupted.world import OPTIONS, PROMPTS, World, plain, same

T = TypeVar("T")
LIMIT = 400
"""Steps after which an engine that does not come to an end hangs."""


@dataclass
class Outcome:
    """What an exception has left behind.

    Attributes:
        raised: where exceptions were thrown.
        unequal: what was said that plain decoding does not say.
        errors: errors that the engine raised afterwards, of itself.
        lost: requests that ended with an error which says that they were interrupted.
        leaked: what is not as free in the end as in the beginning.
    """

    raised: list[Line] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)


class Play:
    """Requests of some methods that come, wait, are read, go on with an answer, are cancelled and end.

    Args:
        methods: of the requests.
        injector: entered while they are decoded; what it throws is caught, and done again.

    Attributes:
        sessions: name, session, prompt and number of the options of each request.
    """

    def __init__(self, methods: Sequence[str], injector: Injector) -> None:
        self._methods, self._injector = methods, injector
        self._world = World()
        self._engine: Engine = self._world.engine
        self._outcome = Outcome(injector.raised)
        self.sessions: list[tuple[str, Session, list[int], int]] = []
        self._steps = 0
        self._heard: tuple[list[int], str] = [], ""
        for method in dict.fromkeys(methods):
            self._world.proposer(method)

    def run(self) -> Outcome:
        """Play it to its end; if the engine fails, close what is open. Then newcomers are served."""
        self._guarded("while decoding", self._decode_injected)
        self._guarded("at the end", self._close)
        self._guarded("newcomers", self._check_newcomers)
        self._guarded("at the end", self._close)
        self._outcome.leaked += leaks(self._world)
        return self._outcome

    def _guarded(self, when: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._outcome.errors.append(f"{when}: {type(error).__name__}: {str(error)[:150]}")

    def _close(self) -> None:
        for _, session, _, _ in self.sessions:
            self._engine.cancel(session)

    def _decode_injected(self) -> None:
        with self._injector:
            self._decode()
        self._check()

    def _do(self, action: Callable[[], T]) -> T:
        """Do something, again if it is interrupted, as a person or a server would."""
        while True:
            try:
                return action()
            except (Interrupt, NoMemory):
                self._injector.resume()

    def _add(self, number: int, prompt: list[int] | None = None) -> Session:
        method = self._methods[number % len(self._methods)]
        which, prompt = number % len(OPTIONS), prompt or PROMPTS[number % len(PROMPTS)]
        proposer = self._world.proposer(method)

        def add() -> list[Session]:
            return self._engine.add(prompt, SamplingParams(**OPTIONS[which]), proposer)

        (session,) = self._do(add)
        self.sessions.append((f"{number}:{method}", session, prompt, which))
        return session

    def _step(self) -> None:
        self._steps += 1
        if self._steps > LIMIT:
            raise RuntimeError("it hangs")
        self._do(self._engine.step)

    def _decode(self) -> None:
        read = self._add(0)
        stream, tokens, text = self._do(lambda: TokenStream(self._engine, read)), list[int](), ""
        doomed, _ = self._add(1), self._add(2)

        def look() -> bool:
            nonlocal text
            try:
                event = self._do(lambda: next(stream, None))
            except StateLost:
                return False
            if event is not None:
                tokens.extend(event.tokens)
                text += event.text
            return event is not None

        look()
        self._step()
        talk = self._add(3, PROMPTS[0])
        self._add(4)
        look()
        self._step()
        self._do(lambda: self._engine.cancel(doomed))
        while talk.finish_reason is None:
            self._step()
        prompt = [*talk.ids[:-2], 7, 9]
        self._add(5, prompt)
        while look():
            if self._steps > LIMIT:
                raise RuntimeError("it hangs")
        while self._do(lambda: not self._engine.is_idle):
            self._step()
        self._heard = tokens, text

    def _check(self) -> None:
        _, read, _, _ = self.sessions[0]
        if read.error is None and self._heard != (read.generated, read.stopper.text):
            self._outcome.unequal.append(f"what the stream of {self._methods[0]} said is not what it generated")
        for name, session, asked, which in self.sessions:
            self._judge(name, session, asked, which)

    def _judge(self, name: str, session: Session, prompt: list[int], which: int) -> None:
        if session.finish_reason == "cancelled":
            said = session.generated
            if said != plain(tuple(prompt), which).generated[: len(said)]:
                self._outcome.unequal.append(name)
            return
        try:
            self._engine.result(session)
        except OutpaceError as error:
            self._outcome.lost.append(f"{name}: {error}")
            return
        if not same(session, prompt, which):
            self._outcome.unequal.append(name)

    def _check_newcomers(self) -> None:
        """Requests that come after all is over."""
        new = len(self.sessions)
        for number in range(len(self._methods)):
            self._add(number)
        while not self._engine.is_idle:
            self._step()
        for name, session, prompt, which in self.sessions[new:]:
            self._judge(f"new {name}", session, prompt, which)


def leaks(world: World) -> list[str]:
    """Slots that are not free, hooks that are left on the target, and requests that have not ended."""
    hooks = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in world.target.decoder.modules()
    )
    free, slots = world.engine.free_slots, world.target.max_slots
    found = {"hooks": hooks, "slots": slots - free, "open requests": int(not world.engine.is_idle)}
    return [f"{count} {what}" for what, count in found.items() if count]


@cache
def undisturbed(methods: tuple[str, ...]) -> tuple[Injector, Play]:
    """What happens where nothing is raised, and how often each line of the package runs."""
    injector = Injector()
    play = Play(methods, injector)
    assert play.run() == Outcome(), "without exceptions nothing must be wrong"
    return injector, play


def assert_nothing_wrong(methods: Sequence[str], shots: Sequence[Shot]) -> int:
    """After these exceptions all that is said is right, and nothing is lost; how many of them came."""
    injector = Injector()
    injector.arm(*shots)
    outcome = Play(methods, injector).run()
    wrong = outcome.unequal + outcome.errors + outcome.leaked
    assert not wrong, f"raised at {outcome.raised}: {wrong}"
    return len(outcome.raised)


def choose(seen: Counter[Line], random_: random.Random) -> tuple[Line, int]:
    """A line of those that run, each as likely as any other, and one of the times that it runs."""
    line = random_.choice(sorted(seen))
    return line, random_.randint(1, seen[line])
