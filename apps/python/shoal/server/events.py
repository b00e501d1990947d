"""Answers that are sent while they come into being: server-sent events, to a client that may leave or stall.

A client that leaves is noticed by what it sends last, also while there is nothing to send to it. One that stays but
does not read is waited for as long as the buffers hold (sending then blocks), and lost after `stall_timeout`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shoal.server.errors import ApiError, from_exception, report_fault, response, to_json

T = TypeVar("T")


class ClientLeft(Exception):
    """Nobody listens any more."""


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_listened(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result, or ClientLeft as soon as the client is gone; the work is cancelled then."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_until_left(request.receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for each in (task, left):
            each.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


def event(value: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return event(error.body())


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends what `events` gives. Until the first event, or the first silence of `keep_alive` seconds, a failure is an
    answer with its status; afterwards it is an event of the stream."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        keep_alive: float,
        stall_timeout: float,
        comment: Callable[[], str],
        on_error: Callable[[ApiError], bytes],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(None, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive = keep_alive
        self._stall_timeout = stall_timeout
        self._comment = comment
        self._on_error = on_error
        self._on_end = on_end
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_listened(Request(scope, receive), self._run(scope, receive, send))
        except ClientLeft:
            pass
        finally:
            self._on_end()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        pending: asyncio.Future[bytes] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(self._events))
                await asyncio.wait((pending,), timeout=self._keep_alive)
                if not pending.done():
                    await self._send(send, f": {self._comment()}\n\n".encode())
                    continue
                done, pending = pending, None
                try:
                    data = done.result()
                except StopAsyncIteration:
                    break
                except Exception as error:
                    failure = from_exception(error)
                    report_fault(error)
                    scope["shoal"].failure = failure
                    if not self._started:
                        await response(failure, scope)(scope, receive, send)
                        return
                    data = self._on_error(failure)
                    await self._send(send, data)
                    break
                await self._send(send, data)
            await self._bounded(send({"type": "http.response.body", "body": b"", "more_body": False}))
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
            await self._events.aclose()

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True
            start: Message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await self._bounded(send(start))
        await self._bounded(send({"type": "http.response.body", "body": data, "more_body": True}))

    async def _bounded(self, sending: Awaitable[None]) -> None:
        try:
            await asyncio.wait_for(sending, self._stall_timeout)
        except asyncio.TimeoutError:
            raise ClientLeft from None
