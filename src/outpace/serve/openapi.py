"""The OpenAPI file: bodies are checked by this package, so that it describes them itself."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from outpace.serve.chat_request import ChatRequest
from outpace.serve.completion_request import CompletionRequest
from outpace.serve.errors import ErrorAnswer

REFERENCE = "#/components/schemas/{model}"
ERRORS = {
    400: "a field cannot be honoured",
    401: "no valid API key",
    403: "a page of another site, or a name that is not this server's",
    404: "no such model",
    408: "the body did not come in time",
    413: "the body is too large",
    429: "the queue is full",
    500: "the engine failed",
    503: "loading, or shutting down",
    504: "it took too long",
}


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """The part of an endpoint's description that says what its body is."""
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model=kind.__name__)}}}
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    answers = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": event}}
    said = {"200": {"description": "the answer; a stream of events with stream=true", "content": answers}}
    return {"requestBody": {"required": True, "content": content}, "responses": said}


def describe(app: FastAPI) -> None:
    """Make the app's OpenAPI file tell of bodies and errors."""

    def made() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            kinds = [(kind, "validation") for kind in (ChatRequest, CompletionRequest, ErrorAnswer)]
            _, definitions = models_json_schema(kinds, ref_template=REFERENCE)  # type: ignore[arg-type]
            schema["components"] = {"schemas": definitions["$defs"]}
            error = {"application/json": {"schema": {"$ref": REFERENCE.format(model="ErrorAnswer")}}}
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    if path.startswith("/v1/"):
                        operation["responses"] |= {
                            str(status): {"description": said, "content": error} for status, said in ERRORS.items()
                        }
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = made  # type: ignore[method-assign]
