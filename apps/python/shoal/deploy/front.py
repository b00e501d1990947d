"""The process before the replicas: the public port, its gate, and the way to a replica and back."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from shoal.deploy.prefix_routing import Candidate, PrefixMap, choose
from shoal.deploy.replicas import Replica, Replicas
from shoal.server.errors import ApiError, busy
from shoal.server.events import EventStream, error_event, event, while_listened
from shoal.server.gate import Gate
from shoal.server.options import ServerOptions
from shoal.server.serve import Say, Server, serve_app

# Of one connection, not of the message; and what the front says itself.
_OF_CONNECTION = frozenset(
    [b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"expect"]
)
_OWN_REQUEST = _OF_CONNECTION | {b"x-forwarded-for", b"x-forwarded-proto"}
_OWN_ANSWER = _OF_CONNECTION | {b"date", b"x-request-id"}
# What a replica says that ends: it has not begun the request, or has lost it before a byte of its answer.
_NOT_ANSWERED = frozenset(["engine_dead", "draining", "stopped"])


class _Lost(Exception):
    """The replica ended before it answered; nobody has seen any of its answer, and nobody can."""


class _FrontMetrics:
    """What the front answers itself, and how its replicas do."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._registry = CollectorRegistry()
        self._responses = Counter(
            "shoal:http_responses", "Answers by route and status.", ["route", "status"], registry=self._registry
        )

    def responded(self, route: str, status: int) -> None:
        self._responses.labels(route, str(status)).inc()

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def states(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("shoal:replica_up", "Whether the replica takes requests.", labels=["replica"])
        load = GaugeMetricFamily("shoal:replica_load", "Requests in progress there.", labels=["replica"])
        starts = CounterMetricFamily("shoal:replica_starts", "Times it was started.", labels=["replica"])
        for replica in self._replicas.all:
            up.add_metric([str(replica.index)], replica.is_up)
            load.add_metric([str(replica.index)], replica.load)
            starts.add_metric([str(replica.index)], replica.num_starts)
        yield from (up, load, starts)


class _Families(list[Metric]):
    def collect(self) -> Iterator[Metric]:
        return iter(self)


def merged_metrics(texts: dict[str, str], more: Iterator[Metric]) -> bytes:
    """Figures of several processes as one text, each with the label `replica`."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                into.add_sample(sample.name, {**sample.labels, "replica": name}, sample.value)
    return generate_latest(_Families([*families.values(), *more]))  # type: ignore[arg-type]


class Front:
    """The service behind the public port, as gate and server see it."""

    def __init__(self, options: ServerOptions, replicas: Replicas) -> None:
        self.options = options
        self.draining = False
        self.dead: str | None = None
        self.on_dead: Callable[[], None] = lambda: None  # the front itself has no engine that could stop
        self.metrics = _FrontMetrics(replicas)
        self._replicas = replicas
        self._prefixes = PrefixMap()
        self._cut_off = False
        replicas.on_end = lambda replica: self._prefixes.forget(replica.index)

    @property
    def num_active(self) -> int:
        return sum(replica.load for replica in self._replicas.all)

    def fail_all(self, error: ApiError) -> None:
        self._cut_off = True
        for replica in self._replicas.all:
            replica.signal(signal.SIGINT, signal.SIGTERM)  # two signals: its answers end with their error event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}.get(scope["path"])
        if own is not None and scope["method"] == "GET":
            await (await own())(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    async def _health(self) -> Response:
        is_ok = bool(self._replicas.up)
        return JSONResponse({"status": "ok" if is_ok else "dead"}, 200 if is_ok else 500)

    async def _ready(self) -> Response:
        asked = [asyncio.ensure_future(self._ask(r, "/ready")) for r in self._replicas.up]
        is_ready = False
        for answer in asyncio.as_completed(asked):  # one that hangs does not hold up what another says
            answered = await answer
            if answered is not None and answered.status_code == 200:
                is_ready = not self.draining
                break
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    async def _metrics(self) -> Response:
        up = self._replicas.up
        answers = await asyncio.gather(*(self._ask(r, "/metrics") for r in up))
        texts = {str(r.index): a.text for r, a in zip(up, answers, strict=True) if a and a.status_code == 200}
        text = merged_metrics({**texts, "front": self.metrics.text()}, self.metrics.states())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _ask(self, replica: Replica, path: str) -> httpx.Response | None:
        headers = {"host": "localhost"}
        if self.options.keys:
            headers["x-api-key"] = self.options.keys[0]
        try:
            return await replica.client.get(path, headers=headers, timeout=self.options.health_timeout)
        except httpx.HTTPError:
            return None

    # The way to a replica and back

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body()
        blocks = self._prefixes.blocks(_parsed(body), scope["shoal"].key)
        tried: list[Replica] = []
        while True:
            replica = self._choose(blocks, tried)
            tried.append(replica)
            replica.load += 1
            replica.num_sent += 1
            self._prefixes.add(blocks, replica.index)
            try:
                await self._exchange(replica, request, body, send)
                return
            except _Lost:
                if self._cut_off:
                    raise ApiError(503, "the server has stopped", None, "stopped") from None
                if len(tried) == 2:
                    raise busy(503, "the replicas that had the request ended", "replica_lost") from None
            finally:
                replica.load -= 1

    def _choose(self, blocks: list[bytes], tried: list[Replica]) -> Replica:
        candidates = [
            Candidate(r.index, self._prefixes.num_cached(blocks, r.index), r.load, r.num_sent)
            for r in self._replicas.up
            if r not in tried
        ]
        if not candidates:
            raise busy(503, "no replica runs; one is being started", "no_replica")
        return self._replicas.all[choose(candidates, len(blocks))]

    async def _exchange(self, replica: Replica, request: Request, body: bytes, send: Send) -> None:
        """One request to one replica. _Lost only as long as the client has got nothing."""
        scope, visit = request.scope, request.scope["shoal"]
        answer = await while_listened(request, self._open(replica, request, body))
        try:
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                visit.id, visit.forwarded = answer.headers.get("x-request-id", visit.id), True
                stream = EventStream(
                    self._pieces(answer, scope),
                    keep_alive=math.inf,  # the replica sends these
                    stall_timeout=self.options.stall_timeout,
                    comment=str,
                    on_error=lambda error: _error_event(error, scope["path"]),
                    on_end=lambda: None,
                )
                await stream(scope, request.receive, send)
                return
            content = await while_listened(request, _content(answer))
            visit.id, visit.forwarded = answer.headers.get("x-request-id", visit.id), True
            response = Response(content, answer.status_code)
            kept = [(k.lower(), v) for k, v in answer.headers.raw if k.lower() not in _OWN_ANSWER]
            response.raw_headers = [(b"content-length", str(len(content)).encode()), *kept]
            await response(scope, request.receive, send)
        finally:
            await answer.aclose()

    async def _open(self, replica: Replica, request: Request, body: bytes) -> httpx.Response:
        """The head of the answer."""
        scope = request.scope
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = [(k, v) for k, v in scope["headers"] if k not in _OWN_REQUEST]
        if scope.get("client"):
            headers.append((b"x-forwarded-for", scope["client"][0].encode()))
        try:
            url = replica.client.base_url.copy_with(raw_path=target)
        except httpx.InvalidURL:
            raise ApiError(404, "there is no such route", None, "not_found") from None
        outgoing = replica.client.build_request(scope["method"], url, headers=headers, content=body or None)
        try:
            return await replica.client.send(outgoing, stream=True)
        except httpx.TransportError:
            raise _Lost from None

    async def _pieces(self, answer: httpx.Response, scope: Scope) -> AsyncGenerator[bytes, None]:
        try:
            async for data in answer.aiter_raw():
                yield data
        except httpx.TransportError:
            scope["shoal"].forwarded = False  # the replica can no longer write its line
            raise ApiError(500, "the replica ended before its answer did", None, "replica_lost") from None


async def _content(answer: httpx.Response) -> bytes:
    try:
        content = await answer.aread()
    except httpx.TransportError:
        raise _Lost from None
    if answer.status_code >= 500:
        error = _parsed(content)
        error = error.get("error") if isinstance(error, dict) else None
        if isinstance(error, dict) and error.get("code") in _NOT_ANSWERED:
            raise _Lost
    return content


def _parsed(body: bytes) -> Any:
    """None if it cannot be read: what is wrong with it, the replica says."""
    try:
        return from_json(body)
    except ValueError:
        return None


def _error_event(error: ApiError, path: str) -> bytes:
    if path.startswith("/v1/messages"):
        return event(error.anthropic_body(), "error")
    if path.startswith("/v1/responses"):
        return event({"type": "error", "code": error.code, "message": error.message, "param": error.param}, "error")
    return error_event(error)


async def serve_front_async(
    model: Path,
    num_replicas: int,
    options: ServerOptions,
    engine: dict[str, Any],
    listener: socket.socket,
    say: Say,
    listening: Callable[[], None],
    started: Callable[[Server], None] | None = None,
) -> int:
    replicas = Replicas(model, num_replicas, options, engine, say)
    try:
        await replicas.start()
        listening()
        front = Front(options, replicas)
        return await serve_app(Gate(front, front), front, listener, say, started)
    finally:
        await replicas.close()
