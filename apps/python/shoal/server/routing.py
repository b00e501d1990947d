"""What all routes share: the service, and JSON that is bounded before it is believed.

Python's own reader of JSON takes NaN, and fails at a thousand levels of nesting.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from shoal.server.errors import ApiError
from shoal.server.generation import Service


async def _service(request: Request) -> Service:  # FastAPI would take a plain function to a thread
    return request.app.state.service


TheService = Annotated[Service, Depends(_service)]

STREAM_OR_JSON: dict[int | str, dict[str, Any]] = {
    200: {"description": "the answer, or with `stream` its chunks", "content": {"text/event-stream": {}}}
}


class JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = parse_json(await self.body(), self.app.state.service.options.max_json_depth)
        return self._json


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


def parse_json(body: bytes, max_depth: int) -> Any:
    try:
        value = from_json(body)  # strict UTF-8; nesting to 200
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON that can be read: {error}", None, "invalid_json") from None
    level = [value]
    for _ in range(max_depth):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return value
    raise ApiError(400, f"the body is nested deeper than {max_depth} levels", None, "invalid_json")


def _containers(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [v for v in values if isinstance(v, (dict, list))]
