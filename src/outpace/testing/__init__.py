"""Test doubles for people who build on Outpace: a toy target, drafters of known fate, the lossless assertion."""

from outpace.testing.drafters import AdversaryDrafter, OracleDrafter
from outpace.testing.lossless import assert_lossless, decode
from outpace.testing.toy import ToyTarget

__all__ = ["AdversaryDrafter", "OracleDrafter", "ToyTarget", "assert_lossless", "decode"]
