"""The endpoints, their OpenAPI description, and the playground."""

from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from outpace import __version__
from outpace.methods.catalog import methods
from outpace.serve.answers import ChatForm, ClientGone, CompletionForm, Deadline, answer
from outpace.serve.errors import ApiError, ErrorAnswer
from outpace.serve.middleware import Middleware
from outpace.serve.prepare import prepared
from outpace.serve.requests import ChatRequest, CompletionRequest
from outpace.serve.service import Service


def create_app(service: Service) -> FastAPI:
    """The HTTP side of a service. The caller opens and closes the service."""
    app = FastAPI(title="Outpace", version=__version__, docs_url=None, redoc_url=None)
    _add_answers(app, service)
    _add_facts(app, service)
    _add_probes(app, service)
    _add_errors(app, service)
    add_playground(app)
    describe(app)
    app.add_middleware(Middleware, settings=service.settings, log=service.log)
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    async def answered(request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
        service.check_capacity(1)  # before the request's body is read or encoded, or its grammar compiled
        deadline = Deadline(service.settings.timeout)
        data = await request.body()
        with service.holding_body():
            async with deadline.enforced():
                body, inputs = await prepared(service, kind, data)
        entry = request.scope["state"]["entry"]
        entry |= {"decoded_by": inputs.method, "prompt_tokens": sum(map(len, inputs.prompts))}
        entry["stream"] = bool(body.stream)
        if service.settings.log_prompts:
            entry["body"] = body.model_dump(exclude_unset=True, by_alias=True)
        has_logprobs = body.ranked is not None
        form = (
            ChatForm(service.pieces, has_logprobs, body.may_call)
            if isinstance(body, ChatRequest)
            else CompletionForm(service.pieces, has_logprobs)
        )
        return await answer(request, service, body, inputs, form, deadline)

    @app.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """An answer to a conversation."""
        return await answered(request, ChatRequest)

    @app.post("/v1/completions", openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        """The continuation of a text."""
        return await answered(request, CompletionRequest)


def _add_facts(app: FastAPI, service: Service) -> None:
    def described(name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": service.created, "owned_by": "outpace"}
        return about | {"root": service.model.name, "max_model_len": service.model.target.max_length}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model, by all its names."""
        return {"object": "list", "data": [described(name) for name in service.settings.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        service.check_name(name)
        return described(name)

    @app.get("/v1/outpace/methods")
    async def all_methods() -> dict[str, Any]:
        """What requests may name as their method."""
        default = service.model.method_name
        rows = [{"name": name, "summary": method.summary, "needs": method.needs} for name, method in methods().items()]
        return {"default": default, "methods": rows}

    @app.get("/v1/outpace/info")
    async def info() -> dict[str, Any]:
        """Version, model and method of this server."""
        model = service.model
        return {
            "version": __version__,
            "model": service.settings.names[0],
            "drafter": model.drafter,
            "method": model.method_name,
            "exactness": {"kind": model.exactness.kind, "reason": model.exactness.reason},
            "max_model_len": model.target.max_length,
            "max_num_seqs": model.target.max_slots,
        }


def _add_probes(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:
        """200 while the server lives."""
        is_healthy = service.is_healthy
        return PlainTextResponse("ok" if is_healthy else "the engine has stopped", 200 if is_healthy else 503)

    @app.get("/ready", response_class=PlainTextResponse)
    async def ready() -> Response:
        """200 while it takes requests: the model is loaded and the server is not shutting down."""
        return PlainTextResponse("ready" if service.is_ready else "not ready", 200 if service.is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        # Messages of 4xx quote the request, which must not be logged.
        text = error.body.message if error.status >= 500 or service.settings.log_prompts else error.body.code
        request.scope["state"]["entry"] |= {"error": text, "param": error.body.param}
        return JSONResponse(error.as_dict(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        made = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(made.as_dict(), made.status, error.headers)

    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: Exception) -> Response:
        request.scope["state"]["entry"] |= {"error": "the client went away"}
        return Response(status_code=499)  # nginx's, for the log


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
    """The part of an endpoint's description about its body and its answers."""
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model=kind.__name__)}}}
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    answers = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": event}}
    done = {"200": {"description": "the answer; a stream of events with stream=true", "content": answers}}
    return {"requestBody": {"required": True, "content": content}, "responses": done}


def describe(app: FastAPI) -> None:
    """Add bodies and errors to the app's OpenAPI description, since FastAPI does not parse the bodies."""

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
                            str(status): {"description": text, "content": error} for status, text in ERRORS.items()
                        }
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = made  # type: ignore[method-assign]


FOLDER = str(files("outpace.serve") / "playground")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Only the server's own scripts, styles and connections are allowed, and none within a page."""


class _Assets(StaticFiles):
    """The page's files with its headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def add_playground(app: FastAPI) -> None:
    """Serve the page at `/`, and what it loads below `/playground`."""

    async def page(request: Request) -> Response:
        return FileResponse(f"{FOLDER}/index.html", headers=HEADERS)

    app.add_route("/", page, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/playground", _Assets(directory=FOLDER), name="playground")
