"""Requests and build contexts as the engine makes them, without a model."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Stream
from outpace.drafters.build_context import BuildContext


def draft_request(ids: Sequence[int], budget: int, max_depth: int, seed: int = 0, **params: Any) -> DraftRequest:
    """A request for a tree."""
    return DraftRequest(Stream(SamplingParams(**params), seed, 0, ids, len(ids)), budget, max_depth)


def toy_context(vocab_size: int) -> BuildContext:
    """The build context of a method without a model."""
    return BuildContext(vocab_size, torch.device("cpu"), no_draft_model)


def no_draft_model() -> NoReturn:
    """Takes the place of the loader of a draft model."""
    raise AssertionError("this method needs no draft model")
