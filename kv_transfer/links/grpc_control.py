"""Control streams over gRPC: each is one bidirectional call to the peer's gRPC server, with messages in MessagePack.

Both ends prove the cluster's secret to each other before a message is sent or read (trust/grpc_proof.py). All gRPC
objects belong to one event loop; dial(), send() and close() of a stream may come from any thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import Final

import grpc
import grpc.aio

from kv_transfer.errors import OtherParty, Untrusted
from kv_transfer.handoff.control_messages import ControlMessage, decode, encode
from kv_transfer.links.control_streams import StreamEvents
from kv_transfer.message_ranges import MALFORMED
from kv_transfer.params import EngineAddress
from kv_transfer.trust.grpc_proof import METADATA_LIMITS, GrpcAcceptor, GrpcProof, prove
from kv_transfer.trust.handshake import Party, Proven
from kv_transfer.trust.membership import Member
from kv_transfer.trust.refusals import Refusals
from kv_transfer.trust.secret import Purpose
from kv_transfer.trust.tls import InternalTls, open_channel, tls_advice

CONTROL_METHOD: Final = "/raypd.kv.v1.Control/Stream"
_CHANNEL_OPTIONS: Final = (
    # A cut connection must be noticed within seconds, also while no message is sent.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    *METADATA_LIMITS,
)
_PROOF_TIMEOUT_S: Final = 10.0


class GrpcStream:
    """One end of a stream, with the queue of its outgoing messages; None in the queue closes the stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop, proven: Proven | None = None) -> None:
        self._loop = loop
        self.proven = proven
        self._outgoing: asyncio.Queue[ControlMessage | None] = asyncio.Queue()

    def send(self, message: ControlMessage) -> None:
        """Queue a message, from any thread. A closed stream drops it."""
        self._put(message)

    def close(self) -> None:
        """Close the stream after the queued messages, from any thread."""
        self._put(None)

    async def outgoing(self, may_begin: asyncio.Event | None = None) -> AsyncIterator[ControlMessage]:
        """Yield the messages to send, until close(). may_begin: set when the first message may be sent."""
        if may_begin is not None:
            await may_begin.wait()
        while (message := await self._outgoing.get()) is not None:
            yield message

    def _put(self, message: ControlMessage | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._outgoing.put_nowait, message)


class GrpcControl:
    """A Control that uses gRPC on an event loop. The engine registers handler() on its gRPC server."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, member: Member, acceptor: GrpcAcceptor, link_timeout_s: float
    ) -> None:
        """member: the engine, under whose name this end dials and answers; acceptor: the one of the engine's server

        link_timeout_s: as in KVTransferConfig; also the time after which an unanswered ping of gRPC ends a connection
        """
        self._loop = loop
        ping_timeout_ms = max(1, round(link_timeout_s * 1000))
        self._channel_options = (
            *_CHANNEL_OPTIONS,
            ("grpc.keepalive_timeout_ms", ping_timeout_ms),
            # Without this option gRPC waits a minute for the answer to a ping, whatever the keepalive timeout is.
            ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        )
        self._member = member
        self._acceptor = acceptor
        acceptor.register(Purpose.CONTROL, member.party)
        self._events: StreamEvents | None = None
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def tls(self) -> InternalTls | None:
        """See Control."""
        return self._member.trust.tls

    @property
    def refusals(self) -> Refusals:
        """See Control."""
        return self._acceptor.refusals

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handler for streams that other engines dial."""
        service, method = CONTROL_METHOD.strip("/").split("/")
        # Messages are decoded here, not by gRPC: a malformed message ends this stream, and is counted.
        serve: grpc.RpcMethodHandler[bytes, ControlMessage] = grpc.stream_stream_rpc_method_handler(
            self._answer, response_serializer=encode
        )
        return grpc.method_handlers_generic_handler(service, {method: serve})

    def serve(self, events: StreamEvents) -> None:
        """Hand the messages of streams that other engines dial to `events`."""
        self._events = events

    def dial(self, peer: EngineAddress, events: StreamEvents) -> GrpcStream:
        """Open a stream to the peer's rank, from any thread; see Control."""
        stream = GrpcStream(self._loop)
        self._loop.call_soon_threadsafe(self._begin_call, stream, peer, events)
        return stream

    async def close(self) -> None:
        """Close every stream that this engine has dialled, and wait for their ends."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _begin_call(self, stream: GrpcStream, peer: EngineAddress, events: StreamEvents) -> None:
        call = self._loop.create_task(self._call(stream, peer, events))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _call(self, stream: GrpcStream, peer: EngineAddress, events: StreamEvents) -> None:
        reason = "closed by the peer"
        try:
            async with open_channel(peer.control_address, self._channel_options, self.tls) as channel:
                proof = await prove(
                    channel,
                    self._member,
                    Purpose.CONTROL,
                    Party(peer.engine_id, peer.incarnation),
                    _PROOF_TIMEOUT_S,
                    wait_for_ready=False,
                )
                if not await self._exchange(channel, proof, stream, events):
                    reason = f"{peer.control_address}: malformed message"
        except grpc.aio.AioRpcError as error:
            reason = f"{peer.control_address}: {error.details()}{tls_advice(self.tls)}"
        except OtherParty as error:
            reason = f"{peer.control_address}: {error}"
        except Untrusted as error:
            self.refusals.add(Purpose.CONTROL, peer.control_address, error)
            reason = f"{peer.control_address}: {error}"
        except TimeoutError:
            reason = f"{peer.control_address}: the engine there did not confirm the handshake in time"
        except asyncio.CancelledError:
            reason = "closed here"
        finally:
            stream.close()
            events.on_closed(stream, reason)

    async def _exchange(
        self, channel: grpc.aio.Channel, proof: GrpcProof, stream: GrpcStream, events: StreamEvents
    ) -> bool:
        """Hand messages to `events` until the stream ends; return False if a malformed message ends it."""
        is_confirmed = asyncio.Event()
        method: grpc.aio.StreamStreamMultiCallable[ControlMessage, bytes] = channel.stream_stream(
            CONTROL_METHOD, request_serializer=encode
        )
        call = method(stream.outgoing(is_confirmed), metadata=proof.metadata)
        async with asyncio.timeout(_PROOF_TIMEOUT_S):
            stream.proven = await proof.confirm(call)
        is_confirmed.set()
        return await _hand_over(call, stream, events)

    async def _answer(
        self,
        messages: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[bytes, ControlMessage],
    ) -> AsyncIterator[ControlMessage]:
        proven = await self._acceptor.check(context, Purpose.CONTROL)
        events = self._events
        if events is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this engine is still starting")
        stream = GrpcStream(self._loop, proven)
        reader = asyncio.create_task(self._read(messages, stream, events))
        try:
            async for message in stream.outgoing():
                yield message
        finally:
            reader.cancel()
            events.on_closed(stream, "closed by the peer")

    async def _read(self, messages: AsyncIterator[bytes], stream: GrpcStream, events: StreamEvents) -> None:
        try:
            await _hand_over(messages, stream, events)
        finally:
            stream.close()


async def _hand_over(frames: AsyncIterable[bytes], stream: GrpcStream, events: StreamEvents) -> bool:
    """Decode frames and hand them to `events` until the stream ends; return False if a frame is no message."""
    async for frame in frames:
        try:
            message = decode(frame)
        except MALFORMED as error:
            events.on_malformed(stream, str(error))
            return False
        events.on_message(stream, message)
    return True
