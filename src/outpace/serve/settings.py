"""How the server is run."""

import socket
from dataclasses import dataclass

from outpace.core.settings import check_fields, documented, setting
from outpace.lib.checks import check_api_key, shown
from outpace.lib.errors import InvalidRequest

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@documented
@dataclass(frozen=True)
class ServeSettings:
    """Limits of the server, and where it listens.

    Raises:
        InvalidRequest: a number out of bounds, an empty name or key, or an unknown host.
    """

    names: tuple[str, ...] = setting(
        (), "Name of the model in requests; answers report the first one.", unit="NAME", flag="--served-model-name"
    )
    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all.", unit="ADDRESS")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", unit="PORT", low=0, high=65535)
    api_keys: tuple[str, ...] = setting(
        (), "API key that requests must send; by default none is needed.", unit="KEY", variable="OUTPACE_API_KEY"
    )
    max_queue: int = setting(64, "Answers that may wait; more get status 429.", unit="REQUESTS", low=0)
    timeout: float = setting(
        600.0, "Seconds that a request may take, waiting and its prompt included.", unit="SECONDS", low=0.1
    )
    send_timeout: float = setting(
        60.0, "Seconds after which a client that does not read or write is disconnected.", unit="SECONDS", low=0.1
    )
    max_body: int = setting(4 << 20, "Largest body of a request.", unit="BYTES", low=1)
    drain_timeout: float = setting(30.0, "Seconds that requests have to end after SIGTERM.", unit="SECONDS", low=0.0)
    log_prompts: bool = setting(False, "Log the bodies of requests.")

    def __post_init__(self) -> None:
        check_fields(self)
        if any(not name.strip() for name in self.names):
            raise InvalidRequest("served_model_name='': no client asks for an empty name; leave the option out instead")
        if any(not key.strip() for key in self.api_keys):
            raise InvalidRequest("api_key='': an empty key would admit everybody; leave the option out instead")
        for key in self.api_keys:
            check_api_key(key)
        try:  # resolved before a model is loaded
            socket.getaddrinfo(self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise InvalidRequest(
                f"host={shown(self.host)}: {error}; give an address of this machine, or 0.0.0.0 for all"
            ) from error
