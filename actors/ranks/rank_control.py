"""Serves the control streams of a further rank, with a gRPC server whose event loop runs in its own thread.

Rank 0's control streams are served by the engine's server. KV transfers are the only service of a further rank.
"""

from __future__ import annotations

import asyncio
import threading

import grpc.aio

from kv_transfer.links.grpc_control import GrpcControl
from kv_transfer.trust.grpc_proof import METADATA_LIMITS, GrpcAcceptor
from kv_transfer.trust.membership import Member
from kv_transfer.trust.refusals import Refusals
from kv_transfer.trust.tls import listen

_TIMEOUT_S = 10.0
_SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),
    # A link is idle between transfers; the server must not take the link's keepalive pings for abuse.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    *METADATA_LIMITS,
]


class RankControl:
    """The server of a further rank's control streams. It listens from the constructor until close()."""

    def __init__(self, host: str, member: Member, link_timeout_s: float, refusals: Refusals | None = None) -> None:
        """Listen on a free port of host, and start the event loop's thread.

        member: the rank's name and the secrets with which it proves itself
        link_timeout_s: see KVTransferConfig
        refusals: counts the callers that did not prove themselves
        """
        self._link_timeout_s = link_timeout_s
        self._member = member
        self._refusals = refusals or Refusals()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rank-control", daemon=True)
        self._thread.start()
        self.control, self.address = asyncio.run_coroutine_threadsafe(self._start(host), self._loop).result(_TIMEOUT_S)

    def close(self) -> None:
        """Close every control stream, stop listening, and end the thread."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_TIMEOUT_S)
        self._loop.close()

    async def _start(self, host: str) -> tuple[GrpcControl, str]:
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        acceptor = GrpcAcceptor(self._member.trust, self._refusals)
        control = GrpcControl(asyncio.get_running_loop(), self._member, acceptor, self._link_timeout_s)
        self._server.add_generic_rpc_handlers((control.handler(), acceptor.handler()))
        port = listen(self._server, f"{host}:0", self._member.trust.tls)
        await self._server.start()
        return control, f"{host}:{port}"

    async def _stop(self) -> None:
        await self.control.close()
        await self._server.stop(grace=0)
