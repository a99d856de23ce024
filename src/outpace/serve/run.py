"""The server's process: loads, listens, drains."""

import asyncio
import errno
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from math import ceil
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from outpace.api import Model
from outpace.lib.checks import shown
from outpace.lib.errors import InvalidRequest
from outpace.lib.stages import end_loads_if
from outpace.serve.app import create_app
from outpace.serve.service import Service
from outpace.serve.settings import ServeSettings

MOST_CONNECTIONS = 1000
"""Above this number of connections, idle ones are dropped."""


def _waits(connection: Any) -> bool:
    """Whether a connection is being closed, or has no request that is being answered."""
    cycle = connection.cycle
    return bool(connection.transport.is_closing() or cycle is None or cycle.response_complete)


class LogStream:
    """Where the log is written. Lines are lost where its pipe was closed or its disk is full: its callers, such as
    the engine's thread and the drain, continue."""

    def __init__(self) -> None:
        self._file = sys.stderr

    def info(self, line: str) -> None:
        """Write a line."""
        with suppress(OSError):
            print(f"{line}\n", end="", file=self._file, flush=True)

    error = info


def new_log() -> Any:
    """A logger that writes a JSON object a line to standard error."""
    return structlog.wrap_logger(
        LogStream(),
        processors=[
            structlog.processors.TimeStamper("iso", utc=True),
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
    )


def serve(load: Callable[[], Model], settings: ServeSettings) -> None:
    """Listen, load, answer until a signal, drain. `load`: loads the model in a thread, while /health already
    answers."""
    _check_address(settings)
    service = Service(settings, new_log())
    DrainingServer(service, load).run()
    if service.load_error is not None:
        raise service.load_error


def _check_address(settings: ServeSettings) -> None:
    """Before loading a model, refuse a port that another program uses, and a host that is not this machine."""
    faults = []
    found = socket.getaddrinfo(settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in found:
        try:
            socket.create_server(address, family=family).close()
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                # Without the address that Python adds. `os.strerror` knows no errors of sockets on Windows.
                reason = str(error.strerror).partition(" (")[0]
                raise InvalidRequest(
                    f"port={settings.port}: {reason}; choose another, or stop the program using it"
                ) from error
            faults.append(error)  # IPv4 or IPv6 may be turned off
    if len(faults) == len(found):
        raise InvalidRequest(
            f"host={shown(settings.host)}: {faults[0].strerror}; give an address of this machine, or 0.0.0.0 for all"
        ) from faults[0]


class DrainingServer(uvicorn.Server):
    """uvicorn that drains: at the first SIGTERM or Ctrl-C it finishes running requests, refuses new ones with 503, and
    ends when none are left or the time is up. At the second it ends at once."""

    def __init__(self, service: Service, load: Callable[[], Model]) -> None:
        settings = service.settings
        self._service, self._load = service, load
        app = create_app(service)
        app.router.lifespan_context = self._lifespan
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                # uvicorn's default is 5 seconds, as long as httpx keeps a connection: a request could arrive as it is
                # closed.
                timeout_keep_alive=ceil(settings.send_timeout),
                log_level="warning",
                access_log=False,
                ws="none",  # there are no websockets, and `on_tick` handles only HTTP connections
                lifespan="on",
                timeout_graceful_shutdown=5,
                server_header=False,
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        # Transports that are closing or wait for a request: since when, and the bytes that the client has not read. The
        # last request is part of the key: a client that constantly sends short ones may be waiting at every tick.
        self._idle: dict[tuple[Any, Any], tuple[float, int]] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the address: with port=0 the system chooses the port."""
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        self._service.log.info("listening", url=f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """At every tenth tick, drop connections that are closing but whose clients stopped reading, those whose clients
        send nothing or never finish a request's head, and, if there are too many, those idle for longest."""
        if counter % 10 == 0:
            now, idle = asyncio.get_running_loop().time(), self._idle
            open_ones = [one for one in self.server_state.connections if getattr(one, "transport", None) is not None]
            self._idle = {}
            for key in ((one.transport, getattr(one, "cycle", None)) for one in open_ones if _waits(one)):
                left = key[0].get_write_buffer_size()
                since, before = idle.get(key, (now, left))
                self._idle[key] = (now if left < before else since, left)
            many = len(open_ones) - MOST_CONNECTIONS
            for number, ((transport, _), (since, _)) in enumerate(sorted(self._idle.items(), key=lambda item: item[1])):
                if number < many or now - since > self._service.settings.send_timeout:
                    transport.abort()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.is_draining or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        self._service.is_draining = True
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop)

    async def _drain(self) -> None:
        service = self._service
        service.log.info("draining")
        until = asyncio.get_running_loop().time() + service.settings.drain_timeout
        while not service.is_idle and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)
        service.cancel_all()
        self.should_exit = True

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        opening = asyncio.ensure_future(self._open())
        yield
        opening.cancel()  # otherwise the service would be opened once the model is loaded
        await asyncio.to_thread(self._service.close)
        self._service.log.info("ended")

    async def _open(self) -> None:
        service = self._service
        service.log.info("loading", model=service.settings.names[0])
        end_loads_if(lambda: service.is_draining)
        try:
            model = await asyncio.to_thread(self._load)
            service.open(model)
        except KeyboardInterrupt:  # from the load's thread, which was ended
            return
        except Exception as error:
            service.load_error = error
            self.should_exit = True
        else:
            service.log.info("ready", method=model.method_name)
