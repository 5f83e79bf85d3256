"""Encoders on engines of their own: who prefills lets them make the embeddings of images.

An engine gives the encode engine that its request names what the image is made of, over gRPC, and gets the embeddings
back. It waits for them before the scheduler hears of the request, for as long as encode_timeout_s; what fails, or does
not come by then, the engine encodes itself. So nothing is lost with an encode engine, and no request fails by it.

The embeddings take the place of what they were made of in the request (EMBEDDINGS among its arrays), and all that
follows is as ever: the encoder's budget and cache count them, and a preempted request still has them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

import grpc
import grpc.aio
import msgspec

from actors.core.multimodal import EMBEDDINGS, EncoderInput, PackedArray
from actors.core.request import EngineCoreRequest
from actors.session_messages import MAX_MESSAGE_BYTES
from actors.sized_cache import SizedCache
from kv_transfer.params import EngineAddress

logger = logging.getLogger(__name__)

ENCODE_METHOD: Final = "/raypd.engine.v1.Engine/Encode"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_CACHE_BYTES: Final = 256 << 20
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_input: Final = msgspec.msgpack.Decoder(EncoderInput).decode
_decode_array: Final = msgspec.msgpack.Decoder(PackedArray).decode


class EncodeService:
    """The end that encodes. Each image once for all who ask at a time, or soon after. Lives on one event loop."""

    def __init__(self, encode: Callable[[EncoderInput], Awaitable[PackedArray]]) -> None:
        """encode: makes an image's embeddings, [num_embeds, hidden_size]"""
        self._encode = encode
        self._made: SizedCache[str, PackedArray] = SizedCache(_CACHE_BYTES)
        self._under_way: dict[str, asyncio.Task[PackedArray]] = {}
        self.num_encoded = 0
        """Images encoded for others so far."""

    def handler(self) -> grpc.GenericRpcHandler:
        """The gRPC handler for those who ask."""
        service, method = ENCODE_METHOD.strip("/").split("/")
        serve = grpc.unary_unary_rpc_method_handler(
            self._answer, request_deserializer=_decode_input, response_serializer=_encode
        )
        return grpc.method_handlers_generic_handler(service, {method: serve})

    async def _answer(
        self, image: EncoderInput, context: grpc.aio.ServicerContext[EncoderInput, PackedArray]
    ) -> PackedArray:
        if (known := self._made.get(image.mm_hash)) is not None:
            return known
        task = self._under_way.get(image.mm_hash)
        if task is None:
            task = self._under_way[image.mm_hash] = asyncio.create_task(self._make(image))
        # Others may wait for it as well.
        return await asyncio.shield(task)

    async def _make(self, image: EncoderInput) -> PackedArray:
        try:
            embeddings = await self._encode(image)
            self.num_encoded += 1
            self._made.put(image.mm_hash, embeddings, len(embeddings.data))
            return embeddings
        finally:
            del self._under_way[image.mm_hash]


class RemoteEncoders:
    """The end that asks. Lives on one event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def embed(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request with the embeddings of its images, as far as they come in time."""
        assert request.encoder is not None
        encoder = request.encoder
        sizes = {feature.mm_hash: feature.num_embeds for feature in request.mm_features}
        inputs = await asyncio.gather(
            *(self._ask(encoder, image, sizes[image.mm_hash]) for image in request.encoder_inputs)
        )
        return replace(request, encoder_inputs=tuple(inputs))

    async def close(self) -> None:
        """Hang up."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    async def _ask(self, encoder: EngineAddress, image: EncoderInput, num_embeds: int) -> EncoderInput:
        address = encoder.control_address
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=_OPTIONS)
        method = channel.unary_unary(ENCODE_METHOD, request_serializer=_encode, response_deserializer=_decode_array)
        try:
            embeddings = await method(image, timeout=self._timeout_s)
            reason = "" if embeddings.shape[0] == num_embeds else f"embeddings of shape {embeddings.shape} came"
        except grpc.aio.AioRpcError as error:
            reason = error.details() or str(error.code())
        except grpc.aio.UsageError as error:
            reason = f"the channel is closed: {error}"
        if reason:
            fields = {"engine_id": encoder.engine_id, "reason": reason}
            logger.warning("an encode engine has failed, the image is encoded here", extra=fields)
            return image
        return EncoderInput(image.mm_hash, {EMBEDDINGS: embeddings})
