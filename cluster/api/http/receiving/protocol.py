"""One connection of HTTP/1.1, with bounds on everything that a client can send before a request is worked on.

httptools and uvicorn collect all headers, URLs and requests that are sent ahead. So bytes are given to them in pieces,
and counted:

- A request's URL has at most MAX_URL_BYTES; its headers are at most MAX_HEADERS, and have with the URL at most
  `max_header_bytes`.
- The bytes of chunks beside their content (sizes, extensions, trailers) are at most `max_header_bytes` and a quarter of
  the content.
- A request that is sent ahead is not read until the answer before it has ended; a piece may contain a few of them.
- One callback of the event loop reads BYTES_PER_TURN. The other bytes wait for the next one; if they are many, nothing
  is read from the socket.

A request that is refused here is answered at once, and nothing after it is parsed. Bytes that are still on their way
are dropped for LINGER_S: to close the connection earlier would reset it, and the client could lose the answer.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, Final, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.api.http.errors import HttpError, refused
from cluster.api.http.receiving.authentication import IS_RECEIVED
from cluster.api.http.receiving.connections import Connections
from cluster.api.http.receiving.instant_answers import InstantAnswers
from cluster.api.http.streams import ABORT

MAX_HEADERS: Final = 256
MAX_URL_BYTES: Final = 8192
BYTES_PER_TURN: Final = 65_536
LINGER_S: Final = 2.0
_PIECE_BYTES: Final = 4096
_MAX_WAITING_BYTES: Final = 65_536
"""While more bytes wait to be parsed, nothing is read from the socket."""
_MAX_THROWN_AWAY_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class ProtocolLimits:
    """The bounds of every connection of a server. receive_timeout_s: how long the headers of a request may take"""

    max_header_bytes: int
    receive_timeout_s: float


class _TooMuch(Exception):
    """A bound is exceeded: this ends the parser's work. httptools wraps it in an error of its own."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Each server has a subclass, with the server's limits and connections as class attributes."""

    limits: ClassVar[ProtocolLimits]
    all_connections: ClassVar[Connections]
    instant_answers: ClassVar[InstantAnswers | None] = None
    """The calls that are answered without the application, between two that the application answers."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request's headers, if there is room for one more connection."""
        super().connection_made(transport)  # type: ignore[arg-type]  # as uvicorn's own
        self.flow = self._flow = _Flow(self.transport)
        self._waiting = b""
        self._is_turn_due = self._is_over = self._in_headers = self._has_gone = False
        self._refusal: HttpError | None = None
        self._num_thrown_away = self._num_idle_bytes = self._num_begun = 0
        self._instant_answer: bytes | None = None
        self._begin_request()
        self._timer = self.loop.call_later(self.limits.receive_timeout_s, self.transport.abort)
        if not self.all_connections.add(self):
            self._answer(refused(503, "this ingress has reached its limit on connections", "overloaded"))
            self.transport.close()

    def end(self) -> None:
        """End the connection at once, to make room for another one."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Free what the connection holds: it is closed."""
        self._has_gone = True
        self._waiting = b""
        self._timer.cancel()
        self.all_connections.discard(self)
        self.pipeline.clear()
        if self.cycle is not None:
            # This ends a cycle of references, which would live long: garbage is collected seldom.
            self.cycle.transport = self.transport
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the socket, and parse as many as one callback may."""
        if self._is_over:
            self._throw_away(data)
            return
        self._waiting = self._waiting + data if self._waiting else data
        if len(self._waiting) > _MAX_WAITING_BYTES:
            self._flow.hold()
        if not self._is_turn_due:
            self._read_a_turn()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._num_begun += 1
        self._begin_request()
        self._num_idle_bytes = 0
        self._in_headers = True
        extended: dict[str, Any] = self.scope  # type: ignore[assignment]  # a TypedDict of what the standard knows
        extended[ABORT] = self.transport.abort
        self._restart_timer()

    def on_url(self, url: bytes) -> None:
        """Take a part of a request's URL."""
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refusal = refused(414, f"the URL has more than {MAX_URL_BYTES} bytes", "uri_too_long")
            raise _TooMuch

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are ignored."""
        if not self._in_headers:
            return
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value) + 4
        self._check_headers()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to work on a request, whose headers are complete."""
        self._in_headers = False
        self._timer.cancel()
        self._instant_answer = self._answer_at_once()
        if self._instant_answer is not None:
            return
        self.all_connections.set_busy(self)
        super().on_headers_complete()
        cycle = weakref.ref(self.cycle)

        def is_received() -> bool:
            return (known := cycle()) is None or not known.more_body

        extended: dict[str, Any] = self.scope  # type: ignore[assignment]  # as above
        extended[IS_RECEIVED] = is_received
        self.cycle.transport = cast(asyncio.Transport, _AnswerTransport(self, self.transport, is_received))

    def on_body(self, body: bytes) -> None:
        """Take a part of a request's body."""
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that all of a request has come."""
        answer, self._instant_answer = self._instant_answer, None
        if answer is None:
            super().on_message_complete()
            return
        self.transport.write(answer)
        self.on_response_complete()

    def on_response_complete(self) -> None:
        """Read the next request, which may be here already."""
        super().on_response_complete()
        if not self.pipeline and not self._in_headers:
            self.all_connections.set_spare(self)
        self._take_turn_soon()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, or exceed a bound."""
        self._refuse(self._refusal or refused(400, msg, "no_http"))

    def close_after_answer(self) -> None:
        """Close the connection so that the client gets the answer, whatever it still sends."""
        if self._is_over:
            return
        self._is_over = True
        self._waiting = b""
        self._timer.cancel()
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._flow.release()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _answer_at_once(self) -> bytes | None:
        """Return the answer to the request whose headers are complete; None if the application has to answer.

        A client that does not read its answers gets them from the application, which waits for the client.
        """
        if self.instant_answers is None or self.parser.get_method() != b"GET":
            return None
        is_between = self.cycle is None or self.cycle.response_complete
        is_plain = self.parser.get_http_version() == "1.1" and self.parser.should_keep_alive()
        if not is_between or not is_plain or self.flow.write_paused or self.transport.is_closing():
            return None
        return self.instant_answers.answer(self.url, self.headers, self.server_state.default_headers)

    def _begin_request(self) -> None:
        self._num_headers = self._num_header_bytes = self._num_unparsed_bytes = 0
        self._num_body_bytes = self._num_bytes_of_body = 0

    def _restart_timer(self) -> None:
        self._timer.cancel()
        self._timer = self.loop.call_later(self.limits.receive_timeout_s, self.transport.abort)

    def _read_a_turn(self) -> None:
        """Give the parser as much as one callback may read."""
        self._is_turn_due = False
        num_left = BYTES_PER_TURN
        while self._waiting and num_left > 0 and not self._has_to_wait():
            piece, self._waiting = self._waiting[:_PIECE_BYTES], self._waiting[_PIECE_BYTES:]
            num_left -= len(piece)
            self._read(piece)
        if not self._has_to_wait():
            self._take_turn_soon()
        if len(self._waiting) <= _MAX_WAITING_BYTES and not self._has_gone:
            self._flow.release()

    def _take_turn_soon(self) -> None:
        if self._waiting and not self._is_turn_due:
            self._is_turn_due = True
            self.loop.call_soon(self._read_a_turn)

    def _has_to_wait(self) -> bool:
        """Whether the next bytes belong to a request after one that is not answered yet."""
        if self._has_gone or self._is_over or self.transport.is_closing():
            self._waiting = b""
            return True
        cycle = self.cycle
        return bool(self.pipeline) or (cycle is not None and not cycle.response_complete and not cycle.more_body)

    def _read(self, piece: bytes) -> None:
        was_spare = not self._in_headers and (self.cycle is None or self.cycle.response_complete)
        num_begun, num_headers = self._num_begun, self._num_headers
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass  # The server speaks only HTTP/1.1, so it answers a request for an upgrade like any other request.
        except httptools.HttpParserError:
            self.send_400_response("the request is not valid HTTP/1.1")
        if self._is_over or self._has_gone:
            return
        if was_spare and not self._in_headers and (self.cycle is None or self.cycle.response_complete):
            if self._num_begun == num_begun and self._timer.cancelled():
                # A client may send empty lines before a request for as long as it may take over the request's headers.
                self._restart_timer()
            self._num_idle_bytes += len(piece)
            if self._num_idle_bytes > self.limits.max_header_bytes:
                self.transport.abort()
        elif self._in_headers:
            # The parser keeps a header that has not ended, and does not report the bytes of it.
            has_ended = self._num_headers > num_headers
            self._num_unparsed_bytes = 0 if has_ended else self._num_unparsed_bytes + len(piece)
            try:
                self._check_headers()
            except _TooMuch:
                self.send_400_response("")
        elif not was_spare and self.cycle is not None and self.cycle.more_body:
            self._num_bytes_of_body += len(piece)
            self._check_chunks()

    def _check_headers(self) -> None:
        """Check the bounds on headers. Raises _TooMuch."""
        most = self.limits.max_header_bytes
        num_bytes = self._num_header_bytes + len(self.url) + self._num_unparsed_bytes
        if num_bytes > most or self._num_headers > MAX_HEADERS:
            message = f"the headers have more than {most} bytes, or are more than {MAX_HEADERS}"
            self._refusal = refused(431, message, "headers_too_large")
            raise _TooMuch

    def _check_chunks(self) -> None:
        num_others = self._num_bytes_of_body - self._num_body_bytes
        if num_others > self.limits.max_header_bytes + self._num_body_bytes // 4:
            self._refuse(refused(400, "the chunks of the body have more bytes beside their content", "no_http"))

    def _refuse(self, error: HttpError) -> None:
        """Answer with an error, and read no more. If another answer is under way, the connection is cut off instead."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            is_begun = cycle.response_started or bool(self.pipeline)
            cycle.disconnected = True
            cycle.message_event.set()
            if is_begun or not cycle.more_body:
                self.transport.abort()
                return
        self._answer(error)
        self.close_after_answer()

    def _answer(self, error: HttpError) -> None:
        head = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(error.body)}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + error.body)

    def _throw_away(self, data: bytes) -> None:
        self._num_thrown_away += len(data)
        if self._num_thrown_away > _MAX_THROWN_AWAY_BYTES:
            self.transport.abort()


class _Flow(FlowControl):
    """Reads from the socket only while both the reader of bodies and the connection itself want more bytes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False
        self._is_paused = False

    def pause_reading(self) -> None:
        self._is_paused = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if not self._is_held:
            super().resume_reading()

    def hold(self) -> None:
        """Stop reading until release(), even if the reader of bodies wants more."""
        self._is_held = True
        super().pause_reading()

    def release(self) -> None:
        """Read again, if the reader of bodies wants more."""
        self._is_held = False
        if not self._is_paused:
            super().resume_reading()


class _AnswerTransport:
    """The transport that uvicorn writes an answer to.

    If it is closed before all of the request has come, the connection is closed so that the client gets the answer.
    """

    def __init__(
        self, connection: BoundedProtocol, transport: asyncio.Transport, is_received: Callable[[], bool]
    ) -> None:
        self._connection = connection
        self._transport = transport
        self._is_received = is_received
        self.write = transport.write
        self.is_closing = transport.is_closing

    def close(self) -> None:
        """Close the connection."""
        if self._is_received():
            self._transport.close()
        else:
            self._connection.close_after_answer()
