"""The life of a server process: start, drain, end. Its exit status says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from shoal.llm import LLM
from shoal.server.app import make_app
from shoal.server.errors import ApiError
from shoal.server.generation import Service
from shoal.server.options import ServerOptions
from shoal.server.protocol import protocol_class

Say = Callable[[str], None]

_MAX_UNSENT = 16 << 10  # bytes of a connection that the system holds and has not sent
_DEATH_NOTICE = 1.0  # seconds in which streams tell their clients that the engine has stopped


class Served(Protocol):
    """What a server runs: the engine's service, or the front of several."""

    options: ServerOptions
    draining: bool
    dead: str | None
    on_dead: Callable[[], None]

    @property
    def num_active(self) -> int: ...

    def fail_all(self, error: ApiError) -> None: ...


class Server(uvicorn.Server):
    """uvicorn's, with a drain in which it still answers: new work is told to go elsewhere, the rest finishes."""

    def __init__(self, config: uvicorn.Config, service: Served, say: Say) -> None:
        super().__init__(config)
        self._service = service
        self._say = say
        self._swept = 0.0
        self._draining_until: float | None = None
        self.status = 0
        service.on_dead = self._die

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = (signal.SIGINT, signal.SIGTERM)
        try:
            for number in handled:
                loop.add_signal_handler(number, self.drain)
        except (ValueError, RuntimeError):  # not the main thread: whoever started it ends it
            handled = ()
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def drain(self) -> None:
        """The first time: takes no new work, ends when what runs has ended. The second time: ends."""
        if self._service.draining:
            self._cut_off("stopping")
            return
        self._service.draining = True
        self._draining_until = time.monotonic() + self._service.options.drain_timeout
        self._say(f"draining: {self._service.num_active} answers run")

    def _cut_off(self, message: str) -> None:
        self._say(message)
        if self._service.num_active:
            self.status = 1
        self._service.fail_all(ApiError(503, "the server has stopped", None, "stopped"))
        self.should_exit = True  # what is sent then has a second to leave

    def _die(self) -> None:
        self._say(f"the engine has stopped: {self._service.dead}")
        self.status = 1
        self._service.draining = True
        self._draining_until = time.monotonic() + _DEATH_NOTICE

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        if now - self._swept >= 0.5:
            self._swept = now
            for connection in list(self.server_state.connections):
                connection.sweep(now)  # type: ignore[union-attr]
        if self._draining_until is not None:
            if self._service.num_active == 0 and not self.server_state.tasks:
                self.should_exit = True
            elif now > self._draining_until:
                self._cut_off(f"{self._service.num_active} answers did not end in time")
        return await super().on_tick(counter)


async def serve_async(
    llm: LLM, options: ServerOptions, listener: socket.socket, say: Say, started: Callable[[Server], None] | None = None
) -> int:
    service = Service(llm, options, asyncio.get_running_loop())
    try:
        return await serve_app(make_app(service), service, listener, say, started)
    finally:
        await asyncio.get_running_loop().run_in_executor(None, service.close)


async def serve_app(
    app: ASGIApp, service: Served, listener: socket.socket, say: Say, started: Callable[[Server], None] | None = None
) -> int:
    options = service.options
    config = uvicorn.Config(
        app,
        http=protocol_class(options.max_connections, options.receive_timeout, min(options.stall_timeout, 5.0)),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        # On a unix socket the front of several replicas says who asks.
        forwarded_allow_ips="*" if listener.family == socket.AF_UNIX else None,
        h11_max_incomplete_event_size=options.max_header,
        timeout_graceful_shutdown=1,
        backlog=1024,
    )
    server = Server(config, service, say)
    if started is not None:
        started(server)
    await server.serve([listener])
    return server.status


def serve(llm: LLM, options: ServerOptions, listener: socket.socket, say: Say) -> int:
    """Serves until a signal or the engine ends it; the exit status."""
    return asyncio.run(serve_async(llm, options, listener, say))


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; OSError if there is none to have."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    # With the protocol named: asyncio takes the delay of small packets (40 ms an event) only from such sockets.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Of what a reader does not take little is to wait here, so that its request pauses. Connections inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def is_loopback(listener: socket.socket) -> bool:
    import ipaddress

    address: Any = listener.getsockname()[0]
    return ipaddress.ip_address(address.split("%")[0]).is_loopback
