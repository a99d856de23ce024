"""The playground: a page at `/` that needs nothing but this server."""

from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = str(files("outpace.serve") / "playground")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""No script, style or connection but the server's own, and no script or style within a page."""


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
