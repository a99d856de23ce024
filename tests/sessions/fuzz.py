"""Whole lives of an engine, made up at random: requests come, are read, cancelled, dropped, continued and interrupted.

`python -m tests.sessions.fuzz FIRST COUNT` plays that many and prints what was counted.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest
from outpace.core.tree import DraftTree
from outpace.engine.session import Session
from outpace.engine.stream import TokenStream
from outpace.lib.errors import InvalidRequest, OutpaceError, StateLost
from outpace.testing import decode
from outpace.trees.proposer import EmptyDraft
from tests.grammars import EOS, OBJECT
from tests.interrupted.injector import Injector, Interrupt, NoMemory, Shot
from tests.interrupted.world import METHODS, PROMPTS, World
from tests.unit.models.tiny import VOCAB

LIMIT = 3000
"""Steps after which an engine that does not come to an end hangs."""
BAD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"n": 0}, {}), ({"n": 10**8}, {}), ({"temperature": -1.0}, {}), ({}, {"budget": 2.5}), ({}, {"budget": -1}),
    ({"logit_bias": {VOCAB: 1.0}}, {}), ({"bad_words": ("x",)}, {}),
]  # fmt: skip
"""What is refused: fields of `SamplingParams`, and arguments of `Engine.add`."""


class Broken(EmptyDraft):
    """A method with a fault, which shows now and then."""

    def __init__(self, source: random.Random) -> None:
        super().__init__()
        self._source = source

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        if self._source.random() < 0.3:
            raise RuntimeError("a fault of the method")
        return super().propose(states, requests)


@lru_cache(maxsize=4096)
def plain(prompt: tuple[int, ...], params: SamplingParams) -> list[tuple[Any, ...]]:
    """What plain decoding says, alone and undisturbed: of each sample its answer. A session would keep its engine."""
    return [_answer(session) for session in decode(World().engine, [prompt], [params], [EmptyDraft()])]


@dataclass(eq=False)
class Asked:
    """A request that somebody waits for.

    Attributes:
        method, prompt, params: what was asked.
        session: the sample.
        stream: by which it is read; None where it is looked at afterwards.
    """

    method: str
    prompt: tuple[int, ...]
    params: SamplingParams
    session: Session
    stream: TokenStream | None = None


class Life:
    """One life of an engine.

    Args:
        seed: of everything that happens.

    Attributes:
        counts: what happened.
        faults: what was not as it must be.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._world = World()
        self._engine = self._world.engine
        self._asked: list[Asked] = []
        self._steps, self._was_interrupted = 0, False
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def play(self, events: int) -> None:
        """Let so many things happen, then wait for all that is open, and count slots."""
        happenings: dict[Callable[[], None], int] = {
            self._submit: 20, self._step: 30, self._read: 12, self._cancel: 3, self._drop: 3, self._go_on: 6,
            self._reset: 2, self._toggle: 1, self._interrupt: 6, self._break: 1, self._refused: 3,
        }  # fmt: skip
        for happening in self._random.choices(list(happenings), list(happenings.values()), k=events):
            happening()
        while not self._engine.is_idle and not self.faults:
            self._step()
        while self._asked:
            self._judge(self._asked.pop())
        if not self._engine.is_idle or self._engine.free_slots != self._world.target.max_slots:
            self.faults.append(f"{self._engine.free_slots} slots are free in the end")

    def _options(self) -> dict[str, Any]:
        """Parameters of a request, those that matter most more often than others."""
        pick = self._random.choice
        options: dict[str, Any] = {"max_new_tokens": pick((0, 1, 4, 7, 10)), "seed": pick((1, 2, 3))}
        options["temperature"] = pick((0.0, 0.0, 0.6, 1.0))
        more: list[dict[str, Any]] = [
            {}, {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"logprobs": 2}, {"trace": True},
            {"repetition_penalty": 1.3}, {"presence_penalty": 0.5, "frequency_penalty": 0.3},
            {"logit_bias": {7: 3.0, 9: -4.0}}, {"bad_words_ids": [[7], [9, 11]]}, {"stop": ("A", "KL")},
            {"eos_token_ids": (5, 17, 80)}, {"ignore_eos": True}, {"grammar": OBJECT, "eos_token_ids": (EOS,)},
            {"eos_token_ids": (5, 17), "min_new_tokens": min(2, options["max_new_tokens"])},
        ]  # fmt: skip
        return options | pick(more) | pick(more)

    def _submit(self) -> None:
        options = self._options() | {"n": self._random.choice((1, 1, 1, 2, 3))}
        if options.get("grammar") is not None:
            options.pop("ignore_eos", None)
            options["eos_token_ids"] = (EOS,)
        prompt = self._random.choice(PROMPTS)
        cut = self._random.choice((len(prompt), self._random.randint(1, len(prompt))))
        prompt = [*prompt[:cut], *(self._random.randrange(VOCAB) for _ in range(self._random.choice((0, 0, 1, 5))))]
        self._add(self._random.choice(METHODS), prompt, SamplingParams(**options))

    def _add(self, method: str, prompt: list[int], params: SamplingParams) -> None:
        budget, proposer = self._random.choice((None, None, 0, 3, 9)), self._world.proposer(method)
        for session in self._engine.add(prompt, params, proposer, budget):
            stream = TokenStream(self._engine, session) if self._random.random() < 0.4 else None
            self._asked.append(Asked(method, tuple(prompt), params, session, stream))
            self.counts["requests"] += 1

    def _refused(self) -> None:
        """Somebody asks for nonsense beside the others."""
        options, arguments = self._random.choice(BAD)
        try:
            self._engine.add(PROMPTS[0], SamplingParams(**options), EmptyDraft(), **arguments)
            self.faults.append(f"{options} {arguments} was accepted")
        except InvalidRequest:
            self.counts["refused"] += 1

    def _step(self) -> None:
        self._steps += 1
        if self._steps > LIMIT:
            self.faults.append("it hangs")
        running = [asked.session for asked in self._asked if not asked.session.has_ended]
        some = self._random.random() < 0.1 and running
        self._engine.step(self._random.sample(running, self._random.randint(1, len(running))) if some else None)

    def _one(self, ended: bool | None = None) -> Asked | None:
        found = [asked for asked in self._asked if ended is None or asked.session.has_ended == ended]
        return self._random.choice(found) if found else None

    def _read(self) -> None:
        asked = self._one()
        if asked is None or asked.stream is None:
            return
        try:
            next(asked.stream, None)
        except OutpaceError as error:
            if repr(error) != repr(asked.session.error):
                self.faults.append(f"a stream raised {error!r} of another request")
        self.counts["reads"] += 1

    def _cancel(self) -> None:
        if (asked := self._one(ended=False)) is not None:
            self._engine.cancel(asked.session)
            self.counts["cancels"] += 1

    def _drop(self) -> None:
        """Somebody stops waiting and says nothing."""
        if (asked := self._one()) is not None:
            self._asked.remove(asked)
            self.counts["drops"] += 1

    def _go_on(self) -> None:
        """A conversation's next turn, sometimes with another method."""
        asked = self._one(ended=True)
        if asked is not None and asked.session.error is None:
            ids = asked.session.ids
            prompt = [*ids[: self._random.randint(1, len(ids))], *self._random.sample(range(VOCAB), 3)]
            method = asked.method if self._random.random() < 0.8 else self._random.choice(METHODS)
            params = SamplingParams(max_new_tokens=6, seed=4, temperature=self._random.choice((0.0, 0.8)))
            self._add(method, prompt, params)
            self.counts["turns"] += 1

    def _reset(self) -> None:
        def forget() -> None:
            for method in METHODS:
                if self._random.random() < 0.3:
                    self._world.proposer(method).reset()

        self._engine.forget_prefixes()
        self._engine.between_steps(forget)
        self.counts["resets"] += 1

    def _toggle(self) -> None:
        self._engine.shares_prefixes = not self._engine.shares_prefixes

    def _interrupt(self) -> None:
        """Ctrl-C or a full memory somewhere in a step, and often once more while that is made up for."""
        injector, kinds = Injector(), (Interrupt, NoMemory)
        reach = self._random.choice((20, 300, 4000))
        shots = [Shot(None, self._random.randint(1, reach), self._random.choice(kinds))]
        if self._random.random() < 0.4:
            shots.append(Shot(None, self._random.randint(1, 60), self._random.choice(kinds)))
        injector.arm(*shots)
        for _ in range(3):
            try:
                with injector:
                    self._engine.step()
            except (Interrupt, NoMemory):
                self._was_interrupted = True
        self.counts["exceptions"] += len(injector.raised)

    def _break(self) -> None:
        """A method with a fault beside the others: its step fails, and it is cancelled."""
        (session,) = self._engine.add(PROMPTS[0], SamplingParams(max_new_tokens=9), Broken(self._random))
        for _ in range(self._random.randint(1, 12)):
            try:
                self._engine.step()
            except RuntimeError:
                self.counts["faults of methods"] += 1
        while not session.has_ended:
            try:
                self._engine.cancel(session)
            except RuntimeError:  # what was begun before has to be rolled back first
                self.counts["faults of methods"] += 1

    def _judge(self, asked: Asked) -> None:
        got, params = asked.session, asked.params
        name = f"{asked.method} {params} sample {got.sample_index} of {asked.prompt}"
        if isinstance(got.error, StateLost) and self._was_interrupted:
            self.counts["lost"] += 1
            return
        want = plain(asked.prompt, params)[got.sample_index]
        if got.finish_reason == "cancelled":
            if got.generated != want[0][: len(got.generated)]:
                self.faults.append(f"{name}: {got.generated} begins otherwise than {want[0]}")
            self.counts["cancelled answers"] += 1
            return
        self.counts["answers"] += 1
        if _answer(got) != want:
            self.faults.append(f"{name}: {_answer(got)} instead of {want}")
        said = [token for event in got.events for token in event.tokens]
        if said != got.generated or "".join(event.text for event in got.events) != got.stopper.text:
            self.faults.append(f"{name}: its events say otherwise than it does")


def _answer(session: Session) -> tuple[Any, ...]:
    scored = [entry.token_id for entry in session.logprobs]
    return session.generated, session.finish_reason, session.stop_reason, session.stopper.text, scored


def play(seed: int, events: int = 120) -> Life:
    """A life, in which nothing may have been wrong."""
    life = Life(seed)
    life.play(events)
    assert not life.faults, f"seed {seed}: {life.faults[:3]}"
    return life


def campaign(seeds: Iterable[int], tell: Callable[[str], None] = lambda said: None) -> Counter[str]:
    """A life for each seed; what happened in all of them."""
    total: Counter[str] = Counter()
    for seed in seeds:
        total += play(seed).counts
        tell(f"{seed} {dict(total)}")
    return total


if __name__ == "__main__":
    torch.set_num_threads(1)
    first, count = map(int, sys.argv[1:])
    campaign(range(first, first + count), lambda said: print(said, flush=True))
