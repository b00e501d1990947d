"""Errors as clients of the OpenAI API expect them; the only place where one gets its HTTP status."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shoal.errors import InvalidArgument, OutOfMemory, ShoalError, Unsupported, printable

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


class ApiError(HTTPException):
    """An answer other than the one asked for. `param` names what is wrong in the request."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message = message
        self.param = param
        self.code = code
        self.cause: BaseException | None = None  # of a fault

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status_code, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The same with what Anthropic's clients look for."""
        error = self.body()["error"]
        kind = "api_error" if error["type"] == "server_error" else error["type"]
        return {"type": "error", "error": {**error, "type": kind}}


def bad(param: str, message: str, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param, code)


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param, "unsupported")


def busy(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, None, code, {"retry-after": "1"})


# A sentence about a parameter begins with its name: "top_p is 2, expected …"; the engine puts "sampling: " before it.
_NAMED = re.compile(r"(?:sampling: )?([a-z_]+) (?:is|names|of) ")


def from_exception(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, RequestValidationError):
        return _from_validation(error.errors())
    if isinstance(error, ShoalError):
        named = _NAMED.match(str(error))
        param = named.group(1) if named else None
        if isinstance(error, (InvalidArgument, Unsupported)):
            return ApiError(400, str(error), param, error.code)
        if isinstance(error, OutOfMemory):
            return busy(503, str(error), error.code)
        return _fault(str(error), error.code, error)
    return _fault("the server failed; its log says how", "internal", error)


def _fault(message: str, code: str, cause: BaseException) -> ApiError:
    error = ApiError(500, message, None, code)
    error.cause = cause
    return error


def report_fault(error: BaseException) -> None:
    """Says on stderr where a fault of ours is. Its message is left out, as it may quote a prompt."""
    if not isinstance(error, (HTTPException, RequestValidationError, ShoalError)):
        frames = "".join(traceback.format_tb(error.__traceback__))
        print(f"shoal: {type(error).__name__} in\n{frames}", file=sys.stderr, flush=True)


# Of pydantic's places those words that are not its own names for branches of a union.
_FIELD = re.compile(r"(?!(?:str|int|float|bool|dict|list|none|nullable|any)$)[A-Za-z_][\w.-]*(?<!])")


def _from_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    # Of a union every branch complains; the one that got furthest is the one that was meant.
    own = [p for p in problems if p["loc"][:2] == problems[0]["loc"][:2]]
    first = max(own, key=lambda p: len(p["loc"]))
    place = [part for part in first["loc"] if part not in ("body", "query", "path")]
    param = ""
    for part in place:
        if isinstance(part, int):
            param += f"[{part}]"
        elif _FIELD.fullmatch(part) and not part[0].isupper() and "-" not in part:
            param += f".{part}" if param else part
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is no parameter that this route knows", param, "unknown_parameter")
    if first["type"] == "missing" and not param:
        return ApiError(400, "the request has no body, expected a JSON object", None, "invalid_json")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param, "missing_required_parameter")
    value = first.get("input")
    shown = f" (it is {printable(repr(value))})" if isinstance(value, (str, int, float)) else ""
    return ApiError(
        400, f"{param or 'the body'}: {message[:1].lower()}{message[1:]}{shown}", param or None, "invalid_value"
    )


def to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def response(error: ApiError, scope: Mapping[str, Any]) -> Response:
    scope["shoal"].failure = error
    body = error.anthropic_body() if scope["path"].startswith("/v1/messages") else error.body()
    return Response(to_json(body), error.status_code, error.headers, media_type="application/json")


async def handle(request: Request, error: Exception) -> Response:
    """For FastAPI's exception handlers."""
    return response(from_exception(error), request.scope)


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """For the OpenAPI document."""

    error: ErrorDetail
