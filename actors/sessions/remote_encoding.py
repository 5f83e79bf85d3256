"""Lets encode engines make the embeddings of images for engines that prefill.

The prefilling engine sends the inputs of an image over gRPC to the encode engine that the request names. When the image
has been encoded, the prefilling engine fetches the embeddings over a KV link, by
actors/core/loads/embedding_transfers.py. It waits for them for encode_timeout_s at most, before it gives the request to
its scheduler. If anything fails, or the embeddings do not come in time, it encodes the image itself. So no request
fails because an encode engine does.

In the request the embeddings replace the inputs (EMBEDDINGS among the arrays). All else is as for images that are
encoded here: the encoder's budget and cache count the embeddings, and a preempted request keeps them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import grpc
import grpc.aio
import msgspec

from actors.core.loads.embedding_transfers import EmbeddingFetch, Fetched
from actors.core.loads.kept_embeddings import KeptEmbeddings
from actors.core.requests.multimodal import EMBEDDINGS, EncoderInput, PackedArray
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.request_limits import DescribedArray
from actors.sessions.session_messages import MAX_MESSAGE_BYTES
from kv_transfer.errors import Untrusted
from kv_transfer.links.refused_messages import RefusedMessages
from kv_transfer.message_ranges import MALFORMED, Count, SizeBytes, Word
from kv_transfer.params import EngineAddress
from kv_transfer.trust.grpc_proof import METADATA_LIMITS, GrpcAcceptor, prove
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member
from kv_transfer.trust.secret import Purpose
from kv_transfer.trust.tls import open_channel

logger = logging.getLogger(__name__)

ENCODE_METHOD: Final = "/raypd.engine.v1.Engine/Encode"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.use_local_subchannel_pool", 1),
    *METADATA_LIMITS,
)
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_input: Final = msgspec.msgpack.Decoder(EncoderInput).decode


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """Describes an image's embeddings that an encode engine keeps.

    dtype:     torch's name of the element type
    shape:     [num_embeds, hidden_size]
    num_bytes: the size of the embeddings
    """

    dtype: Word
    shape: tuple[Count, Count]
    num_bytes: SizeBytes


_decode_encoded: Final = msgspec.msgpack.Decoder(EncodedImage).decode


class EncodeService:
    """The encode engine's end: encodes images for other engines. Belongs to one event loop.

    An image that several engines ask for at the same time, or soon after each other, is encoded once.
    """

    def __init__(
        self,
        encode: Callable[[EncoderInput], Awaitable[PackedArray]],
        kept_embeddings: KeptEmbeddings,
        own: Party,
        acceptor: GrpcAcceptor,
        refused_messages: RefusedMessages,
    ) -> None:
        """Register with the acceptor.

        encode:           makes an image's embeddings, [num_embeds, hidden_size]
        kept_embeddings:  keeps embeddings until other engines have fetched them
        own:              the identity of this engine
        acceptor:         the gRPC server's; refuses callers that do not prove the cluster's secret
        refused_messages: counts the malformed calls
        """
        self._acceptor = acceptor
        self._refused_messages = refused_messages
        acceptor.register(Purpose.ENCODE, own)
        self._encode = encode
        self._kept_embeddings = kept_embeddings
        self._under_way: dict[str, asyncio.Task[PackedArray]] = {}
        self.num_encoded = 0
        """How many images were encoded for other engines so far."""

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handler for other engines' calls."""
        service, method = ENCODE_METHOD.strip("/").split("/")
        # A call is a stream of one message, which unlike a unary call's is not read before the proof is checked.
        serve: grpc.RpcMethodHandler[bytes, EncodedImage] = grpc.stream_stream_rpc_method_handler(
            self._answer, response_serializer=_encode
        )
        return grpc.method_handlers_generic_handler(service, {method: serve})

    async def _answer(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, EncodedImage]
    ) -> AsyncIterator[EncodedImage]:
        proven = await self._acceptor.check(context, Purpose.ENCODE)
        async for message in messages:
            try:
                image = _decode_input(message)
            except MALFORMED as error:
                reason = f"malformed: {error}"
                self._refused_messages.add("malformed image", proven.dialer.name, reason)
            else:
                yield await self._encoded(image)
                return
            # gRPC's context keeps the exception of an abort, and with it what the exception refers to.
            del message
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)

    async def _encoded(self, image: EncoderInput) -> EncodedImage:
        if (known := self._kept_embeddings.get(image.mm_hash)) is not None:
            return _describe(known)
        task = self._under_way.get(image.mm_hash)
        if task is None:
            task = self._under_way[image.mm_hash] = asyncio.create_task(self._make(image))
        # Other calls may wait for the same task, so one that is cancelled must not cancel it.
        return _describe(await asyncio.shield(task))

    async def _make(self, image: EncoderInput) -> PackedArray:
        try:
            embeddings = await self._encode(image)
            self.num_encoded += 1
            self._kept_embeddings.put(image.mm_hash, embeddings)
            return embeddings
        finally:
            del self._under_way[image.mm_hash]


class EmbeddingFetches(Protocol):
    """Fetches embeddings over links. Both methods are called on the event loop, and return at once."""

    def begin_fetch(self, fetch: EmbeddingFetch) -> None:
        """Begin the fetch; fetch.on_over is called at its end."""

    def cancel_fetch(self, fetch: EmbeddingFetch) -> None:
        """Cancel the fetch, unless it has ended."""


