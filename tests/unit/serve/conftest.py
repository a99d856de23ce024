"""One server for the tests that leave it as it is."""

from collections.abc import Iterator

import pytest

from tests.unit.serve.served import Served, serving, tiny_model


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tiny_model(tmp_path_factory.mktemp("tiny"))) as one:
        yield one
