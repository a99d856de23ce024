"""What a server says of itself: its models, and whether it is one of ours."""

from dataclasses import dataclass
from typing import Any

import httpx

from outpace.endpoint.client import Endpoint
from outpace.lib.errors import InvalidRequest, ModelError


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        model: the name to ask for.
        default_method: what our server does where a request names no method; None for servers of others, which take
            no methods.
        facts: for records: what it says of its model and version.
    """

    model: str
    default_method: str | None
    facts: dict[str, Any]

    @property
    def is_outpace(self) -> bool:
        """Whether it takes outpace's extension."""
        return self.default_method is not None


def find_server(endpoint: Endpoint, model: str | None = None) -> Server:
    """Look at a server.

    Args:
        endpoint: where it is.
        model: the name to ask for; by default the only one that it has.

    Raises:
        InvalidRequest: no name was given, and it has several.
        ModelError: no OpenAI-compatible server is there, or it refuses the key.
    """
    models = _models(endpoint)
    default = _json(endpoint.probe("outpace/methods")).get("default")
    facts = _json(endpoint.probe("outpace/info") if default else endpoint.probe("version", at_root=True))
    model = model or (facts.get("model") if default else None)  # one of ours has one model, which may have many names
    if model is None and len(models) != 1:
        raise InvalidRequest(f"model: the server has {', '.join(models) or 'none'}; name one with --model")
    return Server(model or models[0], default, facts)


def _models(endpoint: Endpoint) -> list[str]:
    response = endpoint.get("models")
    found = _json(response).get("data")
    try:
        if not isinstance(found, list):
            raise TypeError("no list of models")
        return [str(one["id"]) for one in found]
    except (KeyError, TypeError) as error:
        raise ModelError(
            f"endpoint={endpoint.url!r}: no OpenAI-compatible server, its /models says {response.text[:200]!r}; give "
            "the base of the API, as http://host:8000/v1"
        ) from error


def _json(response: httpx.Response | None) -> dict[str, Any]:
    """The object that a response holds, empty where there is none."""
    try:
        found = {} if response is None else response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
