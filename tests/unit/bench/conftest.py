"""A tiny target that several files load, each as it needs it."""

import pytest

from tests.unit.models.tiny import save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny"), eos_token_id=None, max_position_embeddings=2048))
