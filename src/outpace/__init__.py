"""Outpace: language models generate faster without changing a token of what they would have said."""

from typing import TYPE_CHECKING, Any

from outpace.core.events import Generation, RequestMetrics, RoundTrace, Sample, StepEvent, TokenLogprob
from outpace.core.params import Grammar, SamplingParams
from outpace.lib.errors import (
    InvalidRequest,
    MethodError,
    ModelError,
    NonFiniteLogits,
    OutpaceError,
    PerformanceWarning,
    StateLost,
    UnsupportedModel,
)
from outpace.lib.quick import without_collection
from outpace.lib.threads import wait_asleep

if TYPE_CHECKING:
    from outpace.api import Model, load
    from outpace.chat import Chat
    from outpace.engine.stream import TokenStream
    from outpace.methods.catalog import method
    from outpace.plugins.transformers import custom_generate

wait_asleep()  # before torch is loaded, by whatever of this package is used

__version__: str

__all__ = [
    "Chat",
    "Generation",
    "Grammar",
    "InvalidRequest",
    "MethodError",
    "Model",
    "ModelError",
    "NonFiniteLogits",
    "OutpaceError",
    "PerformanceWarning",
    "RequestMetrics",
    "RoundTrace",
    "Sample",
    "SamplingParams",
    "StateLost",
    "StepEvent",
    "TokenLogprob",
    "TokenStream",
    "UnsupportedModel",
    "custom_generate",
    "load",
    "method",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the front door imports torch, which takes seconds.
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("outpace")
        except PackageNotFoundError:  # only on the path
            return "0+unknown"
    if name in ("Chat", "Model", "TokenStream", "load"):
        with without_collection():
            from outpace import api

        return getattr(api, name)
    if name == "method":
        from outpace.methods.catalog import method

        return method
    if name == "custom_generate":
        from outpace.plugins.transformers import custom_generate

        return custom_generate
    raise AttributeError(f"module 'outpace' has no attribute {name!r}")