class RemoteEncoders:
    """The prefilling engine's end: has images encoded by encode engines. Belongs to one event loop."""

    def __init__(
        self,
        timeout_s: float,
        fetches: EmbeddingFetches,
        kept_embeddings: KeptEmbeddings,
        member: Member,
        find_mistake: Callable[[DescribedArray, int], str | None],
    ) -> None:
        """Connect to nothing yet.

        timeout_s:       how long a request waits for an image's embeddings
        fetches:         fetches embeddings over links
        kept_embeddings: keeps what was fetched, so that later requests with the same image need no fetch
        member:          the identity of this engine, which it proves to encode engines
        find_mistake:    returns why an array that an encode engine describes cannot be that number of embeddings of
                         this engine's model; None if it can
        """
        self._member = member
        self._find_mistake = find_mistake
        self._timeout_s = timeout_s
        self._fetches = fetches
        self._kept_embeddings = kept_embeddings
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def embed(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Return the request with the embeddings of those images for which they came in time."""
        assert request.encoder is not None
        encoder = request.encoder
        sizes = {feature.mm_hash: feature.num_embeds for feature in request.mm_features}
        inputs = await asyncio.gather(
            *(self._embed(encoder, image, sizes[image.mm_hash]) for image in request.encoder_inputs)
        )
        return replace(request, encoder_inputs=tuple(inputs))

    async def close(self) -> None:
        """Close the connections to encode engines."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    async def _embed(self, encoder: EngineAddress, image: EncoderInput, num_embeds: int) -> EncoderInput:
        """Return the image's embeddings; the image as it is if no embeddings come in time."""
        if (known := self._kept_embeddings.get(image.mm_hash)) is not None and known.shape[0] == num_embeds:
            return EncoderInput(image.mm_hash, {EMBEDDINGS: known})
        deadline_s = time.monotonic() + self._timeout_s
        made = await self._ask(encoder, image)
        if isinstance(made, EncodedImage):
            mistake = self._find_mistake((made.dtype, made.shape, made.num_bytes), num_embeds)
            if mistake is not None:
                made = mistake
            else:
                fetched = await self._fetch(encoder, image.mm_hash, made.num_bytes, deadline_s)
                if fetched.data is not None and len(fetched.data) == made.num_bytes:
                    embeddings = PackedArray(made.dtype, made.shape, fetched.data)
                    self._kept_embeddings.put(image.mm_hash, embeddings)
                    return EncoderInput(image.mm_hash, {EMBEDDINGS: embeddings})
                made = fetched.reason or "not all of the embeddings came"
        fields = {"engine_id": encoder.engine_id, "reason": made}
        logger.warning("an encode engine has failed, so this engine encodes the image itself", extra=fields)
        return image

    async def _ask(self, encoder: EngineAddress, image: EncoderInput) -> EncodedImage | str:
        """Let the encode engine encode the image. Returns a description of the embeddings, or why that failed."""
        address = encoder.control_address
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, _OPTIONS, self._member.trust.tls)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask_proven(channel, encoder, image)
        except TimeoutError:
            return f"the encode engine did not answer within {self._timeout_s:g} s"
        except Untrusted as error:
            return str(error)
        except MALFORMED as error:
            return f"its answer is malformed: {error}"
        except grpc.aio.AioRpcError as error:
            return error.details() or str(error.code())
        except grpc.aio.UsageError as error:
            return f"the channel is closed: {error}"

    async def _ask_proven(
        self, channel: grpc.aio.Channel, encoder: EngineAddress, image: EncoderInput
    ) -> EncodedImage | str:
        peer = Party(encoder.engine_id, encoder.incarnation)
        proof = await prove(channel, self._member, Purpose.ENCODE, peer, self._timeout_s, wait_for_ready=False)
        method: grpc.aio.StreamStreamMultiCallable[EncoderInput, bytes] = channel.stream_stream(
            ENCODE_METHOD, request_serializer=_encode
        )
        call = method(metadata=proof.metadata, timeout=self._timeout_s)
        try:
            await proof.confirm(call)
            await call.write(image)
            await call.done_writing()
            encoded = await call.read()
        finally:
            call.cancel()
        return _decode_encoded(encoded) if isinstance(encoded, bytes) else "the encode engine sent no answer"

    async def _fetch(self, encoder: EngineAddress, mm_hash: str, num_bytes: int, deadline_s: float) -> Fetched:
        """Fetch the embeddings over a link. Cancelling the call cancels the fetch.

        deadline_s: when to give up, in monotonic seconds
        """
        loop = asyncio.get_running_loop()
        over: asyncio.Future[Fetched] = loop.create_future()

        def tell(fetched: Fetched) -> None:
            if not over.done():
                over.set_result(fetched)

        def tell_from_engine(fetched: Fetched) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell, fetched)

        fetch = EmbeddingFetch(encoder, mm_hash, num_bytes, deadline_s, tell_from_engine)
        self._fetches.begin_fetch(fetch)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                return await over
        except TimeoutError:
            return Fetched(None, "the embeddings did not come in time")
        finally:
            if not over.done() or over.cancelled():
                self._fetches.cancel_fetch(fetch)


def _describe(embeddings: PackedArray) -> EncodedImage:
    return EncodedImage(embeddings.dtype, (embeddings.shape[0], embeddings.shape[1]), len(embeddings.data))
