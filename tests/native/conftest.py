"""Scripts and compiled libraries that the tests of this folder share."""

from pathlib import Path

import pytest

from tests.native.cases import PARTS
from tests.native.script import Script


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A script for each part of the kernels."""
    folder, paths = tmp_path_factory.mktemp("scripts"), []
    for name, add in PARTS.items():
        add(script := Script())
        script.write(path := folder / name)
        paths.append(path)
    return paths


@pytest.fixture(scope="session")
def folder(pytestconfig: pytest.Config) -> Path:
    """Where libraries are kept between runs: one takes half a minute."""
    return pytestconfig.cache.mkdir("native")  # type: ignore[union-attr]  # the plugin is part of pytest
