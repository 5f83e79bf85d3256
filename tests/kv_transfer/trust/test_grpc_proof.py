"""Proofs in front of gRPC calls: nothing is read, told or kept for somebody who has none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from kv_transfer.errors import NotRaypd, OtherProtocol, Untrusted, WrongSecret
from kv_transfer.trust.grpc_proof import CHALLENGE_METHOD, METADATA_LIMITS, GrpcAcceptor, prove
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member, Trust, TrustMaterial
from kv_transfer.trust.secret import ClusterSecret, ClusterSecrets, Purpose

ECHO = "/test.Service/Echo"
INGRESS, DECODE = Party("ingress-0", 3), Party("decode-0", 7)
TIMEOUT_S = 60.0


def ingress(secrets: ClusterSecrets) -> Member:
    return Member(INGRESS, Trust(TrustMaterial(1, tuple(secret.reveal() for secret in secrets.accepted))))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Served:
    """A server with one method behind a proof, and a channel to it."""

    def __init__(self) -> None:
        self.secrets = ClusterSecrets.draw()
        self.clock = Clock()
        self.acceptor = GrpcAcceptor(self.secrets, clock=self.clock)
        self.acceptor.register(Purpose.SESSION, DECODE)
        self.num_read = 0
        self.dialers: list[Party] = []
        self.channel: grpc.aio.Channel
        self.address = ""

    async def echo(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        proven = await self.acceptor.check(context, Purpose.SESSION)
        self.dialers.append(proven.dialer)
        async for message in messages:
            self.num_read += 1
            yield message

    async def ask(self, metadata: Any, message: bytes = b"hello") -> bytes:
        """Send a message once the proof is accepted, as raypd's clients do. Raises AioRpcError if it is refused."""
        method: Any = self.channel.stream_stream(ECHO)
        call = method(metadata=metadata, timeout=TIMEOUT_S)
        # Written into a call that has just ended, a message gives an internal error in place of the call's status.
        if await call.initial_metadata():
            await call.write(message)
        answer: bytes = await call.read()
        return answer

    async def ask_at_once(self, message: bytes) -> grpc.StatusCode:
        """Send a message without a proof, and without waiting for anything; return how that ends."""
        method: Any = self.channel.stream_stream(ECHO)
        call = method(iter([message]), timeout=TIMEOUT_S)
        code: grpc.StatusCode = await call.code()
        return code


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    it = Served()
    server = grpc.aio.server(options=METADATA_LIMITS)
    echo = grpc.method_handlers_generic_handler(
        "test.Service", {"Echo": grpc.stream_stream_rpc_method_handler(it.echo)}
    )
    server.add_generic_rpc_handlers((it.acceptor.handler(), echo))
    it.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(it.address) as it.channel:
        yield it
    await server.stop(0)


async def prove_to(it: Served, secrets: ClusterSecrets | None = None, peer: Party = DECODE) -> Any:
    return await prove(it.channel, ingress(secrets or it.secrets), Purpose.SESSION, peer, TIMEOUT_S)


async def test_a_call_with_a_proof_is_served_and_each_end_knows_the_other() -> None:
    async with served() as it:
        proof = await prove_to(it)
        method: Any = it.channel.stream_stream(ECHO)
        call = method(metadata=proof.metadata, timeout=TIMEOUT_S)
        assert (await proof.confirm(call)).acceptor == DECODE
        await call.write(b"hello")
        assert await call.read() == b"hello"
        call.cancel()
        assert it.dialers == [INGRESS]
        assert it.acceptor.refusals.total == 0


async def test_a_call_without_a_proof_is_refused_before_its_message_is_read() -> None:
    async with served() as it:
        with pytest.raises(grpc.aio.AioRpcError, match="handshake protocol 3") as refused:
            await it.ask(())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # INTERNAL: the call had ended before the message was written.
        assert await it.ask_at_once(b"hello") in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL)
        assert (it.num_read, it.dialers) == (0, [])
        assert dict(it.acceptor.refusals.counts) == {"not_raypd": 2}


async def test_a_stranger_who_asks_gets_no_name_and_no_proof_that_it_could_use() -> None:
    async with served() as it:
        with pytest.raises(WrongSecret, match="does not know the cluster's secret"):
            await prove_to(it, ClusterSecrets.draw())
        with pytest.raises(WrongSecret):
            await prove_to(it, ClusterSecrets.draw(), Party("decode-0", 8))


async def test_a_proof_counts_once() -> None:
    async with served() as it:
        proof = await prove_to(it)
        assert await it.ask(proof.metadata) == b"hello"
        with pytest.raises(grpc.aio.AioRpcError, match="has been used before"):
            await it.ask(proof.metadata)
        assert it.num_read == 1


async def test_a_proof_that_comes_late_is_refused_and_forgotten_ones_stay_refused() -> None:
    async with served() as it:
        used, late = await prove_to(it), await prove_to(it)
        await it.ask(used.metadata)
        it.clock.now_s += 10.5
        for proof in (used, late):
            with pytest.raises(grpc.aio.AioRpcError, match="came too late"):
                await it.ask(proof.metadata)
        await it.ask((await prove_to(it)).metadata)
        assert len(it.acceptor._used) == 1


