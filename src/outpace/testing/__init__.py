"""Tools to test a method or a shape: a toy target, exact sources and drafters, and the lossless assertion."""

from outpace.testing.drafters import AdversaryDrafter, OracleDrafter
from outpace.testing.lossless import assert_lossless, decode
from outpace.testing.sources import ToySource, blend
from outpace.testing.toy import ToyTarget, draft_request, toy_context

__all__ = [
    "AdversaryDrafter",
    "OracleDrafter",
    "ToySource",
    "ToyTarget",
    "assert_lossless",
    "blend",
    "decode",
    "draft_request",
    "toy_context",
]
