"""Images that another engine encodes, and what becomes of them when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc.aio
import numpy as np
import pytest

from actors.core.loads.embedding_transfers import EmbeddingFetch, Fetched
from actors.core.loads.kept_embeddings import KeptEmbeddings
from actors.core.requests.multimodal import EMBEDDINGS, EncoderInput, MultiModalFeature, PackedArray
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.request_limits import DescribedArray, ImageFacts, find_embeddings_mistake
from actors.core.requests.sampling_params import SamplingParams
from actors.sessions.remote_encoding import EncodeService, RemoteEncoders
from kv_transfer.links.refused_messages import RefusedMessages
from kv_transfer.params import EngineAddress
from kv_transfer.trust.grpc_proof import GrpcAcceptor
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Trust
from kv_transfer.trust.tls import listen
from tests.trusted import TRUST, member, with_tls

NUM_EMBEDS = 3


def image(name: str) -> EncoderInput:
    return EncoderInput(name, {"pixel_values": PackedArray("float32", (2,), b"12345678")})


def made_of(name: str, num_embeds: int = NUM_EMBEDS) -> PackedArray:
    return PackedArray("float32", (num_embeds, 4), np.full((num_embeds, 4), ord(name), np.float32).tobytes())


def request(address: str, *names: str) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1] * NUM_EMBEDS * len(names),
        sampling_params=SamplingParams(),
        mm_features=tuple(
            MultiModalFeature(name, number * NUM_EMBEDS, NUM_EMBEDS, NUM_EMBEDS) for number, name in enumerate(names)
        ),
        encoder_inputs=tuple(map(image, names)),
        encoder=EngineAddress("encode-0", 1, address),
    )


class Links:
    """Fetches from kept embeddings, or never."""

    def __init__(self, kept_embeddings: KeptEmbeddings | None) -> None:
        self.kept_embeddings = kept_embeddings
        self.begun: list[EmbeddingFetch] = []
        self.cancelled: list[EmbeddingFetch] = []

    def begin_fetch(self, fetch: EmbeddingFetch) -> None:
        self.begun.append(fetch)
        if self.kept_embeddings is not None:
            made = self.kept_embeddings.get(fetch.mm_hash)
            fetch.on_over(Fetched(None, "forgotten") if made is None else Fetched(made.data[: fetch.num_bytes]))

    def cancel_fetch(self, fetch: EmbeddingFetch) -> None:
        self.cancelled.append(fetch)


@pytest.fixture
def kept_embeddings() -> KeptEmbeddings:
    return KeptEmbeddings()


async def made(item: EncoderInput) -> PackedArray:
    return made_of(item.mm_hash)


@asynccontextmanager
async def encode_engine(
    encode: Callable[[EncoderInput], Awaitable[PackedArray]], kept_embeddings: KeptEmbeddings, trust: Trust = TRUST
) -> AsyncIterator[tuple[str, EncodeService]]:
    acceptor = GrpcAcceptor(trust)
    service, server = (
        EncodeService(encode, kept_embeddings, Party("encode-0", 1), acceptor, RefusedMessages()),
        grpc.aio.server(),
    )
    server.add_generic_rpc_handlers((service.handler(), acceptor.handler()))
    port = listen(server, "127.0.0.1:0", trust.tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", service
    finally:
        await server.stop(0)


def find_mistake(described: DescribedArray, num_embeds: int) -> str | None:
    return find_embeddings_mistake(described, ImageFacts(hidden_size=4), num_embeds)


async def test_an_image_is_encoded_once_for_all_who_ask(kept_embeddings: KeptEmbeddings) -> None:
    may_go_on = asyncio.Event()

    async def encode(item: EncoderInput) -> PackedArray:
        await may_go_on.wait()
        return made_of(item.mm_hash)

    encoders, others = (
        RemoteEncoders(60.0, Links(kept_embeddings), KeptEmbeddings(), member(), find_mistake),
        RemoteEncoders(60.0, Links(kept_embeddings), KeptEmbeddings(), member(), find_mistake),
    )
    async with encode_engine(encode, kept_embeddings) as (address, service):
        asking = asyncio.gather(encoders.embed(request(address, "a", "b")), others.embed(request(address, "b", "a")))
        asyncio.get_running_loop().call_soon(may_go_on.set)
        first, second = await asking
        again = await encoders.embed(request(address, "a"))
    expected = {name: EncoderInput(name, {EMBEDDINGS: made_of(name)}) for name in "ab"}
    assert first.encoder_inputs == (expected["a"], expected["b"])
    assert second.encoder_inputs == (expected["b"], expected["a"])
    assert again.encoder_inputs == (expected["a"],)
    assert service.num_encoded == 2
    await encoders.close()
    await others.close()


async def never(_: EncoderInput) -> PackedArray:
    await asyncio.Event().wait()
    raise AssertionError("nothing sets it")


async def broken(_: EncoderInput) -> PackedArray:
    raise RuntimeError("out of order")


async def wrong(item: EncoderInput) -> PackedArray:
    return made_of(item.mm_hash, NUM_EMBEDS + 1)


@pytest.mark.parametrize(
    ("encode", "timeout_s", "reason"),
    [(never, 0.3, "did not answer within"), (broken, 60.0, "out of order"), (wrong, 60.0, "embeddings is given 4")],
)
async def test_what_does_not_come_is_encoded_by_who_asked(
    encode: Callable[[EncoderInput], Awaitable[PackedArray]],
    timeout_s: float,
    reason: str,
    kept_embeddings: KeptEmbeddings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoders = RemoteEncoders(timeout_s, Links(kept_embeddings), KeptEmbeddings(), member(), find_mistake)
    async with encode_engine(encode, kept_embeddings) as (address, service):
        asked = request(address, "a")
        assert await encoders.embed(asked) == asked
        for task in service._under_way.values():
            task.cancel()
    [record] = [record for record in caplog.records if record.name == "actors.sessions.remote_encoding"]
    assert reason in record.__dict__["reason"]
    await encoders.close()


@pytest.fixture(scope="module")
def encrypted() -> Trust:
    return with_tls()


async def test_an_image_is_encoded_over_tls(kept_embeddings: KeptEmbeddings, encrypted: Trust) -> None:
    encoders = RemoteEncoders(60.0, Links(kept_embeddings), KeptEmbeddings(), member(trust=encrypted), find_mistake)
    async with encode_engine(made, kept_embeddings, encrypted) as (address, service):
        embedded = await encoders.embed(request(address, "a"))
    assert embedded.encoder_inputs == (EncoderInput("a", {EMBEDDINGS: made_of("a")}),)
    assert service.num_encoded == 1
    await encoders.close()


@pytest.mark.parametrize("stranger", ["in plain text", "of another authority", "with TLS and another secret"])
async def test_nobody_else_has_an_image_encoded_over_tls(
    stranger: str, kept_embeddings: KeptEmbeddings, encrypted: Trust, caplog: pytest.LogCaptureFixture
) -> None:
    assert encrypted.material is not None
    trusts = {
        "in plain text": TRUST,
        "of another authority": with_tls(),
        "with TLS and another secret": Trust(replace(encrypted.material, secrets=(bytes(32),))),
    }
    encoders = RemoteEncoders(
        60.0, Links(kept_embeddings), KeptEmbeddings(), member(trust=trusts[stranger]), find_mistake
    )
    async with encode_engine(made, kept_embeddings, encrypted) as (address, service):
        assert await encoders.embed(request(address, "a")) == request(address, "a"), "who asked encodes it"
    assert service.num_encoded == 0
    assert [record.levelname for record in caplog.records if record.name == "actors.sessions.remote_encoding"] == [
        "WARNING"
    ]
    await encoders.close()


async def test_an_encode_engine_that_is_gone_holds_nobody_up() -> None:
    encoders = RemoteEncoders(60.0, Links(None), KeptEmbeddings(), member(), find_mistake)
    asked = request("127.0.0.1:1", "a")
    assert await asyncio.wait_for(encoders.embed(asked), 30.0) == asked
    await encoders.close()


async def test_embeddings_that_were_forgotten_meanwhile_are_made_by_who_asked(kept_embeddings: KeptEmbeddings) -> None:
    encoders = RemoteEncoders(60.0, Links(KeptEmbeddings()), KeptEmbeddings(), member(), find_mistake)
    async with encode_engine(made, kept_embeddings) as (address, _):
        assert await encoders.embed(request(address, "a")) == request(address, "a")
    await encoders.close()


async def test_a_fetch_that_is_not_over_in_time_is_cancelled(kept_embeddings: KeptEmbeddings) -> None:
    links = Links(None)
    encoders = RemoteEncoders(0.3, links, KeptEmbeddings(), member(), find_mistake)
    async with encode_engine(made, kept_embeddings) as (address, _):
        while not links.begun:  # On a busy machine the time may be over before the fetch begins.
            assert await encoders.embed(request(address, "a")) == request(address, "a")
            encoders._timeout_s *= 2
    assert links.cancelled == links.begun
    assert [fetch.num_bytes for fetch in links.begun] == [len(made_of("a").data)]
    links.begun[0].on_over(Fetched(b"too late"))
    await encoders.close()


async def test_a_request_that_is_aborted_cancels_its_fetch(kept_embeddings: KeptEmbeddings) -> None:
    begun = asyncio.Event()

    class Telling(Links):
        def begin_fetch(self, fetch: EmbeddingFetch) -> None:
            super().begin_fetch(fetch)
            begun.set()

    links = Telling(None)
    encoders = RemoteEncoders(60.0, links, KeptEmbeddings(), member(), find_mistake)
    async with encode_engine(made, kept_embeddings) as (address, _):
        embedding = asyncio.create_task(encoders.embed(request(address, "a")))
        await begun.wait()
        embedding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await embedding
    assert links.cancelled == links.begun
    await encoders.close()
