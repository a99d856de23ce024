"""The state of a server: the model, the engine's thread, the queue and the metrics."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from outpace.api import Model
from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import MethodLike, MethodSpec, parse_method
from outpace.models.tokenizer import Pieces
from outpace.serve.engine_thread import EngineThread, Inbox, Job
from outpace.serve.errors import ApiError, from_engine, unavailable
from outpace.serve.metrics import Metrics
from outpace.serve.settings import ServeSettings

T = TypeVar("T")


def drafting(model: Model, name: str | None, budget: int | None) -> tuple[str, Proposer, int | None]:
    """The canonical name of a method that a request names, by default the model's; its proposer, built at its first
    request; and the budget, as of `Model.drafting`. Only the model's default method may name files of the server."""
    default: MethodLike = model.method
    if name is not None and name != model.method_name:
        spec = model.drafters.with_draft(name)
        if spec != (parse_method(default) if isinstance(default, str) else default):
            _check_files(name, spec)
            return str(spec), *model.drafting(spec, budget)
    return model.method_name, *model.drafting(None if name is None else default, budget)


def _check_files(name: str, spec: MethodSpec) -> None:
    for option in spec.files:
        raise InvalidRequest(
            f"method={name!r}: {option} names a file on the server; it can only be set when the server is started"
        )


@dataclass(frozen=True)
class EngineInputs:
    """What the engine gets of a request. `continues`: whether an answer's text continues its prompt's."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    method: str
    proposer: Proposer
    budget: int | None
    continues: bool

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.params.n


class Service:
    """The state of a server: its model, once it is loaded, the engine's thread, the queue and the metrics."""

    def __init__(self, settings: ServeSettings, log: Any) -> None:
        self.settings, self.log = settings, log
        self.metrics = Metrics(settings.names[0], self.occupancy)
        self.created = int(time.time())
        self.is_draining = False
        self.load_error: Exception | None = None
        self._model: Model | None = None
        self._thread: EngineThread | None = None
        self.pieces: Pieces  # set by `open`
        self._preparing = ThreadPoolExecutor(1, "prepare")  # one: prompts join the engine in the order they came
        self._admitted = 0  # samples
        self._bodies = 0  # whole ones, of requests that are not admitted yet
        self._recent = 1.0  # seconds that a request took, a moving average

    def open(self, model: Model) -> None:
        """Take a loaded model."""
        self.metrics.open(model)
        _ = model.codec.longest_token  # reads the whole vocabulary now, so that no request waits for it
        self.pieces = Pieces(model.codec)
        self._thread = EngineThread(
            model.engine, self.metrics, lambda error: self.log.error("engine_fault", error=repr(error), exc_info=error)
        )
        self._model = model  # last, since it makes the service ready

    def cancel_all(self) -> None:
        """End all running and waiting requests, which are answered with 503."""
        if self._thread is not None:
            for session in self._thread.sessions():
                session.is_cancelled = True

    def close(self) -> None:
        """Cancel what still runs and end the threads."""
        self.is_draining = True
        self._preparing.shutdown(wait=True, cancel_futures=True)
        if self._thread is not None:
            self._thread.close()

    @property
    def model(self) -> Model:
        """The model; `ApiError` (503) while it is loading, the server shuts down or its engine is lost."""
        if self.is_draining or self._model is None or not self.is_healthy:
            what = "is shutting down" if self.is_draining else "is loading the model"
            what = what if self.is_healthy else "has lost its engine: it must be started again"
            raise unavailable(what)
        return self._model

    def check_name(self, name: str) -> None:
        """Refuse a model of another name."""
        if name not in self.settings.names:
            known = ", ".join(self.settings.names)
            raise ApiError(404, f"model={name[:200]!r}: this server has {known}", "model", code="model_not_found")

    @property
    def is_ready(self) -> bool:
        return self._model is not None and not self.is_draining and self.is_healthy

    @property
    def is_healthy(self) -> bool:
        return self._thread is None or self._thread.is_alive

    @property
    def is_idle(self) -> bool:
        return self._admitted == 0

    def occupancy(self) -> tuple[int, int, float]:
        """Number of decoding samples, of waiting samples, and the share of the cache in use."""
        if self._thread is None or self._model is None:
            return 0, 0, 0.0
        sessions = self._thread.sessions()
        running = [session for session in sessions if session.slot is not None]
        target = self._model.target
        rows, budget = target.max_slots * target.max_length, target.memory.budget
        rows = rows if budget is None else min(rows, budget)
        return len(running), len(sessions) - len(running), sum(session.written for session in running) / rows

    @asynccontextmanager
    async def running(self, inputs: EngineInputs) -> AsyncIterator[Inbox]:
        """Run a request and yield the inbox of its events. Leaving the block cancels the samples that have not
        ended."""
        self.check_capacity(inputs.samples, param="n" if len(inputs.prompts) == 1 else "prompt")
        self._admitted += inputs.samples
        inbox, jobs = Inbox(), []  # type: Inbox, list[Job]
        began = time.monotonic()
        try:
            await self._add(inputs, inbox, jobs)
            yield inbox
        finally:
            for job in jobs:
                job.cancel()
            self._admitted -= inputs.samples
            self._recent += 0.1 * (time.monotonic() - began - self._recent)

    @contextmanager
    def holding_body(self) -> Iterator[None]:
        """Count a request while its body, which has come whole, is prepared: at most as many as the queue has free
        places. Bodies that are still coming do not count: slow clients would keep others out."""
        self.check_capacity(1, self._bodies)
        self._bodies += 1
        try:
            yield
        finally:
            self._bodies -= 1

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run slow work, such as encoding a prompt, outside the event loop."""
        _ = self.model  # refuses new work while the server shuts down
        try:
            return await asyncio.get_running_loop().run_in_executor(self._preparing, work)
        except ApiError:
            raise
        except Exception as error:
            raise from_engine(error) from error

    async def _add(self, inputs: EngineInputs, inbox: Inbox, jobs: list[Job]) -> None:
        model, thread = self.model, self._thread
        assert thread is not None
        decoding = partial(model.codec.new_detokenizer, self.pieces if inputs.continues else None)
        for index, prompt in enumerate(inputs.prompts):
            add = partial(model.engine.add, prompt, inputs.params, inputs.proposer, inputs.budget, decoding)
            jobs.append(Job(await self.in_thread(add), index * inputs.params.n, inbox))
        for job in jobs:
            thread.add(job)

    def check_capacity(self, samples: int, others: int = 0, param: str | None = None) -> None:
        """Refuse samples for which the queue has no place, with `others` that are about to be admitted. `param`: the
        field that sets their number."""
        limit = self.model.target.max_slots + self.settings.max_queue
        if samples > limit:
            raise ApiError(400, f"{param}: {samples} answers in one request, and the server takes {limit}", param)
        before = self._admitted + others
        if before + samples > limit:
            wait = max(1, min(60, round(self._recent * before / self.model.target.max_slots)))
            text = f"{before} samples are decoded or wait, and the limit is {limit}: try again in {wait} s"
            raise ApiError(429, text, code="queue_full", headers={"Retry-After": str(wait)})
