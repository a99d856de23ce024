"""The endpoints."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from outpace import __version__
from outpace.methods.catalog import methods
from outpace.serve.answers import ClientGone, answer
from outpace.serve.chat_request import ChatRequest
from outpace.serve.completion_request import CompletionRequest
from outpace.serve.deadline import Deadline
from outpace.serve.errors import ApiError
from outpace.serve.forms import ChatForm, CompletionForm
from outpace.serve.openapi import describe, takes
from outpace.serve.playground import add_playground
from outpace.serve.prepare import prepared
from outpace.serve.service import Service
from outpace.serve.shield import Shield


def create_app(service: Service) -> FastAPI:
    """The HTTP side of a service. The caller opens and closes the service."""
    app = FastAPI(title="Outpace", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_answers(app, service)
    _add_facts(app, service)
    _add_signs_of_life(app, service)
    _add_errors(app, service)
    add_playground(app)
    describe(app)
    app.add_middleware(Shield, settings=service.settings, log=service.log)
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """An answer to a conversation."""
        service.check_room(1)  # before anything is read, encoded or compiled for it
        deadline = Deadline(service.settings.timeout)
        data = await request.body()
        with service.reading():
            async with deadline.kept():
                body, order = await prepared(service, ChatRequest, data)
        _note(request, service, body, order)
        form = ChatForm(service.pieces, body.ranked is not None, body.may_call)
        return await answer(request, service, body, order, form, deadline)

    @app.post("/v1/completions", openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        """What follows a text."""
        service.check_room(1)
        deadline = Deadline(service.settings.timeout)
        data = await request.body()
        with service.reading():
            async with deadline.kept():
                body, order = await prepared(service, CompletionRequest, data)
        _note(request, service, body, order)
        form = CompletionForm(service.pieces, body.ranked is not None)
        return await answer(request, service, body, order, form, deadline)


def _note(request: Request, service: Service, body: Any, order: Any) -> None:
    """What the log tells of a request."""
    told = request.scope["state"]["told"]
    told |= {"decoded_by": order.method, "prompt_tokens": sum(map(len, order.prompts)), "stream": bool(body.stream)}
    if service.settings.log_prompts:
        told["body"] = body.model_dump(exclude_unset=True)


def _add_facts(app: FastAPI, service: Service) -> None:
    def described(name: str) -> dict[str, Any]:
        most = service.model.target.max_length
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "outpace",
            "root": service.model.name,
            "max_model_len": most,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models, which is one, by all its names."""
        return {"object": "list", "data": [described(name) for name in service.settings.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        if name not in service.settings.names:
            known = ", ".join(service.settings.names)
            raise ApiError(404, f"model={name[:200]!r}: this server has {known}", "model", code="model_not_found")
        return described(name)

    @app.get("/v1/outpace/methods")
    async def all_methods() -> dict[str, Any]:
        """What requests may name as their method."""
        _ = service.model
        rows = [{"name": name, "summary": method.summary, "needs": method.needs} for name, method in methods().items()]
        return {"default": service.methods.default, "methods": rows}

    @app.get("/v1/outpace/info")
    async def info() -> dict[str, Any]:
        """What runs here."""
        model = service.model
        return {
            "version": __version__,
            "model": service.settings.names[0],
            "drafter": model.drafter,
            "method": service.methods.default,
            "exactness": {"kind": model.exactness.kind, "reason": model.exactness.reason},
            "max_model_len": model.target.max_length,
            "max_num_seqs": model.target.max_slots,
        }


def _add_signs_of_life(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:
        """200 while the server lives."""
        return PlainTextResponse(
            "ok" if service.is_healthy else "the engine has stopped", 200 if service.is_healthy else 503
        )

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
        # Messages of 4xx repeat what was sent, of which the log must not tell.
        said = error.body.message if error.status >= 500 or service.settings.log_prompts else error.body.code
        request.scope["state"]["told"] |= {"error": said, "param": error.body.param}
        return JSONResponse(error.as_dict(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        made = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(made.as_dict(), made.status, error.headers)

    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: Exception) -> Response:
        request.scope["state"]["told"] |= {"error": "the client went away"}
        return Response(status_code=499)  # nginx's; nobody reads it, and the log tells
