"""TLS connections that count from their first byte on, have a limit for the handshake, and leave no garbage.

asyncio's own TLS server does not tell of a connection before its handshake has ended, allows a minute for that, and
leaves 300 KB of each connection that ends earlier: an exception and the frames that it went through refer to each other
until the next full garbage collection, which an ingress makes seldom. So the server accepts plain connections. The
protocol of each is asyncio's TLS, whose inner protocol is HTTP.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from cluster.api.http.receiving.connections import Connections

_BUFFER_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The settings of TLS connections.

    context: the server's; handshake_timeout_s: the limit for a handshake; all_connections: the server's connections
    """

    context: ssl.SSLContext
    handshake_timeout_s: float
    all_connections: Connections


class TlsConnection(SSLProtocol):
    """A connection with TLS. During its handshake it counts as a connection without a request."""

    max_size: ClassVar[int] = _BUFFER_BYTES

    def __init__(self, make_inner: Callable[[], asyncio.Protocol], settings: TlsSettings) -> None:
        """Wrap a protocol in TLS. make_inner: makes the protocol, which counts as a connection after the handshake"""
        super().__init__(
            asyncio.get_running_loop(),
            asyncio.Protocol(),
            settings.context,
            None,  # type: ignore[arg-type]  # nobody waits for the handshake
            server_side=True,
            ssl_handshake_timeout=settings.handshake_timeout_s,  # type: ignore[arg-type]  # typeshed wants an int
        )
        self._make_inner = make_inner
        self._all_connections = settings.all_connections
        self._plain_transport: asyncio.BaseTransport | None = None

    def end(self) -> None:
        """End the connection at once, to make room for another one."""
        if isinstance(self._plain_transport, asyncio.WriteTransport):
            self._plain_transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a handshake, if there is room for one more connection."""
        self._plain_transport = transport
        if not self._all_connections.add(self):
            self.end()
            return
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Free large buffers, even if something still refers to this connection."""
        self._all_connections.discard(self)
        self._plain_transport = None
        super().connection_lost(exc)
        self._extra: dict[str, Any] = {}
        self._sslobj: Any = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl_buffer = bytearray()
        self._ssl_buffer_view = memoryview(self._ssl_buffer)

    def _on_handshake_complete(self, handshake_exc: BaseException | None) -> None:
        # From here on the inner connection counts instead of this one.
        self._all_connections.discard(self)
        if handshake_exc is None:
            self._set_app_protocol(self._make_inner())
        super()._on_handshake_complete(handshake_exc)
        if isinstance(handshake_exc, BaseException):
            handshake_exc.__traceback__ = None
