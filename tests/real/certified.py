"""What a certificate of the real model must say on this machine."""

from typing import Any

from outpace.api import Model
from outpace.bench.certificate import count_kinds


def assert_certified(model: Model, cases: list[dict[str, Any]]) -> None:
    """No bugs, and ties only where the probe expects rounding."""
    kinds = count_kinds(cases)
    assert kinds["bugs"] == 0
    assert kinds["equal"] == len(cases) or not model.exactness.is_bitwise, model.exactness
