"""Requests as the engine makes them."""

from collections.abc import Sequence
from typing import Any, NoReturn

from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Stream


def draft_request(ids: Sequence[int], budget: int, max_depth: int, seed: int = 0, **params: Any) -> DraftRequest:
    return DraftRequest(Stream(SamplingParams(**params), seed, 0, ids, len(ids)), budget, max_depth)


def no_draft_model() -> NoReturn:
    raise AssertionError("this method needs no draft model")
