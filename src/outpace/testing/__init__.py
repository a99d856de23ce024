"""What the tests of a method or a shape need: a toy target, sources and drafters known exactly, the assertion."""

from outpace.testing.drafters import AdversaryDrafter, OracleDrafter
from outpace.testing.lossless import assert_lossless, decode
from outpace.testing.requests import draft_request, toy_context
from outpace.testing.sources import ToySource, blend
from outpace.testing.toy import ToyTarget

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
