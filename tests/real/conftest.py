"""The real model, loaded once for all of these tests that a process runs."""

from pathlib import Path

import pytest

import outpace
from outpace.models.loading.pull import pull


@pytest.fixture(scope="session", autouse=True)
def pulled() -> Path:
    """The model's folder."""
    return pull("smollm2-135m")


@pytest.fixture(scope="session")
def loaded() -> outpace.Model:
    return outpace.load("smollm2-135m", dtype="float32", device="cpu")


@pytest.fixture
def exact(loaded: outpace.Model) -> outpace.Model:
    """In float32, with nothing that another test's requests taught or left in a cache, and with a prefix cache, which
    certificates turn off."""
    loaded.reset()
    loaded.engine.shares_prefixes = True
    return loaded
