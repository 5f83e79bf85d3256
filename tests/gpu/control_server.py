"""Control streams of one process: an event loop on a thread, and a gRPC server on it."""

from __future__ import annotations

import asyncio
import threading

import grpc.aio

from kv_transfer.links.grpc_control import GrpcControl
from kv_transfer.trust.grpc_proof import GrpcAcceptor
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member, Trust, TrustMaterial

_TIMEOUT_S = 60.0


class ControlServer:
    """Lives as long as its process. address: host:port."""

    def __init__(self, engine_id: str, material: TrustMaterial) -> None:
        self._member = Member(Party(engine_id, 1), Trust(material))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="control-loop", daemon=True).start()
        self.control, self.address = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(_TIMEOUT_S)

    async def _serve(self) -> tuple[GrpcControl, str]:
        acceptor = GrpcAcceptor(self._member.trust)
        control = GrpcControl(self._loop, self._member, acceptor, link_timeout_s=5.0)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((control.handler(), acceptor.handler()))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return control, f"127.0.0.1:{port}"
