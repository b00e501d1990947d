"""HTTP/1.1 by uvicorn and h11, with what they leave to a proxy: bounds on heads, slow senders, and connections.

shoal is often reached without a proxy before it. Errors that arise before there is a request have the same form as all.
"""

from __future__ import annotations

import http
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.server.errors import ApiError, busy, to_json

_MAX_UNSENT = 8 << 10  # bytes of an answer that wait for their reader; sending then does so too


def protocol_class(max_connections: int, receive_timeout: float, linger: float) -> type[H11Protocol]:
    """`linger`: seconds in which the reader of a connection that we closed can take what was sent to it."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=_MAX_UNSENT)
            self.waiting_since: float | None = time.monotonic()  # for the head of a request
            self.closing_since: float | None = None
            if len(self.connections) > max_connections:
                self.refuse(busy(503, f"{max_connections} connections are open already", "too_many_connections"))

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            in_request = self.cycle is not None and not self.cycle.response_complete
            if not in_request and self.waiting_since is None:
                self.waiting_since = time.monotonic()
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self.waiting_since = None

        def on_response_complete(self) -> None:
            self.waiting_since = None  # the time that a connection may idle between requests is uvicorn's
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            # h11 has no error of its own for a head that is too long; it stops where more would exceed its bound.
            if self.conn.their_state is h11.ERROR and self.conn.trailing_data[0] and self._head_is_long():
                self.refuse(
                    ApiError(431, f"the head of the request exceeds {self.max_head} bytes", None, "head_too_large")
                )
            else:
                self.refuse(ApiError(400, "this is no HTTP request", None, "invalid_http"))

        @property
        def max_head(self) -> int:
            return self.config.h11_max_incomplete_event_size or 0

        def _head_is_long(self) -> bool:
            return len(self.conn.trailing_data[0]) >= self.max_head

        def refuse(self, error: ApiError) -> None:
            """Answers what has not become a request, and closes."""
            body = to_json(error.body())
            phrase = http.HTTPStatus(error.status_code).phrase
            head = (
                f"HTTP/1.1 {error.status_code} {phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.transport.close()

        def sweep(self, now: float) -> None:
            """Called every second or so: ends what goes on for too long."""
            if self.transport.is_closing():
                self.closing_since = self.closing_since or now
                if now - self.closing_since > linger:
                    self.transport.abort()  # nobody reads what is left
            elif self.waiting_since is not None and now - self.waiting_since > receive_timeout:
                self.refuse(ApiError(408, f"no request came within {receive_timeout:g} s", None, "request_timeout"))

    return Protocol
