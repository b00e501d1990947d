"""The application: FastAPI with its errors in OpenAI's form, behind the gate."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from shoal import __version__
from shoal.errors import ShoalError
from shoal.server import errors, routes_openai, routes_operation, routes_other, routes_tokens
from shoal.server.events import ClientLeft
from shoal.server.gate import Gate
from shoal.server.generation import Service

_STATUSES = {
    400: "refused; the parameter is named",
    401: "no valid key",
    403: "not by this name of the server",
    404: "no such model or route",
    408: "the request did not come in time",
    413: "the body is too long",
    415: "the body is not application/json",
    429: "too many requests wait",
    500: "the engine or the server failed",
    503: "shutting down, or waited too long",
}


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the log, by nginx's word for it: there is nobody to read it


def make_app(service: Service) -> ASGIApp:
    app = FastAPI(
        title="shoal",
        version=__version__,
        docs_url=None,  # its page would fetch scripts from elsewhere; the document itself is at /openapi.json
        redoc_url=None,
        responses={status: {"description": text, "model": errors.ErrorBody} for status, text in _STATUSES.items()},
    )
    app.state.service = service
    for module in (routes_openai, routes_other, routes_tokens, routes_operation):
        app.include_router(module.router)
    for kind in (HTTPException, RequestValidationError, ShoalError, Exception):
        app.add_exception_handler(kind, errors.handle)
    app.add_exception_handler(ClientLeft, _nobody)
    return Gate(app, service)