async def test_a_proof_to_one_process_is_none_to_the_next_one_of_the_same_name() -> None:
    async with served() as it, served() as other:
        other.secrets.replace(it.secrets.accepted)
        proof = await prove_to(it)
        with pytest.raises(grpc.aio.AioRpcError, match="not made by this process"):
            await other.ask(proof.metadata)


async def test_parts_of_two_proofs_make_none() -> None:
    async with served() as it:
        one, other = await prove_to(it), await prove_to(it)
        for index in range(len(one.metadata)):
            mixed = [*one.metadata]
            mixed[index] = other.metadata[index]
            if mixed != list(one.metadata):
                with pytest.raises(grpc.aio.AioRpcError):
                    await it.ask(mixed)
        assert it.dialers == []


async def test_a_secret_that_is_replaced_is_accepted_for_as_long_as_it_is_listed() -> None:
    async with served() as it:
        old, new = it.secrets.accepted[0], ClusterSecret.draw()
        it.secrets.replace([new, old])
        for secret in (old, new):
            assert await it.ask((await prove_to(it, ClusterSecrets([secret]))).metadata) == b"hello"
        it.secrets.replace([new])
        with pytest.raises(WrongSecret):
            await prove_to(it, ClusterSecrets([old]))


async def test_whoever_listens_without_a_handshake_is_told_from_a_wrong_secret() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(NotRaypd, match="has no method for raypd's handshake: it is an older raypd"):
            await prove(channel, ingress(ClusterSecrets.draw()), Purpose.SESSION, DECODE, TIMEOUT_S)
    await server.stop(0)


async def test_a_dialer_of_another_version_is_told_both_numbers() -> None:
    async with served() as it:
        challenge = b"raypd\x04\x01whatever a later version says"
        method: Any = it.channel.stream_stream(CHALLENGE_METHOD)
        call = method(metadata=(("raypd-purpose", "SESSION"), ("raypd-challenge-bin", challenge)), timeout=TIMEOUT_S)
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "speaks handshake protocol 4 and is a newer raypd: this process speaks 3" in await call.details()
        assert dict(it.acceptor.refusals.counts) == {"other_protocol": 1}


async def test_a_server_that_does_not_confirm_gets_no_message() -> None:
    """A server without the secret may listen there by the time of the call."""
    async with served() as it:

        async def take(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            await context.send_initial_metadata((("raypd-confirmation-bin", bytes(32)),))
            async for message in messages:
                yield message

        server = grpc.aio.server()
        handlers: dict[str, Any] = {"Echo": grpc.stream_stream_rpc_method_handler(take)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        proof = await prove_to(it)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method: Any = channel.stream_stream(ECHO)
            call = method(metadata=proof.metadata, timeout=TIMEOUT_S)
            with pytest.raises(Untrusted):
                await proof.confirm(call)
            call.cancel()
        await server.stop(0)


async def test_a_challenge_reads_no_message_and_large_metadata_is_refused() -> None:
    async with served() as it:
        method: Any = it.channel.stream_stream(CHALLENGE_METHOD)
        sent = 0

        async def flood() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(10_000):
                yield bytes(2**16)
                sent += 1

        call = method(flood(), metadata=(("raypd-purpose", "SESSION"),), timeout=TIMEOUT_S)
        assert await call.code() is not grpc.StatusCode.OK  # Ended while the client writes: with a reset, at times.
        assert sent < 1000
        call = method(metadata=(("raypd-challenge-bin", bytes(8000)),), timeout=TIMEOUT_S)
        assert await call.code() is not grpc.StatusCode.OK


async def test_nothing_is_kept_for_strangers() -> None:
    async with served() as it:
        method: Any = it.channel.stream_stream(CHALLENGE_METHOD)
        challenges = [await prove_to(it) for _ in range(3)]
        assert len(it.acceptor._used) == 0
        assert len({proof.metadata[1][1] for proof in challenges}) == 3
        calls = [method(metadata=(("raypd-purpose", "NOTHING"),), timeout=TIMEOUT_S) for _ in range(20)]
        assert {await call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        await asyncio.sleep(0)
        assert it.acceptor.refusals.total == 20


async def test_a_newer_acceptor_is_told_from_a_wrong_secret() -> None:
    async def newer(_: AsyncIterator[bytes], context: Any) -> None:
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            "it speaks handshake protocol 2 and is an older raypd: this process speaks 3",
        )

    server = grpc.aio.server()
    service, method = CHALLENGE_METHOD.strip("/").split("/")
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.stream_stream_rpc_method_handler(newer)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(OtherProtocol, match="this process speaks 3"):
            await prove(channel, ingress(ClusterSecrets.draw()), Purpose.SESSION, DECODE, TIMEOUT_S)
    await server.stop(0)
