"""The OpenAPI file against the server: generated requests, valid and not, by schemathesis."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from outpace.serve.app import create_app
from outpace.serve.service import Service
from outpace.serve.settings import ServeSettings
from tests.unit.serve.served import NAME, Lines, Served, serving, tiny_model


def described() -> Any:
    """The OpenAPI file without a model. Models are named right, or all were unknown."""
    schema = create_app(Service(ServeSettings((NAME,)), Lines())).openapi()
    for kind in ("ChatRequest", "CompletionRequest"):
        fields = schema["components"]["schemas"][kind]["properties"]
        fields["model"]["enum"] = [NAME]
    return schema


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose answers end soon, and are few at a time."""
    model = tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=40)
    with serving(model, max_queue=0) as one:
        yield one


schema = schemathesis.openapi.from_dict(described())


@schema.parametrize()
@settings(max_examples=8, deadline=None, derandomize=True, database=None,
          suppress_health_check=list(HealthCheck))  # fmt: skip
def test_generated_requests(case: Any, short: Served) -> None:
    """Guards against a 500, and answers that the OpenAPI file does not tell of, whatever the body is."""
    case.call_and_validate(base_url=short.url, timeout=120, excluded_checks=[positive_data_acceptance])
