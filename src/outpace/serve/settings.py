"""How the server is run."""

import socket
from dataclasses import dataclass

from outpace.lib.checks import shown
from outpace.lib.errors import InvalidRequest

MEGABYTE = 1 << 20
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServeSettings:
    """Limits and habits of the server.

    Attributes:
        names: by which requests may call the model; answers say the first.
        host, port: where it listens.
        api_keys: one of which every request to /v1 must bear; none asks for none.
        max_queue: samples that may wait beside those that are decoded; more are answered by 429.
        timeout: seconds that a request may take, waiting included.
        send_timeout: seconds that a client may leave a piece of its answer unread.
        max_body: bytes of a request.
        max_methods: different methods that requests may name while the server runs; each is kept with its state.
        drain_timeout: seconds that running requests have to end after SIGTERM.
        log_prompts: whether requests' bodies are logged.

    Raises:
        InvalidRequest: a host that nobody knows.
    """

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_queue: int = 64
    timeout: float = 600.0
    send_timeout: float = 60.0
    max_body: int = 4 * MEGABYTE
    max_methods: int = 16
    drain_timeout: float = 30.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        try:  # before a model is loaded
            socket.getaddrinfo(self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise InvalidRequest(
                f"host={shown(self.host)}: {error}; give an address of this machine, or 0.0.0.0 for all"
            ) from error
