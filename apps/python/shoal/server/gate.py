"""What every request passes before its route: who asks, how much comes in, and what is written about it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.server.errors import ApiError, busy, from_exception, report_fault, response
from shoal.server.events import ClientLeft
from shoal.server.request_log import RequestLog

if TYPE_CHECKING:
    from shoal.server.generation import Generation, Service

OPEN_ROUTES = frozenset(["/", "/health"])  # without a key: the page is a file, and says nothing of the model
QUESTIONS = frozenset(["/health", "/ready", "/metrics"])  # that the front of several replicas has for each
_SKIP_FACTOR, _SKIP_SECONDS = 4, 5.0  # what is read of a body that is too long, so that its sender reads the answer


@dataclass
class Visit:
    """One request, for its route and for the log."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    key: str | None = None
    status: int = 0
    was_read: bool = False  # the body, to its end
    closes: bool = False  # the connection, since it was not
    failure: ApiError | None = None  # what was answered, or ended a stream
    left: bool = False  # the client, before its answer's end
    prompts: Sequence[Sequence[int]] = ()  # token ids
    generation: Generation | None = None
    forwarded: bool = False  # to a replica, which answered and keeps the record


class Gate:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        folder = service.options.request_log
        self._request_log = None if folder is None else RequestLog(folder, service.llm)
        self._digests = [hashlib.sha256(key.encode()).digest() for key in service.options.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = Visit()
        scope["shoal"] = visit
        started = time.perf_counter()
        body = b""

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", visit.id.encode())]
                if visit.closes or self._service.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            headers = dict(scope["headers"])
            try:
                self._admit(scope, visit)
                body = await self._read(headers, receive, visit)
            except ApiError:
                # Who waits for leave to send reads the answer at once.
                visit.closes = not visit.was_read and (b"expect" in headers or not await self._skip(receive))
                raise
            await self._app(scope, _replayed(body, receive), watched)
        except ClientLeft:
            visit.status = visit.status or 499
            visit.left = True
        except Exception as error:
            visit.failure = from_exception(error)
            report_fault(error)
            if visit.status == 0:
                await response(visit.failure, scope)(scope, receive, watched)
        finally:
            if self._request_log is not None:
                self._request_log.failed(scope, visit, body)
            self._record(scope, visit, time.perf_counter() - started)

    # Who

    def _admit(self, scope: Scope, visit: Visit) -> None:
        if self._digests and scope["path"] not in OPEN_ROUTES:
            visit.key = self._key(scope["headers"])
        if not self._service.options.any_host and not _is_own_name(dict(scope["headers"]).get(b"host", b"")):
            # A page of any site can have its name point here, and would then be of the same origin.
            message = "without a key only this machine's own names are served: localhost, 127.0.0.1"
            raise ApiError(403, message, None, "unknown_host")
        if self._service.draining and scope["method"] == "POST":
            raise busy(503, "the server is shutting down", "draining")

    def _key(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        given = b""
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                given = value[7:].strip()
            elif name == b"x-api-key":
                given = value.strip()
        digest = hashlib.sha256(given).digest()
        # All keys are compared, in constant time, so that the time tells nothing of them.
        if not any([hmac.compare_digest(digest, known) for known in self._digests]):
            message = "a valid API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, None, "invalid_api_key", {"www-authenticate": "Bearer"})
        return given.decode("utf-8", "replace")

    # How much

    async def _read(self, headers: dict[bytes, bytes], receive: Receive, visit: Visit) -> bytes:
        """The body, whole and bounded."""
        options = self._service.options
        declared = headers.get(b"content-length", b"")
        too_long = ApiError(413, f"the body exceeds {options.max_body} bytes", None, "body_too_large")
        if declared.isdigit() and int(declared) > options.max_body:
            raise too_long
        body = bytearray()
        until = time.monotonic() + options.receive_timeout
        while not visit.was_read:
            try:
                message = await asyncio.wait_for(receive(), max(until - time.monotonic(), 0))
            except asyncio.TimeoutError:
                text = f"the body did not come within {options.receive_timeout:g} s"
                raise ApiError(408, text, None, "request_timeout") from None
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body += message.get("body", b"")
            visit.was_read = not message.get("more_body", False)
            if len(body) > options.max_body:
                raise too_long
        # Other types a browser sends to any address without asking first.
        if body and headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            raise ApiError(415, "the content-type must be application/json", None, "unsupported_media_type")
        return bytes(body)

    async def _skip(self, receive: Receive) -> bool:
        """Reads on for a while after a refusal, since who still sends does not read. Whether that was all."""
        size = 0
        until = time.monotonic() + min(_SKIP_SECONDS, self._service.options.receive_timeout)
        with contextlib.suppress(asyncio.TimeoutError):
            while size <= _SKIP_FACTOR * self._service.options.max_body:
                message = await asyncio.wait_for(receive(), max(until - time.monotonic(), 0))
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return True
        return False

    # What is written: never a word of a prompt or an answer

    def _record(self, scope: Scope, visit: Visit, seconds: float) -> None:
        of_front = scope.get("client") is None and scope["path"] in QUESTIONS  # asked all the time, by nobody outside
        if visit.forwarded or of_front:
            return
        route = getattr(scope.get("route"), "path", "other")
        self._service.metrics.responded(route, visit.status)
        if not self._service.options.access_log:
            return
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": visit.id,
            "client": (scope.get("client") or ("unix",))[0],
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": visit.status,
            "seconds": round(seconds, 4),
        }
        if visit.left or visit.failure is not None:
            line["error"] = "client left" if visit.failure is None else visit.failure.code
        if visit.generation is not None:
            usage = visit.generation.usage()
            line["prompt_tokens"] = usage["prompt_tokens"]
            line["completion_tokens"] = usage["completion_tokens"]
            line["finish"] = sorted({c.finish_reason for c in visit.generation.completions.values()})
        print(json.dumps(line), file=sys.stderr, flush=True)


def _replayed(body: bytes, receive: Receive) -> Receive:
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        return next(messages, None) or await receive()

    return replay


def _is_own_name(host: bytes) -> bool:
    name = host.decode("latin-1").lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return name in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", name) is not None
