"""A server's models and counters, request fields, and conversations with it."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Self

import httpx

from outpace.core.params import SamplingParams
from outpace.core.settings import default_of
from outpace.endpoint.client import AnswerStream, Endpoint
from outpace.lib.errors import InvalidRequest, ModelError


@dataclass(frozen=True)
class Server:
    """A server that was found.

    Attributes:
        default_method: the default of an outpace server; None for other servers, which take no methods.
    """

    model: str
    default_method: str | None
    facts: dict[str, Any]

    @property
    def is_outpace(self) -> bool:
        """Whether it takes outpace's extension."""
        return self.default_method is not None


def find_server(endpoint: Endpoint, model: str | None = None) -> Server:
    """The server at an endpoint; `model` is the name to request, by default its only one.

    Raises:
        InvalidRequest: no name was given, and the server has several models.
        ModelError: no OpenAI-compatible server is there, or it refuses the key.
    """
    response = endpoint.get("models")
    try:
        models = [str(one["id"]) for one in _json(response)["data"]]
    except (KeyError, TypeError) as error:
        raise ModelError(
            f"endpoint={endpoint.url!r}: no OpenAI-compatible server, its /models is {response.text[:200]!r}; give "
            "the base of the API, as http://host:8000/v1"
        ) from error
    default = _json(endpoint.probe("outpace/methods")).get("default")
    facts = _json(endpoint.probe("outpace/info") if default else endpoint.probe("version", at_root=True))
    model = model or (facts.get("model") if default else None)  # an outpace server has one model of many names
    if model is None and len(models) != 1:
        raise InvalidRequest(f"model: the server has {', '.join(models) or 'none'}; name the one to ask")
    return Server(model or models[0], default, facts)


def _json(response: httpx.Response | None) -> dict[str, Any]:
    """The JSON object in a response, empty without one."""
    try:
        found = {} if response is None else response.json()
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


DRAFTS, DRAFTED, ACCEPTED, BY_POSITION = (
    f"vllm:spec_decode_num_{what}_total"
    for what in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)


@dataclass(frozen=True)
class SpeculationCounts:
    """Counters of a server, for all its requests since it started, or their growth. `drafts`: steps of requests that
    verified drafts; 0 where they are not counted."""

    drafted: int
    accepted: int
    accepted_per_depth: tuple[int, ...]
    drafts: int = 0

    def __sub__(self, before: Self) -> "SpeculationCounts":
        pairs = zip_longest(self.accepted_per_depth, before.accepted_per_depth, fillvalue=0)
        depths = tuple(now - then for now, then in pairs)
        drafted, accepted = self.drafted - before.drafted, self.accepted - before.accepted
        return SpeculationCounts(drafted, accepted, depths, self.drafts - before.drafts)


def read_counts(text: str) -> SpeculationCounts | None:
    """The counters in a page of metrics, in Prometheus's text format; None if speculation is not counted, or it is no
    page of metrics: LM Studio answers every path with status 200."""
    from prometheus_client.parser import text_string_to_metric_families

    totals, depths = Counter[str](), Counter[int]()
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in (DRAFTS, DRAFTED, ACCEPTED):
                    totals[sample.name] += int(sample.value)
                elif sample.name == BY_POSITION:
                    depths[int(sample.labels["position"])] += int(sample.value)
    except (ValueError, KeyError, OverflowError):  # the last of an infinite count
        return None
    per_depth = tuple(depths[depth] for depth in range(max(depths, default=-1) + 1))
    return SpeculationCounts(totals[DRAFTED], totals[ACCEPTED], per_depth, totals[DRAFTS]) if totals else None


def speculation_counts(endpoint: Endpoint) -> SpeculationCounts | None:
    """A server's current counters; None if it has no metrics, or does not count speculation."""
    response = endpoint.probe("metrics", at_root=True)
    return None if response is None else read_counts(response.text)


OPTIONAL = (
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "repetition_penalty",
    "penalty_window",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)
"""Fields that are sent only if they were stated or differ from their defaults: some servers refuse unknown fields."""


UNCHANGED: dict[str, Any] = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Fields that change nothing. Where a request lacks them, vLLM and SGLang take a model's generation_config.json, and
llama-server defaults of its own."""


def sampling_fields(params: SamplingParams, stated: Collection[str] = ()) -> dict[str, Any]:
    """Sampling parameters as fields of a request's body. `stated`: names of those that the user gave, which a server
    with other defaults must get even if they are ours, in the form that changes nothing there."""
    sent: dict[str, Any] = {}
    for name in OPTIONAL:
        if (value := getattr(params, name)) != default_of(SamplingParams, name):
            sent[name] = value
        elif name in stated:
            sent[name] = UNCHANGED.get(name, value)
    return {"max_tokens": params.max_new_tokens, "temperature": params.temperature} | sent


def speculation_fields(method: str | None, budget: int | None = None) -> dict[str, Any]:
    """The field "outpace" of a request: method and budget, if given, and a request for a report."""
    chosen = {"method": method, "budget": budget, "report": True}
    return {"outpace": {name: value for name, value in chosen.items() if value is not None}}


class RemoteChat:
    """A conversation with a server, as `outpace.Chat` with a local model.

    Args:
        fields: of all requests, from `sampling_fields` and, for outpace servers, `speculation_fields`.
        system: a message that opens the conversation.

    Attributes:
        messages: the conversation so far, the system message included.
    """

    def __init__(
        self, endpoint: Endpoint, server: Server, fields: Mapping[str, Any], system: str | None = None
    ) -> None:
        self._endpoint, self._fields = endpoint, {**fields, "model": server.model}
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    @contextmanager
    def send(self, text: str) -> Iterator[AnswerStream]:
        """Send a message and stream the answer. Leaving the block early cancels the answer; its text so far is kept.

        Raises:
            InvalidRequest, ModelError: as `Endpoint.stream`; the conversation is unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        with self._endpoint.stream("chat/completions", self._fields | {"messages": messages}) as stream:
            yield stream
        # Without thoughts: templates leave earlier ones out, and could not tell these from the answer.
        self.messages = [*messages, {"role": "assistant", "content": stream.answer}]

    def reset(self) -> None:
        """Forget the conversation except the system message."""
        self.messages = list(self._opening)
