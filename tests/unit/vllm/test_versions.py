"""Which vLLM is accepted, and how others are refused: without vLLM."""

import logging
import sys
from types import SimpleNamespace

import pytest

from outpace.vllm import register
from outpace.vllm.versions import refusal


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.1", "0.33.0rc2"])
def test_tested_versions_are_accepted(version: str) -> None:
    """Guards against a range that turns away what it was made for: local builds and release candidates."""
    assert refusal(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0", "dev"])
def test_other_versions_are_refused_with_a_remedy(version: str) -> None:
    """Guards against a plugin that goes on in a vLLM it was never tested with, and an error without a remedy."""
    reason = refusal(version)
    assert reason is not None
    assert version in reason
    assert "0.32" in reason
    assert "install" in reason


def test_an_untested_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against engines that do not start because this package is installed as well."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.40.0"))  # nothing can be imported from it
    with caplog.at_level(logging.ERROR):
        register()
    assert "outpace registers nothing: vLLM 0.40.0 is not among" in caplog.text
